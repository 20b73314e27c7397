"""Checkpoints of an engine: other numbers of ranks and other layouts read them, bit by bit; training beside
the writing does not show."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from engine import rank_jobs as jobs
from engine.alike import assert_same
from engine.pool import Ranks
from engine.written import Written, written_once
from transformers import AutoModelForCausalLM

from hydraflow.errors import ConfigError
from hydraflow.models.loading import persistent_buffers
from scripts.tiny_types import save_tiny, tiny_config

OPTIONS = {"optim": {"lr_warmup_steps": 1, "lr_scheduler_type": "linear"}, "total_steps": 9}
SIZES = (1, 2, 4)
read_and_step = partial(jobs.read_checkpoint, more=1)
"""For reads after which nothing is compared."""


@pytest.fixture(scope="module")
def plain(
    pools: dict[int, Ranks], tiny: str, tmp_path_factory: pytest.TempPathFactory
) -> Callable[[int], Written]:
    """Checkpoints with `OPTIONS`, by the number of ranks."""

    def write(size: int, folder: Path) -> list[dict[str, Any]]:
        return pools[size].run(jobs.write_checkpoint, tiny, OPTIONS, str(folder))

    return written_once(write, tmp_path_factory)


def assert_holds(got: dict[str, Any], wanted: dict[str, Any]) -> None:
    assert_same(got["weights"], wanted["weights"])
    assert_same(got["moments"], wanted["moments"])
    assert got["lr"] == wanted["lr"] == 0.01 * 7 / 8, (
        "one step of warm-up is over, and one of eight on the way down"
    )


@pytest.mark.parametrize("written_by", SIZES)
def test_any_number_of_ranks_reads_it_bit_by_bit(
    pools: dict[int, Ranks], tiny: str, plain: Callable[[int], Written], written_by: int
) -> None:
    written, folder = plain(written_by)
    assert len(written[0]["moments"]) == 3 * len(
        [name for name in written[0]["weights"] if "inv_freq" not in name]
    )
    for size in SIZES:
        job = jobs.read_checkpoint if size == written_by else read_and_step
        for read in pools[size].run(job, tiny, OPTIONS, str(folder)):
            assert_holds(read, written[0])
            if size == written_by:
                assert_same(read["next"], written[0]["next"])


OTHER_LAYOUTS = {
    "kept gathered": {"reshard_after_forward": False},
    "one unit": {"wrap_policy": {"min_num_params": 10**9}},
    "parameters rest in host memory": {"param_offload": True},
    "parameters stay in host memory": {"offload_policy": True},
    "everything rests in host memory": {"param_offload": True, "optimizer_offload": True},
    "moments in host memory": {"optimizer_offload": True},
    "a copy on each rank": {"fsdp_size": 1},
}


@pytest.mark.parametrize("layout", OTHER_LAYOUTS)
def test_another_sharding_reads_and_writes_it(
    pools: dict[int, Ranks], tiny: str, plain: Callable[[int], Written], tmp_path: Path, layout: str
) -> None:
    from hydraflow.engine.config import WrapPolicyConfig

    fsdp: dict[str, Any] = dict(OTHER_LAYOUTS[layout])
    if "wrap_policy" in fsdp:
        fsdp["wrap_policy"] = WrapPolicyConfig(**fsdp["wrap_policy"])
    other = {**OPTIONS, "fsdp": fsdp}
    by_other = pools[2].run(jobs.write_checkpoint, tiny, other, str(tmp_path))
    for (written, folder), reader in ((plain(2), other), ((by_other, tmp_path), OPTIONS)):
        assert_holds(pools[2].run(read_and_step, tiny, reader, str(folder))[0], written[0])


@pytest.mark.parametrize(
    ("size", "variant"),
    [(1, {}), (2, {}), (2, {"model": {"lora_rank": 2}})],
    ids=["four copies", "two copies", "two copies, lora"],
)
def test_copies_of_a_model_are_stored_once_and_read_by_any_number_of_ranks(
    pools: dict[int, Ranks],
    tiny: str,
    plain: Callable[[int], Written],
    tmp_path: Path,
    size: int,
    variant: dict[str, Any],
) -> None:
    usual, hybrid = {**OPTIONS, **variant}, {**OPTIONS, **variant, "fsdp": {"fsdp_size": size}}

    def write(options: dict[str, Any], folder: Path) -> Written:
        return pools[4].run(jobs.write_checkpoint, tiny, options, str(folder)), folder

    by_hybrid = write(hybrid, tmp_path / "hybrid")
    by_usual = write(usual, tmp_path / "usual") if variant else plain(4)
    fewer, more = (
        sum(path.stat().st_size for path in (folder / "dcp").glob("*.distcp"))
        for _, folder in (by_hybrid, by_usual)
    )
    assert fewer <= more, "the same numbers, in fewer pieces"
    for (written, folder), ranks, reader in (
        (by_hybrid, 4, hybrid),
        (by_hybrid, 4, usual),
        (by_hybrid, 2, usual),
        (by_usual, 4, hybrid),
    ):
        for one in pools[ranks].run(read_and_step, tiny, reader, str(folder)):
            assert_holds(one, written[0])


def test_a_run_with_copies_resumes_bit_by_bit(pools: dict[int, Ranks], tiny: str, tmp_path: Path) -> None:
    options = {**OPTIONS, "fsdp": {"fsdp_size": 2}}
    first = pools[4].run(jobs.save_both, tiny, options, str(tmp_path))[0]
    for again in pools[4].run(jobs.resume, tiny, options, str(tmp_path)):
        assert_same(again["saved"], first["saved"])
        assert_same(again["next"], first["next"])
    assert_same(
        dict(AutoModelForCausalLM.from_pretrained(tmp_path / "hf").named_parameters()), first["saved"]
    )


@pytest.mark.parametrize("variant", [{"model": {"lora_rank": 2}}, {"head": "value"}], ids=["lora", "value"])
def test_adapters_and_value_models_move_to_another_number_of_ranks(
    pools: dict[int, Ranks], tiny: str, tmp_path: Path, variant: dict[str, Any]
) -> None:
    options = {**OPTIONS, **variant}
    written = pools[2].run(jobs.write_checkpoint, tiny, options, str(tmp_path))[0]
    assert_holds(pools[4].run(read_and_step, tiny, options, str(tmp_path))[0], written)
    facts = json.loads((tmp_path / "checkpoint.json").read_text())
    assert facts["head"] == options.get("head", "policy") and facts["world_size"] == 2
    assert facts["lora_rank"] == (2 if "model" in variant else 0)


def test_what_the_ranks_write_adds_up(plain: Callable[[int], Written]) -> None:
    written, folder = plain(2)
    files = sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())
    assert sorted(written[0]["files"] + written[1]["files"]) == files
    assert {
        "checkpoint.json",
        "dcp/.metadata",
        "huggingface/config.json",
        "huggingface/tokenizer.json",
    } <= set(written[0]["files"])
    assert written[1]["files"] == ["dcp/__1_0.distcp"]
    numbers = sum(tensor.numel() for name, tensor in written[0]["weights"].items())
    assert sum(part["bytes"] for part in written) == 3 * 4 * numbers, "weights and two moments in four bytes"
    on_disk = sum(path.stat().st_size for path in (folder / "dcp").iterdir())
    assert on_disk >= 3 * 4 * numbers


def test_parts_can_be_read_by_themselves(
    pools: dict[int, Ranks], tiny: str, plain: Callable[[int], Written]
) -> None:
    written, folder = plain(1)
    read = pools[1].run(read_and_step, tiny, OPTIONS, str(folder), 2, ["model"])[0]
    assert_same(read["weights"], written[0]["weights"])
    assert read["moments"] == {} and read["lr"] == 0.0, "the schedule starts from scratch"


def test_before_its_first_update_an_optimizer_has_no_state(tiny: str, tmp_path: Path) -> None:
    written = jobs.write_checkpoint(tiny, OPTIONS, str(tmp_path), steps=0)
    read = jobs.read_checkpoint(tiny, OPTIONS, str(tmp_path))
    assert read["moments"] == {} and read["lr"] == 0.0
    assert_same(read["weights"], written["weights"])


def test_an_optimizer_forgets_what_the_checkpoint_does_not_hold(tiny: str, tmp_path: Path) -> None:
    jobs.write_checkpoint(tiny, OPTIONS, str(tmp_path), steps=0)
    engine = jobs.make_engine(tiny, OPTIONS)
    jobs.step_once(engine, 0)
    assert jobs.moments(engine)
    engine.load(tmp_path, jobs.CONTENTS)
    assert jobs.moments(engine) == {}


def test_buffers_that_are_saved_with_a_model_are_in_a_checkpoint(tiny: str, tmp_path: Path) -> None:
    """The router's bias of DeepSeek V3."""
    save_tiny(tiny_config("deepseek_v3"), tmp_path / "model")
    options = {**OPTIONS, "model": {"tokenizer_path": tiny}}
    written, read = (jobs.make_engine(str(tmp_path / "model"), options) for _ in range(2))
    biases = [dict(persistent_buffers(engine.module)) for engine in (written, read)]
    assert biases[0].keys() == biases[1].keys() and biases[0]
    for bias in biases[0].values():
        bias.copy_(torch.arange(float(len(bias))))
    written.snapshot(jobs.CONTENTS).write(tmp_path / "checkpoint")
    read.load(tmp_path / "checkpoint", jobs.CONTENTS)
    for name, bias in biases[1].items():
        assert bias.tolist() == list(range(len(bias))), name


