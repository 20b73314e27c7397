"""Weights that rest in host memory between calls: nothing that is learned changes by a bit, and code that
uses them finds them on the device. The host memory of these tests is one apart (`memory_apart.py`)."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from engine import rank_jobs as jobs
from engine.alike import assert_same
from engine.memory_apart import MemoryApart, held
from engine.pool import Ranks

from hydraflow.engine.config import FSDPConfig, WrapPolicyConfig
from hydraflow.engine.fsdp.engine import FSDPEngine
from hydraflow.models.config import ModelConfig

REST = {"param_offload": True}
LAYOUTS: dict[str, dict[str, Any]] = {
    "usual": {},
    "bf16": {"fsdp": {"dtype": "bf16"}},
    "kept_gathered": {"fsdp": {"reshard_after_forward": False}},
    "one_unit": {"fsdp": {"wrap_policy": WrapPolicyConfig(min_num_params=10**6)}},
    "moments_too": {"fsdp": {"optimizer_offload": True}},
    "value": {"head": "value"},
    "adapters": {"model": {"lora_rank": 2}},
}


def resting(layout: str = "usual") -> dict[str, Any]:
    options = LAYOUTS[layout]
    return {**options, "fsdp": {**options.get("fsdp", {}), **REST}}


def moves(engine: FSDPEngine) -> list[str]:
    assert isinstance(engine._param_offload, MemoryApart)
    return engine._param_offload.moves


@pytest.mark.parametrize("layout", LAYOUTS)
def test_results_are_the_same_bit_by_bit(tiny: str, ranks: Ranks, layout: str) -> None:
    """Also where the gradient rests between the backward pass and the optimizer step."""
    plain = ranks.run(jobs.train, tiny, LAYOUTS[layout])
    for moved, usual in zip(ranks.run(jobs.train, tiny, resting(layout)), plain, strict=True):
        assert moved["reported"] == usual["reported"]
        for mine, other in zip(moved["seen"], usual["seen"], strict=True):
            assert torch.equal(mine, other)
        assert_same(moved["weights"], usual["weights"])


def test_at_rest_nothing_can_be_read(tiny: str) -> None:
    """What the other tests rest on: a method that forgot to wake the weights would compute NaN."""
    engine = jobs.make_engine(tiny, resting())
    assert moves(engine) == ["rest"]
    assert all(bool(tensor.isnan().all()) for tensor in held(engine.module))
    engine._param_offload._at_rest = False
    assert bool(engine.forward([jobs.make_batch()]).get("log_probs").values().isnan().all())


def test_parameters_stay_the_same_objects(tiny: str) -> None:
    engine = jobs.make_engine(tiny, resting())
    before = list(map(id, engine.module.parameters()))
    jobs.step_once(engine, 0)
    state = {id(parameter): slots["exp_avg"] for parameter, slots in engine._optimizer.state.items()}
    jobs.step_once(engine, 1)
    assert list(map(id, engine.module.parameters())) == before == list(state)
    for parameter, slots in engine._optimizer.state.items():
        assert slots["exp_avg"] is state[id(parameter)] and slots["step"] == 2
    assert moves(engine) == ["rest", *["wake", "rest"] * 4]


def test_weights_move_once_each_way(tiny: str) -> None:
    engine = jobs.make_engine(tiny, resting())
    engine.rest()
    engine.lr_step()
    engine.stored_bytes(jobs.CONTENTS)
    assert moves(engine) == ["rest"]
    engine._param_offload.wake()
    engine._param_offload.wake()
    FSDPEngine.forward_backward(engine, [jobs.make_batch()], jobs.loss_of)
    FSDPEngine.optimizer_step(engine)
    assert moves(engine) == ["rest", "wake"]


def test_weights_do_not_rest_while_they_are_read(tiny: str) -> None:
    engine, batch = jobs.make_engine(tiny, resting()), jobs.make_batch()
    wanted = jobs.full_weights(jobs.make_engine(tiny))
    stream = engine.weights()
    assert moves(engine) == ["rest"]
    found = [next(stream)]
    engine.rest()
    said = engine.forward([batch]).get("log_probs").values()
    assert moves(engine) == ["rest", "wake"]
    found += [(name, tensor.clone()) for name, tensor in stream]
    assert moves(engine) == ["rest", "wake", "rest"]
    assert all(torch.equal(tensor, wanted[name]) for name, tensor in found)
    assert len(found) == len(wanted)
    assert torch.equal(engine.forward([batch]).get("log_probs").values(), said)


def test_a_reader_that_stops_half_way_lets_them_rest(tiny: str) -> None:
    engine = jobs.make_engine(tiny, resting())
    stream = engine.weights()
    next(stream)
    stream.close()
    assert moves(engine) == ["rest", "wake"]
    engine.rest()
    assert moves(engine) == ["rest", "wake", "rest"]


@pytest.mark.parametrize("fsdp", [{}, REST, {"offload_policy": True}, {"offload_policy": True, **REST}])
def test_nothing_moves_where_nothing_is_to(
    tiny: str, monkeypatch: pytest.MonkeyPatch, fsdp: dict[str, Any]
) -> None:
    """A CPU is its own host, and FSDP2's policy keeps shards there all the time."""

    def moved(*args: object) -> None:
        raise AssertionError("weights move")

    monkeypatch.setattr("hydraflow.engine.offload.return_memory", moved)
    engine = FSDPEngine(
        ModelConfig(path=tiny), FSDPConfig(dtype="fp32", **fsdp), None, head="policy", device=jobs.CPU
    )
    engine.rest()
    engine.forward([jobs.make_batch()])


def test_a_hugging_face_directory_is_written_from_resting_weights(tiny: str, tmp_path: Any) -> None:
    engine = jobs.make_engine(tiny, resting())
    engine.save_hf(tmp_path / "saved")
    assert moves(engine) == ["rest", "wake", "rest"]
    again = jobs.full_weights(jobs.make_engine(str(tmp_path / "saved")))
    wanted = jobs.full_weights(jobs.make_engine(tiny))
    assert all(torch.equal(again[name], weight) for name, weight in wanted.items())


NO_GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


@pytest.mark.slow
@pytest.mark.parametrize("device_type", ["cpu", pytest.param("cuda", marks=NO_GPU)])
def test_a_device_gets_its_memory_back(tiny: str, device_type: str) -> None:
    """The only test in which weights go to another device; on a CPU nothing moves and nothing is freed."""
    pool = Ranks(1, device_type)
    (plain,), (moved,) = (pool.run(jobs.train_and_rest, tiny, device_type, fsdp) for fsdp in ({}, REST))
    pool.stop()
    assert plain["freed"] == [0, 0, 0]
    assert all(freed >= (moved["shards"] if device_type == "cuda" else 0) for freed in moved["freed"])
    assert_same(moved["weights"], plain["weights"], 1e-8)
