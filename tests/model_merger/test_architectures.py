"""What readers expect: the table of families against transformers, other architectures, names that differ in
files."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from model_merger.directories import assert_same_bits, merge, read

from hydraflow.engine.stored.checkpoint import Checkpoint
from hydraflow.engine.stored.pieces import ByteRange, Piece, StoredTensor
from hydraflow.model_merger import architecture, families, lora, names
from hydraflow.model_merger.__main__ import main

SIZES: dict[str, Any] = dict(
    vocab_size=17, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=2
)
BASE = {**SIZES, "num_key_value_heads": 1, "eos_token_id": 1, "pad_token_id": 0, "bos_token_id": None}
MOE = {"num_experts_per_tok": 2, "moe_intermediate_size": 16}
KNOWN: dict[str, dict[str, Any]] = {
    "llama": {},
    "llama_biases": {"model_type": "llama", "attention_bias": True, "mlp_bias": True, "head_dim": 8},
    "mistral": {"head_dim": 8},
    "qwen2": {},
    "qwen3": {"head_dim": 8},
    "qwen3_bias": {"model_type": "qwen3", "head_dim": 16, "attention_bias": True},
}
OTHERS: dict[str, dict[str, Any]] = {
    "qwen3_moe": {**MOE, "num_experts": 3, "head_dim": 16, "decoder_sparse_step": 1},
    "mixtral": {"num_local_experts": 3},
    "phi3": {},
    "gemma2": {"head_dim": 16, "tie_word_embeddings": True},
    "gpt2": {"n_embd": 32, "n_layer": 2, "n_head": 2, "n_positions": 64},
}


def config_of(name: str, options: dict[str, Any]) -> Any:
    """A transformers configuration of that type."""
    model_type = options.get("model_type", name)
    settings = {key: value for key, value in options.items() if key != "model_type"}
    base = (
        {"vocab_size": 17, "bos_token_id": 0, "eos_token_id": 1}
        if model_type == "gpt2"
        else {**BASE, "tie_word_embeddings": False}
    )
    return transformers.AutoConfig.for_model(model_type, **{**base, **settings})


def on_meta(auto: Any, config: Any) -> dict[str, tuple[int, ...]]:
    """Names and shapes as transformers makes them."""
    with torch.device("meta"):
        return {name: tuple(tensor.shape) for name, tensor in auto.from_config(config).state_dict().items()}


def class_name(auto: Any, config: Any) -> str:
    """What transformers makes of a configuration."""
    with torch.device("meta"):
        return type(auto.from_config(config)).__name__


@pytest.mark.parametrize("name", KNOWN)
def test_the_table_says_what_transformers_says(name: str, tmp_path: Path) -> None:
    config = config_of(name, KNOWN[name])
    causal, classify = transformers.AutoModelForCausalLM, transformers.AutoModelForTokenClassification
    shapes = on_meta(causal, config)
    config.architectures = [class_name(causal, config)]
    config.save_pretrained(tmp_path)
    reported = json.loads((tmp_path / "config.json").read_text())
    assert families.class_name(reported, "policy") == class_name(causal, config)
    assert dict(families.tensors(reported, "policy")) == shapes
    asked = architecture._ask_transformers(tmp_path, shapes, "policy", tie=False, trust=False)
    assert all(found.renamed and found.inputs == tuple(found.outputs) for found in asked.conversions(shapes))
    config.num_labels = 1
    assert dict(families.tensors(reported, "value", score_bias=True)) == on_meta(classify, config)
    config.token_classification_bias = False
    assert families.class_name(reported, "value") == class_name(classify, config)
    assert dict(families.tensors(reported, "value")) == on_meta(classify, config)


@pytest.mark.parametrize(
    "change",
    [
        {"model_type": "gemma"},
        {"architectures": ["Qwen2ForRewardModel"]},
        {"num_key_value_heads": None},
        {"auto_map": {"AutoModelForCausalLM": "modeling.Mine"}},
        {"quantization_config": {"bits": 4}},
        {"tie_word_embeddings": None},
    ],
    ids=lambda change: next(iter(change)),
)
def test_what_the_table_leaves_to_transformers(change: dict[str, Any]) -> None:
    config = {
        **BASE,
        "model_type": "qwen2",
        "architectures": ["Qwen2ForCausalLM"],
        "tie_word_embeddings": False,
    }
    assert families.class_name(config, "policy") == "Qwen2ForCausalLM"
    assert families.class_name({**config, **change}, "policy") is None


@pytest.mark.parametrize("layout", ["hydraflow", "verl"])
@pytest.mark.parametrize("name", OTHERS)
def test_names_in_files_are_transformers_own(name: str, layout: str, tmp_path: Path) -> None:
    """Experts are fused in memory and single in files; phi3 and GPT-2 fuse or transpose matrices."""
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config_of(name, OTHERS[name]))
    for parameter in model.parameters():
        parameter.data = torch.randn_like(parameter.data)
    model.save_pretrained(tmp_path / "model")
    command = [
        "split",
        "--hf_dir",
        tmp_path / "model",
        "--target_dir",
        tmp_path / "split",
        "--world_size",
        3,
        "--layout",
        layout,
    ]
    assert main([str(argument) for argument in command]) == 0
    assert_same_bits(merge(tmp_path / "split", tmp_path / "merged"), read(tmp_path / "model"))


def test_experts_are_converted_one_at_a_time(tmp_path: Path) -> None:
    config = config_of("qwen3_moe", OTHERS["qwen3_moe"])
    config.save_pretrained(tmp_path)
    shapes = on_meta(transformers.AutoModelForCausalLM, config)
    found = architecture.describe(tmp_path, shapes, head="policy").conversions(shapes)
    changed = [conversion for conversion in found if not conversion.renamed]
    assert [conversion.inputs for conversion in changed] == [
        (f"model.layers.{layer}.mlp.experts.{name}",)
        for layer in range(2)
        for name in ("gate_up_proj", "down_proj")
    ]
    assert {conversion.number_at for conversion in changed} == {5}
    assert (
        changed[0].output_of("model.layers.0.mlp.experts.1.up_proj.weight", 1)
        == "model.layers.0.mlp.experts.2.up_proj.weight"
    )
    assert changed[1].outputs == {
        f"model.layers.0.mlp.experts.{i}.down_proj.weight": (32, 16) for i in range(3)
    }


@pytest.mark.parametrize("name", ["gpt2", "phi3", "mixtral"])
def test_a_value_model_gets_a_class_that_reads_its_score(name: str, tmp_path: Path) -> None:
    """GPT-2's token classification calls its head otherwise and gives it a bias, so there it is sequence
    classification."""
    transformers.AutoModelForCausalLM.from_config(config_of(name, OTHERS[name])).save_pretrained(
        tmp_path / "model"
    )
    command = [
        "split",
        "--hf_dir",
        tmp_path / "model",
        "--target_dir",
        tmp_path / "split",
        "--world_size",
        2,
        "--is-value-model",
    ]
    assert main([str(argument) for argument in command]) == 0
    merged = merge(tmp_path / "split", tmp_path / "merged")
    assert merged["score.weight"].shape == (1, 32) and "lm_head.weight" not in merged
    wanted = "Sequence" if name == "gpt2" else "Token"
    auto = getattr(transformers, f"AutoModelFor{wanted}Classification")
    _, report = auto.from_pretrained(tmp_path / "merged", output_loading_info=True)
    assert not report["missing_keys"] and not report["unexpected_keys"] and not report["mismatched_keys"]
    assert wanted in json.loads((tmp_path / "merged" / "config.json").read_text())["architectures"][0]


@pytest.fixture
def weights() -> Callable[..., names.Weights]:
    """Weights of a checkpoint whose tensors have these names."""

    def make(*found: str, **facts: Any) -> names.Weights:
        tensors = {
            name: StoredTensor(
                name, torch.float32, (2, 2), (Piece((0, 0), (2, 2), ByteRange(Path(name), 0, 16)),)
            )
            for name in found
        }
        return names.weights_of(Checkpoint(Path("here"), "verl", 1, tensors, **facts))

    return make


def test_wrappers_and_prefixes_come_off(weights: Callable[..., names.Weights]) -> None:
    long = "_fsdp_wrapped_module.model.layers.0._checkpoint_wrapped_module.mlp._orig_mod.up_proj.weight"
    assert list(weights(long, "lm_head.weight").plain) == [
        "model.layers.0.mlp.up_proj.weight",
        "lm_head.weight",
    ]
    assert list(weights("lm.model.norm.weight", "lm.lm_head.weight").plain) == [
        "model.norm.weight",
        "lm_head.weight",
    ]
    assert list(weights("lm.norm.weight", prefix="").plain) == ["lm.norm.weight"]
    stem = "base_model.model.model.layers.0.self_attn.q_proj"
    found = weights(
        f"{stem}.base_layer.weight",
        f"{stem}.base_layer.bias",
        f"{stem}.lora_A.default.weight",
        f"{stem}.lora_B.default.weight",
    )
    assert list(found.plain) == [
        "model.layers.0.self_attn.q_proj.weight",
        "model.layers.0.self_attn.q_proj.bias",
    ]
    assert found.adapters["model.layers.0.self_attn.q_proj.weight"].b.name == f"{stem}.lora_B.default.weight"


@pytest.mark.parametrize("transposed", [True, False])
def test_square_weights_alone_are_oriented_as_their_class_says(
    weights: Callable[..., names.Weights], transposed: bool
) -> None:
    stem = "transformer.h.0.attn.c_proj"
    found = weights(f"{stem}.weight", f"{stem}.lora_A.default.weight", f"{stem}.lora_B.default.weight")
    known = frozenset({f"{stem}.weight"}) if transposed else frozenset()
    [weight] = lora.merged(found.plain, found.adapters, 4.0, known).values()
    assert weight.transposed == transposed


def test_the_layers_of_gpt2_are_transposed(tmp_path: Path) -> None:
    config = config_of("gpt2", OTHERS["gpt2"])
    model = transformers.AutoModelForCausalLM.from_config(config)
    config.architectures = [type(model).__name__]
    config.save_pretrained(tmp_path)
    shapes = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    found = architecture.describe(tmp_path, shapes, head="policy").transposed()
    layers = ("attn.c_attn", "attn.c_proj", "mlp.c_fc", "mlp.c_proj")
    assert found == {f"transformer.h.{i}.{layer}.weight" for i in range(2) for layer in layers}


def test_names_that_cannot_be_understood(weights: Callable[..., names.Weights]) -> None:
    for found, message in {
        ("w.lora_A.default.weight", "w.weight"): "lacks one of its matrices",
        ("w.lora_A.default.weight", "w.lora_B.default.weight"): "lacks the weight itself",
        ("w.weight", "w.lora_A.a.weight", "w.lora_A.b.weight"): "occurs twice",
        ("e.weight", "e.lora_embedding_A.default"): "cannot be merged",
        ("w.weight", "_orig_mod.w.weight"): "occurs twice",
    }.items():
        with pytest.raises(ValueError, match=message):
            weights(*found)


def test_trl_value_models_become_token_classification(weights: Callable[..., names.Weights]) -> None:
    found = weights(
        "pretrained_model.model.norm.weight",
        "pretrained_model.lm_head.weight",
        "v_head.summary.weight",
        "v_head.summary.bias",
    )
    assert (list(found.plain), found.head) == (["model.norm.weight", "score.weight", "score.bias"], "value")
    assert found.notes == ["lm_head.weight is left out: a value model does not use it"]


def test_common_models_need_no_transformers(tmp_path: Path) -> None:
    """Its import takes longer than many a merge."""
    config = config_of("qwen2", {})
    config.architectures = ["Qwen2ForCausalLM"]
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "model")
    command = ["split", "--hf_dir", tmp_path / "model", "--target_dir", tmp_path / "split", "--world_size", 2]
    assert main([str(argument) for argument in command]) == 0
    program = (
        "import sys; from hydraflow.model_merger.__main__ import main;code = main(['merge', '--local_dir',"
        f" {str(tmp_path / 'split')!r}, '--target_dir', {str(tmp_path / 'merged')!r}]);sys.exit(code or"
        " 'transformers' in sys.modules or 'torch.distributed.tensor' in sys.modules)"
    )
    subprocess.run([sys.executable, "-c", program], check=True, cwd=Path(__file__).parents[2], timeout=120)
    assert_same_bits(read(tmp_path / "merged"), read(tmp_path / "model"))


CODE = """
from transformers import Qwen3Config, Qwen3ForCausalLM