def test_the_size_of_a_checkpoint_depends_on_what_is_in_it(tiny: str) -> None:
    """Of the adapters alone there are moments; the weights may be stored twice."""
    engine = jobs.make_engine(tiny, {**OPTIONS, "model": {"lora_rank": 2}})
    weights = sum(parameter.nbytes for parameter in engine.module.parameters())
    trained = sum(parameter.nbytes for parameter in engine.module.parameters() if parameter.requires_grad)
    assert 0 < trained < weights / 2
    for contents, size in (
        (["model"], weights),
        (["optimizer"], 2 * trained),
        (["model", "hf_model"], 2 * weights),
        (["model", "optimizer", "extra"], weights + 2 * trained),
        (["extra"], 0),
    ):
        assert engine.stored_bytes(contents) == size, contents


@pytest.mark.parametrize("head", ["policy", "value"])
def test_writing_leaves_torchs_default_type_alone(
    tiny: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, head: str
) -> None:
    """It is one for the whole process, and training goes on beside the writing; transformers changes it where
    it makes a model."""

    def changed(dtype: torch.dtype) -> None:
        raise AssertionError(f"the default type becomes {dtype}")

    snapshot = jobs.make_engine(tiny, {"head": head}).snapshot([*jobs.CONTENTS, "hf_model"])
    monkeypatch.setattr(torch, "set_default_dtype", changed)
    snapshot.write(tmp_path)
    assert (tmp_path / "huggingface" / "model.safetensors").exists()


def test_another_models_checkpoint_is_refused(tiny: str, tmp_path: Path) -> None:
    jobs.write_checkpoint(tiny, OPTIONS, str(tmp_path))
    with pytest.raises(ConfigError, match="it belongs to another model"):
        jobs.make_engine(tiny, {**OPTIONS, "head": "value"}).load(tmp_path, jobs.CONTENTS)


def test_a_disk_that_is_full_for_one_rank_is_reported_to_all_and_stops_nobody(
    pools: dict[int, Ranks], tiny: str, tmp_path: Path
) -> None:
    reported = pools[2].run(jobs.write_on_a_full_disk, tiny, str(tmp_path))
    assert reported == ["rank 1: OSError: [Errno 28] No space left on device"] * 2
    read = pools[4].run(jobs.read_checkpoint, tiny, {}, str(tmp_path / "second"))[0]
    assert_same(read["weights"], jobs.full_weights(jobs.make_engine(tiny)))
