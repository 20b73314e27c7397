"""Checkpoints of the Megatron engine: the same layout goes on bit by bit; other layouts and the FSDP engine
read the same weights and moments, and it reads theirs."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from engine import megatron_jobs as jobs
from engine.alike import assert_same
from engine.foreign import INDEX, put_into_index, put_into_shard
from engine.megatron_jobs import state_of
from engine.megatron_models import sizes
from engine.pool import Ranks
from engine.rank_jobs import CONTENTS
from engine.written import Written, written_once
from model_merger.directories import assert_same_bits, merge, read
from transformers import AutoModelForCausalLM

SCHEDULE = {"optim": {"lr_warmup_steps": 1, "lr_scheduler_type": "linear"}, "total_steps": 9}
PLAIN = {"use_distributed_optimizer": False}
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "alone": (1, {"megatron": sizes()}),
    "tp 2": (2, {"megatron": sizes(2)}),
    "pp 2": (2, {"megatron": sizes(1, 2)}),
    "data 2": (2, {"megatron": sizes()}),
    "data 2, plain optimizer": (2, {"megatron": sizes(**PLAIN)}),
    "tp 2 pp 2": (4, {"megatron": sizes(2, 2)}),
    "tp 2, data 2": (4, {"megatron": sizes(2)}),
    "pp 2, data 2, plain optimizer": (4, {"megatron": sizes(1, 2, **PLAIN)}),
    "fsdp 1": (1, {}),
    "fsdp 2": (2, {}),
}
"""Ranks and options."""
CORE = [name for name, (_, options) in LAYOUTS.items() if options]


def options_of(layout: str, **others: Any) -> dict[str, Any]:
    return {**SCHEDULE, **LAYOUTS[layout][1], **others}


def run(
    job: Any,
    pools: dict[int, Ranks],
    path: Path,
    layout: str,
    folder: Path,
    others: dict[str, Any] | None = None,
    **more: Any,
) -> list[dict[str, Any]]:
    """What the layout's ranks find. others: options besides the layout's; more: arguments of the job."""
    options = options_of(layout, **others or {})
    return pools[LAYOUTS[layout][0]].run(partial(job, **more), str(path), options, str(folder))


write, load = partial(run, jobs.write_checkpoint), partial(run, jobs.read_checkpoint)


@pytest.fixture(scope="module")
def usual(
    pools: dict[int, Ranks], models: Path, tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str], Written]:
    """Checkpoints of qwen2, by layout."""
    return written_once(partial(write, pools, models / "qwen2"), tmp_path_factory)


def steps_of(found: dict[str, Any]) -> set[float]:
    """How often the optimizer has updated each parameter."""
    if "moments" in found:
        return {float(value) for name, value in found["moments"].items() if name.endswith(".step")}
    return found["steps"]


def assert_holds(got: list[dict[str, Any]], wanted: list[dict[str, Any]]) -> None:
    assert_same(state_of(got), state_of(wanted))
    for rank in got:
        assert_same(rank["weights"], wanted[0]["weights"])
        assert rank["lr"] == wanted[0]["lr"] == 0.01 * 7 / 8
        assert steps_of(rank) == steps_of(wanted[0]) == {2.0}


@pytest.mark.parametrize("layout", CORE)
def test_the_same_layout_goes_on_bit_by_bit(
    pools: dict[int, Ranks], models: Path, usual: Callable[[str], Written], layout: str
) -> None:
    """Two more steps; also in an engine that has trained something else before."""
    written, folder = usual(layout)
    for trained in (0, 1):
        found = load(pools, models / "qwen2", layout, folder, trained=trained)
        assert_holds(found, written)
        for rank in found:
            assert_same(rank["next"], written[0]["next"])
    assert len(state_of(written)) == 2 * len(written[0]["weights"])


@pytest.mark.parametrize("layout", ["alone", "tp 2", "data 2", "data 2, plain optimizer", "tp 2 pp 2"])
def test_bf16_goes_on_bit_by_bit(pools: dict[int, Ranks], models: Path, tmp_path: Path, layout: str) -> None:
    """From the optimizer's own weights, which are in float32."""
    core: dict[str, Any] = {"megatron": {**LAYOUTS[layout][1]["megatron"], "dtype": "bf16"}}
    written = write(pools, models / "qwen2", layout, tmp_path, core)
    found = load(pools, models / "qwen2", layout, tmp_path, core)
    assert_holds(found, written)
    for slot in ("weight", "exp_avg"):
        assert_same(*(jobs.assembled([rank["state"][slot] for rank in ranks]) for ranks in (found, written)))
    weights = jobs.assembled([rank["state"]["weight"] for rank in found])
    assert {tensor.dtype for tensor in weights.values()} == {torch.float32}
    for rank in found:
        assert_same(rank["next"], written[0]["next"])
        for name, tensor in rank["weights"].items():
            assert torch.equal(tensor, weights[name].bfloat16())
            assert not torch.equal(weights[name], weights[name].bfloat16().float())


