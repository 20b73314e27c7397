"""Checkpoints of the Megatron engine: they hold Hugging Face tensors, and merge as FSDP's do."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import hydraflow.engine.megatron  # noqa: F401  lets Megatron-Core run without CUDA, so it comes first

pytest.importorskip("megatron.core")

from engine import megatron_models
from engine.pool import Ranks
from model_merger import megatron_jobs as jobs
from model_merger.directories import assert_same_bits, merge, read
from once import made_once

from hydraflow.model_merger.__main__ import main
from hydraflow.model_merger.outputs import DTYPES


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Models in `models`; of each case a checkpoint and what the engine exports, <case>/actor and
    <case>/exported."""

    def save(folder: Path) -> None:
        models = megatron_models.save_families(folder / "models")
        ranks = Ranks(4)
        ranks.run(jobs.save_all, str(models), str(folder))
        ranks.stop()

    return made_once(tmp_path_factory, "megatron-checkpoints", save)


@pytest.mark.slow
@pytest.mark.parametrize("case", jobs.CASES)
def test_merging_gives_the_model_that_was_loaded(saved: Path, tmp_path: Path, case: str) -> None:
    """With bfloat16 weights the checkpoint holds the float32 ones of the optimizer."""
    family, head, dtype = jobs.CASES[case]
    merged = merge(saved / case, tmp_path / "merged", "--dtype", dtype)
    assert_same_bits(merged, read(saved / case / "exported"))
    loaded = read(saved / "models" / family)
    del loaded["lm_head.weight" if head == "value" else megatron_models.SCORE]
    assert_same_bits(merged, {name: tensor.to(DTYPES[dtype]) for name, tensor in loaded.items()})


@pytest.mark.slow
def test_a_checkpoint_is_the_same_as_its_own_model_only(
    saved: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found = {}
    for other in ("untied", "tied"):
        exported = str(saved / other / "exported")
        code = main(["test", "--local_dir", str(saved / "untied"), "--test_hf_dir", exported])
        found[other] = code, capsys.readouterr().out.split(":")[0]
    assert found == {"untied": (0, "same"), "tied": (1, "DIFFERENT")}


@pytest.mark.slow
def test_info_names_the_engine_and_finds_nothing_missing(
    saved: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["info", "--json", "--local_dir", str(saved / "tied" / "actor")]) == 0
    (facts,) = json.loads(capsys.readouterr().out)
    assert (facts["details"]["engine"], facts["world_size"], facts["problems"]) == ("megatron", 4, [])
