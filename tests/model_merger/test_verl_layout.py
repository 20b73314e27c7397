"""Checkpoints with verl's files, saved by real FSDP ranks."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from model_merger.directories import assert_same_bits, merge, read
from model_merger.rank_jobs import SAVED_AS_VERL
from peft import PeftModel
from torch.distributed.tensor import Partial
from transformers import AutoModelForCausalLM, AutoModelForTokenClassification

from hydraflow import model_merger
from hydraflow.model_merger.__main__ import main


@pytest.mark.parametrize(
    "case", [*(name for name in SAVED_AS_VERL if name not in ("lora", "value")), "one", "plain"]
)
def test_nothing_is_lost(made: Path, models: dict[str, str], tmp_path: Path, case: str) -> None:
    model, options = SAVED_AS_VERL.get(case, ("tied", {}))
    wanted = {
        name: tensor.to(getattr(torch, options.get("dtype", "float32")))
        for name, tensor in read(models[model]).items()
    }
    assert_same_bits(merge(made / f"verl-{case}", tmp_path / "merged", "--backend", "fsdp"), wanted)
    _, report = AutoModelForCausalLM.from_pretrained(tmp_path / "merged", output_loading_info=True)
    assert not report["missing_keys"] and not report["unexpected_keys"]


def test_a_value_model_with_a_bias(made: Path, models: dict[str, str], tmp_path: Path) -> None:
    merged = merge(made / "verl-value", tmp_path / "merged", "--is_value_model")
    assert_same_bits(merged, read(models["value_bias"]))
    _, report = AutoModelForTokenClassification.from_pretrained(tmp_path / "merged", output_loading_info=True)
    assert not report["missing_keys"] and not report["unexpected_keys"]


def test_adapters_are_merged(made: Path, models: dict[str, str], tmp_path: Path) -> None:
    """W + 6 / 2 * B A, from the matrices that peft exports."""
    base = merge(made / "verl-lora", tmp_path / "base", "--lora", "adapter")
    assert_same_bits(base, read(models["tied"]))
    adapter = read(tmp_path / "base" / "lora_adapter")
    merged = merge(made / "verl-lora", tmp_path / "merged")
    for name, tensor in base.items():
        stem = f"base_model.model.{name.removesuffix('.weight')}.lora_"
        if f"{stem}A.weight" not in adapter:
            assert torch.equal(merged[name], tensor)
            continue
        assert torch.equal(
            merged[name], tensor + adapter[f"{stem}B.weight"] @ adapter[f"{stem}A.weight"] * 3.0
        )
    assert len(adapter) == 2 * 2 * 2
    with_peft = PeftModel.from_pretrained(
        AutoModelForCausalLM.from_pretrained(tmp_path / "base"), str(tmp_path / "base" / "lora_adapter")
    )
    ids = torch.arange(17)[None]
    plain = AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    torch.testing.assert_close(
        with_peft(input_ids=ids).logits, plain(input_ids=ids).logits, rtol=0, atol=1e-4
    )


def test_adapters_without_their_scale_are_not_guessed(
    made: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (made / "verl-lora" / "lora_train_meta.json").rename(tmp_path / "kept.json")
    command = ["merge", "--local_dir", str(made / "verl-lora"), "--target_dir", str(tmp_path / "merged")]
    assert main(command) == 2
    assert "--lora-alpha" in capsys.readouterr().err
    reported = merge(made / "verl-lora", tmp_path / "reported", "--lora_alpha", "6")
    (tmp_path / "kept.json").rename(made / "verl-lora" / "lora_train_meta.json")
    assert_same_bits(reported, merge(made / "verl-lora", tmp_path / "merged"))


def test_what_a_checkpoint_holds(made: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["info", "--local_dir", str(made / "verl-fsdp2_ddp"), "--json"]) == 0
    (facts,) = json.loads(capsys.readouterr().out)
    assert (facts["layout"], facts["world_size"], facts["details"]["mesh"]) == ("verl", 4, "ddp x fsdp")
    assert facts["tensors"]["lm_head.weight"] == {"dtype": "float32", "shape": [17, 32], "bytes": 2176}


def test_weights_as_a_library_gives_them(made: Path, models: dict[str, str]) -> None:
    wanted = AutoModelForCausalLM.from_pretrained(models["tied"]).state_dict()
    assert_same_bits(model_merger.load_state_dict(made / "verl-fsdp1"), wanted)


def test_an_error_without_a_text_is_named_by_its_class(
    refused: Callable[..., str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def ends(*_: object, **__: object) -> None:
        raise EOFError

    shard = tmp_path / "model_world_size_1_rank_0.pt"
    torch.save({"w": torch.ones(1)}, shard)
    monkeypatch.setattr(torch, "load", ends)
    reported = refused("merge", "--local_dir", tmp_path, "--target_dir", tmp_path / "out")
    assert f"{shard}: is truncated, or not a shard of a model: EOFError" in reported


def test_a_tensor_that_cannot_be_merged_is_named_with_its_file(
    models: dict[str, str], refused: Callable[..., str], tmp_path: Path
) -> None:
    source = ["split", "--hf_dir", models["tied"], "--world_size", "2", "--layout", "verl"]
    assert main([*source, "--target_dir", str(tmp_path / "split")]) == 0
    first = tmp_path / "split" / "model_world_size_2_rank_0.pt"
    state = torch.load(first, weights_only=True)
    state["model.norm.weight"]._spec.placements = (Partial(),)
    torch.save(state, first)
    reported = refused("merge", "--local_dir", first.parent, "--target_dir", tmp_path / "out")
    assert f"{first}: model.norm.weight is placed as Partial, which cannot be merged" in reported