FEW = ["alone", "tp 2 pp 2", "pp 2, data 2, plain optimizer", "fsdp 2"]
READERS = {"tp 2 pp 2": list(LAYOUTS), "data 2": FEW, "fsdp 2": [*FEW, "tp 2, data 2"]}
"""Layouts that read what one has written; a file says of its writer only how it was cut."""


@pytest.mark.parametrize("written_by", READERS)
def test_other_layouts_read_it(
    pools: dict[int, Ranks], models: Path, usual: Callable[[str], Written], written_by: str
) -> None:
    written, folder = usual(written_by)
    for layout in READERS[written_by]:
        found = load(pools, models / "qwen2", layout, folder)
        assert_holds(found, written)
        for name, value in written[0]["next"].items():
            torch.testing.assert_close(found[0]["next"][name], value, rtol=0, atol=1e-5)


@pytest.mark.parametrize(("family", "head"), [("llama", "policy"), ("qwen3", "policy"), ("qwen2", "value")])
def test_a_checkpoint_goes_round(
    pools: dict[int, Ranks], models: Path, tmp_path: Path, family: str, head: str
) -> None:
    """Each layout saves what it has read from the one before."""
    rounds = ["fsdp 2", "tp 2", "pp 2", "data 2", "tp 2 pp 2", "fsdp 1"]
    path = models / family
    first = last = write(pools, path, rounds[0], tmp_path / "0", {"head": head})
    for number, layout in enumerate(rounds[1:], 1):
        options = options_of(layout, head=head)
        folders = str(tmp_path / str(number - 1)), str(tmp_path / str(number))
        last = pools[LAYOUTS[layout][0]].run(jobs.pass_on, str(path), options, *folders)
    assert_same(state_of(last), state_of(first))
    assert_same(last[0]["weights"], first[0]["weights"])


def test_bf16_is_read_in_float32(pools: dict[int, Ranks], models: Path, tmp_path: Path) -> None:
    core: dict[str, Any] = {"megatron": sizes(2, dtype="bf16")}
    written = write(pools, models / "qwen2", "tp 2", tmp_path, core)
    weights = jobs.assembled([rank["state"]["weight"] for rank in written])
    for layout in ("fsdp 2", "pp 2"):
        found = load(pools, models / "qwen2", layout, tmp_path, more=0)
        assert_same(found[0]["weights"], weights)


# --- parts


@pytest.mark.parametrize("layout", ["tp 2", "data 2", "fsdp 2"])
def test_parts_can_be_read_by_themselves(
    pools: dict[int, Ranks],
    models: Path,
    usual: Callable[[str], Written],
    tmp_path: Path,
    layout: str,
) -> None:
    """The same for both engines."""
    path = models / "qwen2"
    written, folder = usual(layout)
    fresh = write(pools, path, layout, tmp_path, steps=0)
    weights = load(pools, path, layout, folder, contents=["model"], more=0)
    assert_same(weights[0]["weights"], written[0]["weights"])
    assert state_of(weights) == {} and weights[0]["lr"] == 0.0
    moments = load(pools, path, layout, folder, contents=["optimizer"], more=0)
    assert_same(state_of(moments), state_of(written))
    assert_same(moments[0]["weights"], fresh[0]["weights"])
    assert steps_of(moments[0]) == {2.0} and moments[0]["lr"] == 0.0


@pytest.mark.parametrize("layout", ["tp 2", "pp 2", "fsdp 2"])
def test_parts_can_be_written_by_themselves(
    pools: dict[int, Ranks], models: Path, tmp_path: Path, layout: str
) -> None:
    path = models / "qwen2"
    written = write(pools, path, layout, tmp_path / "model", contents=["model"])
    found = load(pools, path, "pp 2", tmp_path / "model", contents=["model"], more=0)
    assert_same(found[0]["weights"], written[0]["weights"])
    write(pools, path, layout, tmp_path / "optimizer", contents=["optimizer"])
    found = load(pools, path, "pp 2", tmp_path / "optimizer", contents=["optimizer"], more=0)
    assert_same(state_of(found), state_of(written))


