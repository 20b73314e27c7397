"""Compares ranks that divide a model with a single rank: FSDP2's sharding and replication, Ulysses,
offloading, and Megatron-Core's tensor, sequence, pipeline, context, data and expert parallelism.

    python scripts/gpu_ranks.py [--device cpu] [--at-once 4] [LAYOUT ...]

If there are as many GPUs as a layout has ranks, each rank uses its own, with NCCL. Otherwise all ranks share
the first GPU, and collectives go through host memory (`through_host.py`), which tests everything but NCCL.
Prints one JSON object per layout, of a tiny model in float32: the largest differences of log-probabilities
and of weights after a step, and the relative difference of the gradient norm. Exit code 1: a number is wrong.
`--device cpu` tests the check itself, with collectives as on one GPU.
"""

from __future__ import annotations

import argparse
import os
import socket
import sys
import tempfile
import time
import traceback
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import through_host
import torch
import torch.multiprocessing as mp
from gpu_check import EXPERTS, SMALL, loss, rows, say, write_model

from hydraflow.protocol import ragged

LIMIT_S = 240
"""Time limit for the ranks of a layout, from their start."""
PRELOADED = ("through_host", "hydraflow.protocol.ragged")
"""Modules that are imported once for all ranks, torch with them; `through_host` first, because others import
collectives by name."""
PRELOADED_ON_CPU = (
    *("hydraflow.engine.fsdp.engine", "hydraflow.engine.megatron.engine"),
    "transformers.models.auto.modeling_auto",
)
"""More of them where none may use the device, which a forked process could not."""


@dataclass(frozen=True)
class Layout:
    """How ranks divide a model."""

    ranks: int
    settings: Mapping[str, Any] = field(default_factory=dict)
    """Fields of `FSDPConfig` or `MegatronConfig`."""
    engine: str = "fsdp2"
    kind: str = "qwen3"
    """Model type, as in transformers' config.json."""


def fsdp(ranks: int, **settings: Any) -> Layout:
    return Layout(ranks, settings)


def megatron(ranks: int, kind: str = "qwen3", **sizes: Any) -> Layout:
    """sizes: without their suffix _parallel_size."""
    return Layout(ranks, {f"{name}_parallel_size": size for name, size in sizes.items()}, "megatron", kind)


LAYOUTS = {
    "fsdp": fsdp(2),
    "fsdp, weights kept": fsdp(2, reshard_after_forward=False),
    "fsdp, two copies": fsdp(2, fsdp_size=1),
    "fsdp, two copies of two shards": fsdp(4, fsdp_size=2),
    "fsdp, offloaded": fsdp(2, param_offload=True, optimizer_offload=True),
    "fsdp, offload_policy": fsdp(2, offload_policy=True),
    "ulysses, 2 ranks": fsdp(2, ulysses_sequence_parallel_size=2),
    "ulysses, 4 ranks": fsdp(4, ulysses_sequence_parallel_size=4),
    "megatron, tensor": megatron(2, tensor_model=2),
    "megatron, pipeline": megatron(2, pipeline_model=2),
    "megatron, tensor and pipeline": megatron(4, tensor_model=2, pipeline_model=2),
    "megatron, context": megatron(2, context=2),
    "megatron, data": megatron(2),
    "megatron, experts": megatron(2, "qwen3_moe", expert_model=2),
    "megatron, matrices of experts": megatron(2, "qwen3_moe", tensor_model=2, expert_tensor=2),
}


@dataclass(frozen=True)
class Place:
    """Where the ranks of a layout meet and compute."""

    folder: Path
    """For their results."""
    model: str
    device: str
    port: int
    shared: bool
    """Whether all ranks are on the first device, with collectives through host memory."""


def run_rank(rank: int, layout: Layout, place: Place) -> None:
    """Runs one rank; writes its result, or the text of its error, to the folder."""
    try:
        torch.save(rank_result(rank, layout, place), place.folder / f"{rank}.pt")
    except Exception:  # any: the parent process reports it
        (place.folder / f"{rank}.error").write_text(traceback.format_exc())


