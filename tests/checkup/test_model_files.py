"""Model directories that are broken in the ways in which downloads break them."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from checkup.given import configured, findings, states
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from hydraflow.checkup.context import CheckContext
from hydraflow.checkup.finding import Finding, State
from hydraflow.checkup.model_files import judge_context, to_download
from hydraflow.engine.config import MegatronConfig
from hydraflow.model_merger.__main__ import main
from hydraflow.models.loading import Context
from hydraflow.models.tiny import make_model, make_tokenizer
from hydraflow.models.weight_files import INDEX, file_fault, weight_faults

LORA = {"lora_rank": 2, "target_modules": ["nope_proj"]}


def shards(folder: Path) -> Path:
    """Two files of weights and their index."""
    folder.mkdir(exist_ok=True)
    places = {
        "a": "model-00001-of-00002.safetensors",
        "b": "model-00002-of-00002.safetensors",
        "c": "model-00002-of-00002.safetensors",
    }
    save_file({"a": torch.zeros(8)}, folder / places["a"])
    save_file({"b": torch.zeros(8), "c": torch.zeros(2, dtype=torch.bfloat16)}, folder / places["b"])
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": places}))
    return folder


def look(model: Path | str, data: Path) -> list[Finding]:
    return findings(CheckContext(configured(model, data)), "model files")


def test_a_complete_directory(model: Path, data: Path) -> None:
    [found] = look(model, data)
    assert found.state is State.OK and "1 weight files" in found.evidence and found.evidence.endswith("F32")
    assert states(findings(CheckContext(configured(model, data)), "model and tokenizer")) == [
        State.OK,
        State.OK,
    ]


def test_a_teacher_is_divided_as_the_actor_is(model: Path, data: Path, tmp_path: Path) -> None:
    policy = make_model(tmp_path / "policy", hidden=16, layers=1, heads=2, kv_heads=2)
    given = dict(actor_rollout_ref__actor__strategy="megatron", trainer__n_gpus_per_node=2)
    given |= dict(actor_rollout_ref__actor__megatron__tensor_model_parallel_size=2)
    for teacher, state in ((policy, State.OK), (model, State.PROBLEM), (tmp_path, State.OK)):
        config = configured(policy, data, **given, distillation__enabled=True)
        config.distillation.teachers = {"default": str(teacher)}
        [found] = findings(CheckContext(config), "Megatron and model")
        assert found.state is state, found
        if state is State.PROBLEM:
            assert "tensor_model_parallel_size=2: must divide" in found.evidence
            assert f"(distillation.teachers.default={model})" in found.evidence


def test_weights_from_a_checkpoint_of_megatron_core(model: Path, data: Path, tmp_path: Path) -> None:
    """A model's directory then needs no weights; a folder without a checkpoint is reported once."""
    where = ("--hf_dir", str(model), "--target_dir", str(tmp_path / "core"))
    assert main(["split", "--backend", "megatron", "--world_size", "1", *where]) == 0
    alone = shutil.copytree(model, tmp_path / "alone", ignore=shutil.ignore_patterns("*.safetensors"))
    section = "actor_rollout_ref__actor__megatron"
    given: dict[str, Any] = dict(actor_rollout_ref__actor__strategy="megatron")
    given |= {f"{section}__use_dist_checkpointing": True}

    def looked(path: Path) -> list[Finding]:
        config = configured(alone, data, **given, **{f"{section}__dist_checkpointing_path": str(path)})
        context = CheckContext(config)
        return [*findings(context, "model files"), *findings(context, "weights and model")]

    files, weights = looked(tmp_path / "core")
    assert (files.state, weights.state) == (State.OK, State.OK)
    assert files.evidence.endswith("only configuration and tokenizer are read")
    _, missing, weights = looked(tmp_path / "nothing")
    assert (missing.state, weights.state) == (State.PROBLEM, State.OK)
    assert "dist_checkpointing_path" in missing.evidence and "no such directory" in missing.evidence
    file = alone / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "intermediate_size": 24}))
    _, weights = looked(tmp_path / "core")
    assert weights.state is State.PROBLEM and "of another shape" in weights.evidence