@pytest.mark.parametrize("layout", ["tp 2", "data 2", "pp 2"])
def test_before_its_first_step_an_optimizer_has_no_state(
    pools: dict[int, Ranks], models: Path, tmp_path: Path, layout: str
) -> None:
    """Moments of other steps are dropped."""
    written = write(pools, models / "qwen2", layout, tmp_path, steps=0)
    for trained in (0, 1):
        found = load(pools, models / "qwen2", layout, tmp_path, steps=0, trained=trained)
        assert state_of(found) == {} and found[0]["lr"] == 0.0
        assert_same(found[0]["weights"], written[0]["weights"])
        assert_same(found[0]["next"], written[0]["next"])


# --- files


@pytest.mark.parametrize("layout", ["tp 2 pp 2", "tp 2, data 2", "data 2"])
def test_what_the_ranks_write_adds_up(
    pools: dict[int, Ranks], models: Path, tmp_path: Path, layout: str
) -> None:
    written = write(pools, models / "qwen2", layout, tmp_path, contents=[*CONTENTS, "hf_model"])
    files = sorted(str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*") if path.is_file())
    assert sorted(name for rank in written for name in rank["files"]) == files
    lm = AutoModelForCausalLM.from_pretrained(tmp_path / "huggingface")
    assert_same(dict(lm.named_parameters()), written[0]["weights"])
    facts = json.loads((tmp_path / "checkpoint.json").read_text())
    assert facts["engine"] == "megatron" and facts["world_size"] == len(written) and facts["tied"]
    weights = sum(tensor.numel() for tensor in written[0]["weights"].values())
    reported = sum(rank["bytes"] for rank in written)
    assert 4 * 4 * weights <= reported < 4.3 * 4 * weights, "weights, two moments and a Hugging Face model"


def test_the_merger_reads_it(pools: dict[int, Ranks], models: Path, tmp_path: Path) -> None:
    pools[4].run(jobs.save_both, str(models / "qwen3"), options_of("tp 2 pp 2"), str(tmp_path))
    assert_same_bits(merge(tmp_path / "actor", tmp_path / "merged"), read(tmp_path / "exported"))


def _cut_short(role: Path) -> None:
    for shard in (role / "dcp").glob("__1_*.distcp"):
        shard.write_bytes(shard.read_bytes()[: shard.stat().st_size // 2])


def _lose_a_shard(role: Path) -> None:
    for shard in (role / "dcp").glob("__1_*.distcp"):
        shard.unlink()


def _lose_the_index(role: Path) -> None:
    (role / INDEX).unlink()


def _hostile_index(role: Path) -> None:
    put_into_index(role, role / "hacked")


def _hostile_shard(role: Path) -> None:
    put_into_shard(role, role / "hacked", as_object=False)


DAMAGE = [_cut_short, _lose_a_shard, _lose_the_index, _hostile_index, _hostile_shard]


@pytest.mark.parametrize("damage", DAMAGE, ids=lambda damage: damage.__name__.strip("_"))
def test_a_damaged_checkpoint_is_refused_in_the_same_words(
    pools: dict[int, Ranks], models: Path, usual: Callable[[str], Written], tmp_path: Path, damage: Any
) -> None:
    """As by the FSDP engine, on every rank; which rank reads the shard may differ."""
    path = str(models / "qwen2")
    shutil.copytree(usual("tp 2")[1], tmp_path, dirs_exist_ok=True)
    damage(tmp_path)
    reported = {
        layout: pools[2].run(jobs.load_refusal, path, options_of(layout), str(tmp_path))
        for layout in ("tp 2", "pp 2", "data 2", "fsdp 2")
    }
    for words in reported.values():
        assert all(words) and str(tmp_path) in words[0]
        assert words[0] == words[1]
        assert re.sub(r"rank \d", "rank", words[0]) == re.sub(r"rank \d", "rank", reported["fsdp 2"][0])
    assert not (tmp_path / "hacked").exists()


@pytest.mark.parametrize("layout", ["tp 2", "pp 2"])
def test_another_models_checkpoint_is_refused(
    pools: dict[int, Ranks], models: Path, usual: Callable[[str], Written], layout: str
) -> None:
    """On every rank, also where only one of them lacks a tensor."""
    _, folder = usual("tp 2")
    for options in ({"head": "value"}, {}):
        path = str(models / ("qwen2" if options else "qwen3"))
        for reported in pools[2].run(jobs.load_refusal, path, options_of(layout, **options), str(folder)):
            assert reported.startswith("ConfigError") and "it belongs to another model" in reported