def rank_result(rank: int, layout: Layout, place: Place) -> dict[str, Any]:
    """Log-probabilities of the rank's rows, if it is the one of its group that returns them, the gradient
    norm, and weights after a step."""
    if place.shared:
        through_host.start(place.device)
    from hydraflow.engine import process_group
    from hydraflow.engine.config import (
        TRAIN_ENGINES,
        FSDPConfig,
        MegatronConfig,
        OptimConfig,
        WrapPolicyConfig,
    )
    from hydraflow.models.config import ModelConfig

    torch.set_num_threads(1)
    device = torch.device(
        place.device if place.device == "cpu" else f"{place.device}:{0 if place.shared else rank}"
    )
    if place.device != "cpu":
        torch.get_device_module(place.device).set_device(device)
    if place.shared:  # gloo for GPU tensors, too, which `through_host` copies
        process_group.collective_backend = lambda device_type: (
            "gloo" if device_type == "cpu" else f"cpu:gloo,{device_type}:gloo"
        )
    process_group.start(
        rank=rank,
        world_size=layout.ranks,
        address="127.0.0.1",
        port=place.port,
        device_type=place.device,
        timeout_s=LIMIT_S / 2,
    )
    config: Any = (
        MegatronConfig(dtype="fp32", **layout.settings)
        if layout.engine == "megatron"
        else FSDPConfig(dtype="fp32", wrap_policy=WrapPolicyConfig(min_num_params=0), **layout.settings)
    )
    # with a large epsilon, Adam's first step depends on the gradient's size, not only on its sign
    optim = OptimConfig(lr=1e-2, eps=1e-1, clip_grad=1e9)
    core = TRAIN_ENGINES[layout.engine].load()
    engine = core(ModelConfig(path=place.model), config, optim, head="policy", device=device)
    batch, here = rows(SMALL["vocab_size"], 8, 8, 64), engine.coordinates()
    places = range(here.data_rank, len(batch), here.data_size)
    own = batch.select_idxs(places)
    micro = own.split(len(own) // 2)
    scored = ragged.rows(engine.forward(micro).get("log_probs").cpu())
    engine.forward_backward(micro, loss)
    norm = engine.optimizer_step()["grad_norm"]
    weights = {name: one.float().cpu().clone() for name, one in engine.weights()}
    by_row = dict(zip(places, scored, strict=True)) if here.is_collect else {}
    return dict(scored=by_row, norm=norm, weights=weights)


def preload(device: str) -> None:
    """Before the first process is started: all are forked from one that has imported PRELOADED."""
    os.environ["PYTHONPATH"] = os.pathsep.join(sys.path)
    os.environ["OMP_NUM_THREADS"] = "1"  # a fork copies no threads
    more = PRELOADED_ON_CPU if device == "cpu" else ()
    mp.get_context("forkserver").set_forkserver_preload([*PRELOADED, *more])


def written_model(kind: str, folder: Path) -> str:
    """Writes a model in a process that has imported what that takes; returns its path. RuntimeError if it
    fails."""
    sizes = SMALL | (EXPERTS if kind == "qwen3_moe" else {})
    write = (sizes, folder, torch.float32, kind)
    process = mp.get_context("forkserver").Process(target=write_model, args=write)
    process.start()
    process.join()
    if process.exitcode:
        raise RuntimeError(f"the model could not be written, exit code {process.exitcode}")
    return str(folder)


def answers(layout: Layout, model: str, device: str, *, shared: bool) -> list[dict[str, Any]]:
    """The result of each rank. RuntimeError with the ranks' errors, or if one exceeds LIMIT_S."""
    with tempfile.TemporaryDirectory() as folder, socket.create_server(("127.0.0.1", 0)) as listener:
        place = Place(Path(folder), model, device, listener.getsockname()[1], shared)
        listener.close()
        processes = [
            mp.get_context("forkserver").Process(target=run_rank, args=(rank, layout, place), daemon=True)
            for rank in range(layout.ranks)
        ]
        for process in processes:
            process.start()
        until = time.monotonic() + LIMIT_S
        for process in processes:
            process.join(max(0.0, until - time.monotonic()))
            process.kill()
        if errors := [error.read_text() for error in place.folder.glob("*.error")]:
            raise RuntimeError("\n".join(errors))
        missing = [rank for rank in range(layout.ranks) if not (place.folder / f"{rank}.pt").exists()]
        if missing:
            raise RuntimeError(f"ranks {missing} did not answer within {LIMIT_S} seconds")
        return [torch.load(place.folder / f"{rank}.pt") for rank in range(layout.ranks)]


def largest(differences: Iterable[torch.Tensor]) -> float:
    """The largest absolute value; NaN if there is one, which Python's max may miss."""
    return float(torch.stack([one.abs().max() for one in differences]).max())


def compare(name: str, wanted: Mapping[str, Any], model: str, device: str, *, shared: bool) -> bool:
    """Whether the ranks of a layout compute what a single rank does (`wanted`); prints the differences."""
    try:
        ranks = answers(LAYOUTS[name], model, device, shared=shared)
    except RuntimeError as error:
        say(name, right=False, error=str(error)[-4000:])
        return False
    scored = {row: one for rank in ranks for row, one in rank["scored"].items()}
    off = largest(scored[row] - one for row, one in wanted["scored"].items())
    norm = largest(torch.tensor(rank["norm"] / wanted["norm"] - 1) for rank in ranks)
    far = largest(rank["weights"][key] - one for rank in ranks for key, one in wanted["weights"].items())
    good = off < 1e-4 and norm < 1e-4 and far < 1e-5
    say(name, log_probs=off, norm=norm, weights=far, through_host=shared, right=good)
    return good


def main() -> int:
    """Runs the layouts; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--at-once", type=int, default=1, help="layouts that run at the same time")
    parser.add_argument("layouts", nargs="*", metavar="LAYOUT", help=f"by default all: {', '.join(LAYOUTS)}")
    given = parser.parse_args()
    names = given.layouts or [*LAYOUTS]
    if unknown := set(names) - LAYOUTS.keys():
        parser.error(f"no such layout: {', '.join(sorted(unknown))}; there are {', '.join(LAYOUTS)}")
    devices = 0 if given.device == "cpu" else torch.get_device_module(given.device).device_count()
    if given.device != "cpu" and not devices:
        print(f"torch {torch.__version__} finds no {given.device} device here", file=sys.stderr)
        return 2
    preload(given.device)
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(given.at_once) as pool:
        models, wanted = {}, {}
        for kind in sorted({LAYOUTS[name].kind for name in names}):
            models[kind] = written_model(kind, Path(folder, kind))
            (wanted[kind],) = answers(Layout(1), models[kind], given.device, shared=False)

        def right(name: str) -> bool:
            layout = LAYOUTS[name]
            shared = layout.ranks > devices
            return compare(name, wanted[layout.kind], models[layout.kind], given.device, shared=shared)

        return 0 if all([*pool.map(right, names)]) else 1


if __name__ == "__main__":
    raise SystemExit(main())