def test_a_model_that_megatron_divides_or_does_not(model: Path, data: Path) -> None:
    key = "actor_rollout_ref__actor__megatron__tensor_model_parallel_size"
    given = dict(actor_rollout_ref__actor__strategy="megatron", trainer__n_gpus_per_node=2)
    divided, other = (configured(model, data, **given, **{key: size}) for size in (1, 2))
    assert states(findings(CheckContext(configured(model, data)), "Megatron and model")) == [State.SKIPPED]
    [found] = findings(CheckContext(divided), "Megatron and model")
    assert found.state is State.OK, found
    [found] = findings(CheckContext(other), "Megatron and model")
    assert found.state is State.PROBLEM
    assert "actor.megatron.tensor_model_parallel_size=2: must divide" in found.evidence
    assert "tensor_model_parallel_size=1" in found.remedy
    divided.actor_rollout_ref.actor.megatron.override_ddp_config = {"average_in_collective": True}
    [found] = findings(CheckContext(divided), "Megatron and model")
    assert found.state is State.PROBLEM and "never averaged" in found.evidence
    divided.actor_rollout_ref.actor.megatron = MegatronConfig(
        override_transformer_config={
            "deallocate_pipeline_outputs": True,
            "moe_z_loss_coeff": 0.1,
            "fp16": True,
        }
    )
    [found] = findings(CheckContext(divided), "Megatron and model")
    assert found.state is State.PROBLEM, "before anything starts, without Megatron-Core"
    assert "override_transformer_config.fp16=true: follows from the model" in found.evidence
    divided.actor_rollout_ref.actor.megatron.pipeline_model_parallel_size = 2
    divided.actor_rollout_ref.actor.megatron.override_transformer_config |= {
        "num_layers_in_last_pipeline_stage": 9
    }
    reported = [found.evidence for found in findings(CheckContext(divided), "Megatron and model")]
    assert len(reported) == 2, "all at once"
    assert "num_layers_in_last_pipeline_stage=9: gives the 2 stages" in reported[1]


def test_shards_as_the_index_promises(tmp_path: Path) -> None:
    assert weight_faults(shards(tmp_path)) == []


def test_a_missing_shard(tmp_path: Path) -> None:
    (shards(tmp_path) / "model-00002-of-00002.safetensors").unlink()
    [fault] = weight_faults(tmp_path)
    assert fault == "1 of 2 weight files are missing (model-00002-of-00002.safetensors), with 2 of 3 weights"


def test_a_missing_shard_stops_the_doctor_s_table(model: Path, data: Path) -> None:
    (model / "model.safetensors").unlink()
    shards(model)
    (model / "model-00001-of-00002.safetensors").unlink()
    [found] = look(model, data)
    assert found.state is State.PROBLEM and found.remedy == "download the complete model again"


def test_a_shard_that_is_cut_off(tmp_path: Path) -> None:
    file = shards(tmp_path) / "model-00001-of-00002.safetensors"
    size = file.stat().st_size
    file.write_bytes(file.read_bytes()[:-5])
    assert weight_faults(tmp_path) == [f"{file.name} is truncated: it has {size - 5} of {size} bytes"]


@settings(max_examples=50, deadline=None)
@given(draw=st.data())
def test_a_file_that_is_cut_anywhere_is_found(
    tmp_path_factory: pytest.TempPathFactory, draw: st.DataObject
) -> None:
    file = tmp_path_factory.mktemp("cut") / "model.safetensors"
    save_file({"a": torch.zeros(3), "b": torch.zeros(2, 2)}, file)
    assert file_fault(file) is None
    file.write_bytes(file.read_bytes()[: draw.draw(st.integers(0, file.stat().st_size - 1))])
    assert file_fault(file) is not None


def test_a_shard_without_a_promised_weight(tmp_path: Path) -> None:
    save_file({"b": torch.zeros(8)}, shards(tmp_path) / "model-00002-of-00002.safetensors")
    assert weight_faults(tmp_path) == [
        "model-00002-of-00002.safetensors lacks 1 weights that the index promises, the first c"
    ]


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n", "Git LFS pointer"),
        (b"", "no safetensors header"),
        (b"<html>Not found</html>", "no safetensors header"),
        (b"\x04\x00\x00\x00\x00\x00\x00\x00nope", "no safetensors header"),
    ],
)
def test_a_file_that_is_something_else(tmp_path: Path, content: bytes, said: str) -> None:
    (tmp_path / "model.safetensors").write_bytes(content)
    [fault] = weight_faults(tmp_path)
    assert said in fault