class MineConfig(Qwen3Config):
    model_type = "mine"


class MineForCausalLM(Qwen3ForCausalLM):
    config_class = MineConfig
"""


def test_code_that_comes_with_a_model_runs_only_when_trusted(
    tiny: str, refused: Callable[..., str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(transformers.dynamic_module_utils, "HF_MODULES_CACHE", str(tmp_path / "modules"))
    assert (
        main(["split", "--hf_dir", tiny, "--target_dir", str(tmp_path / "split"), "--world_size", "2"]) == 0
    )
    file = tmp_path / "split" / "huggingface" / "config.json"
    auto = {"AutoConfig": "mine.MineConfig", "AutoModelForCausalLM": "mine.MineForCausalLM"}
    mine = {"model_type": "mine", "auto_map": auto, "architectures": ["MineForCausalLM"]}
    file.write_text(json.dumps({**json.loads(file.read_text()), **mine}))
    file.with_name("mine.py").write_text(CODE)
    reported = refused(
        "merge", "--local_dir", tmp_path / "split", "--target_dir", tmp_path / "out", target=tmp_path / "out"
    )
    assert "--trust-remote-code" in reported
    assert_same_bits(merge(tmp_path / "split", tmp_path / "out", "--trust_remote_code"), read(tiny))
    assert (tmp_path / "out" / "mine.py").read_text() == CODE
    assert json.loads((tmp_path / "out" / "config.json").read_text())["architectures"] == ["MineForCausalLM"]
