"""vLLM with a model that is divided among two devices (tensor parallelism): what one device computes."""

from __future__ import annotations

import copy
import ctypes
import os
import shutil
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from generation.test_native import largest_gap, make, make_request, rows, weights
from generation.test_vllm import (
    GREEDY,
    MODELS,
    NEAR,
    cache_bytes,
    generate,
    held,
    listening,
    load,
    sleep,
)
from generation.vllm_process import EngineProcess, needs_vllm
from transformers import PreTrainedModel

from hydraflow.generation.base import SamplingParams
from hydraflow.generation.native import NativeEngine
from hydraflow.generation.vllm import VllmEngine

pytestmark = [needs_vllm, pytest.mark.slow]


def one_head_of_keys() -> Any:
    """Both devices hold the same keys and values."""
    config = copy.deepcopy(MODELS["untied"])
    config.num_key_value_heads = 1
    return config


def give_little_shared_memory() -> None:
    """A /dev/shm of one page for this process, where it may have one of its own."""
    libc, new_mounts, private = ctypes.CDLL(None), 0x20000, 0x44000
    if libc.unshare(new_mounts) == 0:
        libc.mount(None, b"/", None, private, None)
        libc.mount(b"tmpfs", b"/dev/shm", b"tmpfs", 0, b"size=4k")


def shared_memory(engine: VllmEngine) -> int:
    """Bytes of /dev/shm."""
    return shutil.disk_usage("/dev/shm").total


class Divided:
    """The processes of one engine, which have hardly any shared memory. All run the same functions."""

    def __init__(self, config: Any, *, tensor: int = 1, stages: int = 1, **given: Any):
        with socket.create_server(("127.0.0.1", 0)) as listener:
            port, sizes = listener.getsockname()[1], (tensor, stages)
            places = [(rank, sizes, port, None if rank else listener) for rank in range(tensor * stages)]
            self.processes = [
                EngineProcess(config, place=place, before=give_little_shared_memory, **given)
                for place in places
            ]

    def run(self, function: Callable[..., Any], *args: Any) -> list[Any]:
        for process in self.processes:
            process.ask(function, *args)
        return [process.answer() for process in self.processes]

    def stop(self) -> None:
        for process in self.processes:
            process.stop()


def shared_files(engine: Divided) -> list[str]:
    """Files of /dev/shm that its processes use."""
    maps = [file.path for one in engine.processes for file in psutil.Process(one.process.pid).memory_maps()]
    return [path for path in maps if path.startswith("/dev/shm") and Path(path).exists()]


@pytest.fixture(scope="module", params=["tied", "one head of keys and values"])
def config(request: pytest.FixtureRequest) -> Any:
    return MODELS["tied"] if request.param == "tied" else one_head_of_keys()


@pytest.fixture(scope="module")
def engine(config: Any) -> Iterator[Divided]:
    engine = Divided(config, tensor=2, max_num_seqs=16)
    yield engine
    engine.stop()


@pytest.mark.parametrize("max_bytes", [1000, 10**6], ids=["parts", "at once"])
def test_weights_samples_and_log_probs_are_those_of_one_device(
    engine: Divided, config: Any, max_bytes: int
) -> None:
    model = make(config)
    for parameter in model.parameters():
        parameter.data.add_(max_bytes / 10**7)
    load(engine, model, max_bytes)
    for found in engine.run(held):
        assert all(torch.equal(found[name], tensor) for name, tensor in weights(model).items())
    request = make_request([1, 3, 9, 17, 40], samples=3)
    for output in engine.run(generate, request, GREEDY):
        assert rows(output) == rows(NativeEngine(model).generate(request, GREEDY))
    sampled = engine.run(generate, request, SamplingParams(max_tokens=16, temperature=0.7, top_p=0.9))
    assert rows(sampled[0]) == rows(sampled[1]), "all processes draw the same tokens"
    assert largest_gap(model, request, sampled[0], 0.7) < NEAR


def assert_it_sleeps_and_leaves_nothing(
    engine: Divided, before: PreTrainedModel, after: PreTrainedModel
) -> None:
    load(engine, before, 10_000)
    engine.run(sleep)
    assert engine.run(cache_bytes) == [0] * len(engine.processes)
    load(engine, after, 10_000)
    request = make_request([5, 7])
    expected = rows(NativeEngine(after).generate(request, GREEDY))
    assert rows(engine.run(generate, request, GREEDY)[0]) == expected
    assert shared_files(engine) == [] and set.union(*engine.run(listening)) <= {"127.0.0.1", "::1"}


def test_it_sleeps_and_leaves_nothing(engine: Divided, config: Any) -> None:
    assert_it_sleeps_and_leaves_nothing(engine, make(config), make(config))


@pytest.mark.skipif(os.geteuid() != 0, reason="only root gives a process mounts of its own")
def test_the_tests_of_this_file_ran_without_shared_memory(engine: Divided) -> None:
    """Weights, samples and collectives take none."""
    if (sizes := engine.run(shared_memory))[0] == shutil.disk_usage("/dev/shm").total:
        pytest.skip("this machine allows no mounts of one's own")
    assert sizes == [4096, 4096]
