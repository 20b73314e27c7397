"""Checkpoints with verl's files, saved by real FSDP ranks."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from engine.pool import Ranks
from model_merger import rank_jobs as jobs
from model_merger.directories import assert_same_bits, merge, read
from peft import PeftModel
from transformers import AutoModelForCausalLM, AutoModelForTokenClassification

from hydraflow import model_merger
from hydraflow.model_merger.__main__ import main

CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "fsdp2": ("tied", {}),
    "fsdp2_bf16": ("bf16", {"dtype": "bfloat16"}),
    "fsdp2_ddp": ("untied", {"fsdp_size": 2}),
    "fsdp1": ("tied", {"version": 1}),
    "fsdp1_bf16": ("untied", {"version": 1, "dtype": "bfloat16"}),
    "fsdp1_ddp": ("untied", {"version": 1, "fsdp_size": 2}),
    "value": ("value_bias", {}),
    "lora": ("tied", {"lora": True}),
}


@pytest.fixture(scope="session")
def verl(models: dict[str, str], four_ranks: Ranks, one_rank: None, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Checkpoints of four ranks by case; and of one."""
    folder = tmp_path_factory.mktemp("verl")
    four_ranks.run(jobs.save_many_as_verl, [(models[model], str(folder / case), options) for case, (model, options) in CASES.items()])
    jobs.save_as_verl(models["tied"], str(folder / "one"))
    _save_plain(models["tied"], folder / "plain")
    return folder


def _save_plain(path: str, folder: Path) -> None:
    """World size 1, where verl does not wrap the model: plain tensors, of which two are the same."""
    model = AutoModelForCausalLM.from_pretrained(path)
    (folder / "huggingface").mkdir(parents=True)
    torch.save(model.state_dict(), folder / "model_world_size_1_rank_0.pt")
    (folder / "fsdp_config.json").write_text(json.dumps({"FSDP_version": 1, "world_size": 1}))
    model.config.save_pretrained(folder / "huggingface")


@pytest.mark.parametrize("case", [*(name for name in CASES if name not in ("lora", "value")), "one", "plain"])
def test_nothing_is_lost(verl: Path, models: dict[str, str], tmp_path: Path, case: str) -> None:
    model, options = CASES.get(case, ("tied", {}))
    wanted = {name: tensor.to(getattr(torch, options.get("dtype", "float32"))) for name, tensor in read(models[model]).items()}
    assert_same_bits(merge(verl / case, tmp_path / "merged", "--backend", "fsdp"), wanted)
    _, report = AutoModelForCausalLM.from_pretrained(tmp_path / "merged", output_loading_info=True)
    assert not report["missing_keys"] and not report["unexpected_keys"]


def test_a_value_model_with_a_bias(verl: Path, models: dict[str, str], tmp_path: Path) -> None:
    merged = merge(verl / "value", tmp_path / "merged", "--is_value_model")
    assert_same_bits(merged, read(models["value_bias"]))
    _, report = AutoModelForTokenClassification.from_pretrained(tmp_path / "merged", output_loading_info=True)
    assert not report["missing_keys"] and not report["unexpected_keys"]


def test_adapters_are_merged(verl: Path, models: dict[str, str], tmp_path: Path) -> None:
    """W + 6 / 2 * B A, from the matrices that peft exports."""
    base = merge(verl / "lora", tmp_path / "base", "--lora", "adapter")
    assert_same_bits(base, read(models["tied"]))
    adapter = read(tmp_path / "base" / "lora_adapter")
    merged = merge(verl / "lora", tmp_path / "merged")
    for name, tensor in base.items():
        stem = f"base_model.model.{name.removesuffix('.weight')}.lora_"
        if f"{stem}A.weight" not in adapter:
            assert torch.equal(merged[name], tensor)
            continue
        assert torch.equal(merged[name], tensor + adapter[f"{stem}B.weight"] @ adapter[f"{stem}A.weight"] * 3.0)
    assert len(adapter) == 2 * 2 * 2
    with_peft = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(tmp_path / "base"), str(tmp_path / "base" / "lora_adapter"))
    ids = torch.arange(17)[None]
    plain = AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    torch.testing.assert_close(with_peft(input_ids=ids).logits, plain(input_ids=ids).logits, rtol=0, atol=1e-4)


def test_adapters_without_their_scale_are_not_guessed(verl: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (verl / "lora" / "lora_train_meta.json").rename(tmp_path / "kept.json")
    command = ["merge", "--local_dir", str(verl / "lora"), "--target_dir", str(tmp_path / "merged")]
    assert main(command) == 2
    assert "--lora-alpha" in capsys.readouterr().err
    told = merge(verl / "lora", tmp_path / "told", "--lora_alpha", "6")
    (tmp_path / "kept.json").rename(verl / "lora" / "lora_train_meta.json")
    assert_same_bits(told, merge(verl / "lora", tmp_path / "merged"))


def test_what_a_checkpoint_holds(verl: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["info", "--local_dir", str(verl / "fsdp2_ddp"), "--json"]) == 0
    (facts,) = json.loads(capsys.readouterr().out)
    assert (facts["layout"], facts["world_size"], facts["details"]["mesh"]) == ("verl", 4, "ddp x fsdp")
    assert facts["tensors"]["lm_head.weight"] == {"dtype": "float32", "shape": [17, 32], "bytes": 2176}


def test_weights_as_a_library_gives_them(verl: Path, models: dict[str, str]) -> None:
    wanted = AutoModelForCausalLM.from_pretrained(models["tied"]).state_dict()
    assert_same_bits(model_merger.load_state_dict(verl / "fsdp1"), wanted)
