"""Hugging Face directory -> training engine on 1, 2 and 4 ranks -> checkpoint -> merged directory: every bit
is the same."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from model_merger.directories import assert_same_bits, merge, read
from model_merger.rank_jobs import SAVED
from peft import PeftModel
from transformers import AutoModelForCausalLM, AutoModelForTokenClassification, AutoTokenizer

from hydraflow import model_merger
from hydraflow.model_merger.__main__ import main


@pytest.mark.parametrize("case", SAVED)
@pytest.mark.parametrize("size", [1, 2, 4])
def test_nothing_is_lost(made: Path, models: dict[str, str], tmp_path: Path, size: int, case: str) -> None:
    checkpoint = made / f"{size}-{case}"
    merged = merge(checkpoint, tmp_path / "merged")
    assert_same_bits(merged, read(models[case]))
    assert_same_bits(merged, read(checkpoint / "exported"))
    auto = AutoModelForTokenClassification if case == "value" else AutoModelForCausalLM
    model, report = auto.from_pretrained(tmp_path / "merged", output_loading_info=True)
    assert not report["missing_keys"] and not report["unexpected_keys"] and not report["mismatched_keys"]
    assert model.dtype == (torch.bfloat16 if case == "bf16" else torch.float32)
    for name in ("config.json", "generation_config.json") if case != "value" else ("config.json",):
        assert json.loads((tmp_path / "merged" / name).read_text()) == json.loads(
            (checkpoint / "exported" / name).read_text()
        )
    assert (
        AutoTokenizer.from_pretrained(tmp_path / "merged").chat_template
        == AutoTokenizer.from_pretrained(models[case]).chat_template
    )


def test_a_checkpoint_of_several_copies_of_a_model(
    made: Path, models: dict[str, str], tmp_path: Path
) -> None:
    assert_same_bits(merge(made / "4-copies", tmp_path / "merged"), read(models["untied"]))


def test_a_type_may_be_chosen_and_comes_back(made: Path, models: dict[str, str], tmp_path: Path) -> None:
    wanted = read(models["untied"])
    half = merge(made / "2-untied", tmp_path / "bf16", "--dtype", "bf16")
    assert_same_bits(half, {name: tensor.bfloat16() for name, tensor in wanted.items()})
    assert json.loads((tmp_path / "bf16" / "config.json").read_text())["dtype"] == "bfloat16"
    full = merge(made / "2-bf16", tmp_path / "fp32", "--dtype", "fp32")
    assert_same_bits({name: tensor.bfloat16() for name, tensor in full.items()}, read(models["bf16"]))


@pytest.mark.parametrize("size", [1, 2])
def test_adapters_are_merged_as_the_engine_merges_them(
    made: Path, models: dict[str, str], tmp_path: Path, size: int
) -> None:
    merged = merge(made / f"{size}-lora", tmp_path / "merged")
    assert_same_bits(merged, read(made / f"{size}-lora" / "exported"))
    changed = {name for name, tensor in read(models["tied"]).items() if not torch.equal(tensor, merged[name])}
    adapted = {
        f"model.layers.{i}.{name}.weight" for i in range(2) for name in ("self_attn.q_proj", "mlp.down_proj")
    }
    assert changed == (adapted if size == 1 else set())  # only the checkpoint of one rank was trained


def test_adapters_are_exported_for_peft(made: Path, models: dict[str, str], tmp_path: Path) -> None:
    base = merge(made / "1-lora", tmp_path / "merged", "--lora", "adapter")
    assert_same_bits(base, read(models["tied"]))
    config = json.loads((tmp_path / "merged" / "lora_adapter" / "adapter_config.json").read_text())
    assert (config["r"], config["lora_alpha"], config["target_modules"]) == (2, 6, ["down_proj", "q_proj"])
    ids = torch.arange(17)[None]
    model = PeftModel.from_pretrained(
        AutoModelForCausalLM.from_pretrained(tmp_path / "merged"), str(tmp_path / "merged" / "lora_adapter")
    )
    exported = AutoModelForCausalLM.from_pretrained(made / "1-lora" / "exported")
    torch.testing.assert_close(model(input_ids=ids).logits, exported(input_ids=ids).logits, rtol=0, atol=2e-6)


def test_weights_as_a_library_gives_them(made: Path, models: dict[str, str]) -> None:
    state = model_merger.load_state_dict(made / "4-tied")
    model = AutoModelForCausalLM.from_pretrained(models["tied"])
    wanted = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    assert_same_bits(state, wanted)
    for parameter in model.parameters():
        parameter.data.zero_()
    model.load_state_dict(state)
    assert_same_bits(model.state_dict(), wanted)
    assert {
        tensor.dtype for tensor in model_merger.load_state_dict(made / "4-tied", dtype="bf16").values()
    } == {torch.bfloat16}


def test_compared_with_a_directory(
    made: Path, models: dict[str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["test", "--local-dir", str(made / "4-untied" / "actor"), "--test-hf-dir"]
    assert main([*command, models["untied"]]) == 0
    assert "same: 25 tensors" in capsys.readouterr().out
    merge(made / "4-untied", tmp_path / "bf16", "--dtype", "bf16")
    assert main([*command, str(tmp_path / "bf16")]) == 0
    assert "compared in the directory's type" in capsys.readouterr().out
    assert main([*command, str(tmp_path / "bf16"), "--dtype", "fp32"]) == 1
    assert "torch.float32, torch.bfloat16 in the directory" in capsys.readouterr().out
    assert main([*command, models["bf16"]]) == 1
    reported = capsys.readouterr().out
    assert (
        "only in the checkpoint: lm_head.weight" in reported
        and "model.norm.weight: " in reported
        and "numbers differ" in reported
    )


def test_what_a_checkpoint_holds(made: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["info", "--local_dir", str(made / "4-value"), "--json"]) == 0
    (facts,) = json.loads(capsys.readouterr().out)
    assert (facts["layout"], facts["world_size"], facts["details"]["head"], facts["problems"]) == (
        "hydraflow",
        4,
        "value",
        [],
    )
    assert facts["tensors"]["score.weight"] == {"dtype": "float32", "shape": [1, 32], "bytes": 128}
    assert facts["weights"]["bytes"] == 4 * facts["weights"]["numbers"]
    assert facts["others"]["extra"]["entries"] == 1
    assert main(["info", "--local_dir", str(made / "4-value" / "actor")]) == 0
    assert "model.layers.*.mlp.gate_proj.weight" in capsys.readouterr().out