def test_an_index_that_is_broken(tmp_path: Path) -> None:
    (shards(tmp_path) / INDEX).write_text("{")
    assert "cannot be read" in weight_faults(tmp_path)[0]


def test_no_weights_and_no_configuration(model: Path, data: Path) -> None:
    (model / "model.safetensors").unlink()
    assert "no weights" in look(model, data)[0].evidence
    (model / "config.json").unlink()
    [found] = look(model, data)
    assert found.state is State.PROBLEM and "config.json" in found.evidence


def test_a_hub_name_that_is_not_here(data: Path) -> None:
    context = CheckContext(configured("nobody/no-such-model-anywhere", data))
    [found] = findings(context, "model files")
    assert found.state in (State.NOTE, State.PROBLEM)  # the latter where the tests run offline
    assert states(findings(context, "model and tokenizer")) == [State.SKIPPED]
    assert to_download("gone", "a/b", fault="the hub is away").state is State.PROBLEM
    assert to_download("gone", "a/b", fault=None).remedy == "hf download a/b"


def test_a_configuration_that_transformers_refuses_is_one_problem(model: Path, data: Path) -> None:
    values = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(values | {"num_hidden_layers": 9}))
    context = CheckContext(configured(model, data))
    checks = (
        "weights and model",
        "model and tokenizer",
        "end of sequence",
        "prompt lengths",
        "chat template",
    )
    found = [one for name in checks for one in findings(context, name) if one.state is State.PROBLEM]
    [one] = [finding for finding in found if "num_hidden_layers" in finding.evidence]
    assert "`num_hidden_layers` (9) must be equal to the number of `layer_types`" in one.evidence
    assert one.remedy == f"correct {model / 'config.json'}, or download the model again"
    assert not [finding for finding in found if "report it" in finding.remedy]


def test_adapters_that_no_layer_takes_are_found(model: Path, data: Path) -> None:
    keys = {f"actor_rollout_ref.model.{name}": value for name, value in LORA.items()}
    found = findings(CheckContext(configured(model, data, **keys)), "weights and model")
    assert states(found) == [State.PROBLEM] and "nope_proj" in found[0].evidence


def test_a_hub_name_in_the_cache(
    model: Path, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = tmp_path / "hub" / "models--me--small"
    (cache / "snapshots").mkdir(parents=True)
    (cache / "refs").mkdir()
    (cache / "refs" / "main").write_text("0123")
    model.rename(cache / "snapshots" / "0123")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    context = CheckContext(configured("me/small", data))
    [found] = findings(context, "model files")
    assert found.state is State.OK and str(cache) in found.evidence
    assert states(findings(context, "model and tokenizer")) == [State.OK, State.OK]
    (cache / "snapshots" / "0123" / "model.safetensors").unlink()
    [partly] = findings(CheckContext(configured("me/small", data)), "model files")
    assert partly.state in (State.NOTE, State.PROBLEM) and "no weights" in partly.evidence


def test_a_tokenizer_larger_than_the_model(model: Path, data: Path) -> None:
    make_tokenizer("abcdefghijklmnopqrstuvwxyz0123456789+= ").save_pretrained(model)
    vocabulary, _ = findings(CheckContext(configured(model, data)), "model and tokenizer")
    assert vocabulary.state is State.PROBLEM
    # Both count padding and end: 39 characters, where the model has 15.
    assert "the tokenizer has 41 tokens, the model 17: the ids of the last 24" in vocabulary.evidence


def test_a_directory_without_a_tokenizer_is_reported_once(model: Path, data: Path) -> None:
    (model / "tokenizer.json").unlink()
    context = CheckContext(configured(model, data))
    [first] = findings(context, "model and tokenizer")
    assert first.state is State.PROBLEM and "tokenizer" in first.evidence
    assert states(findings(context, "end of sequence")) == [State.SKIPPED]


SHORT = Context(1024, "the model's 1024 positions")


def test_positions() -> None:
    assert judge_context(512, 512, SHORT).state is State.OK
    over = judge_context(1024, 512, SHORT)
    assert (over.state, over.remedy) == (
        State.WARNING,
        "data.max_prompt_length=512 or data.max_response_length=1",
    )
    assert judge_context(16, 1024, SHORT).state is State.PROBLEM
