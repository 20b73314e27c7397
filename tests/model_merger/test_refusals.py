"""Broken checkpoints and options that make no sense: a clear message, exit code 2, and no target, not even a
part of one."""

from __future__ import annotations

import json
import os
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from engine.foreign import REFUSED, Payload, put_into_index, put_into_shard
from model_merger.directories import merge, read

from hydraflow.errors import EnvironmentFault
from hydraflow.model_merger import safetensors_files
from hydraflow.model_merger.__main__ import main

Refused = Callable[..., str]
SHARD = {"hydraflow": "dcp/__1_0.distcp", "verl": "model_world_size_2_rank_1.pt"}
LAYOUTS = pytest.mark.parametrize("layout", list(SHARD))


@LAYOUTS
def test_a_missing_shard(
    broken: Callable[[str], Path], refused: Refused, tmp_path: Path, layout: str
) -> None:
    checkpoint = broken(layout)
    (checkpoint / SHARD[layout]).unlink()
    reported = refused(
        "merge", "--local_dir", checkpoint, "--target_dir", tmp_path / "out", target=tmp_path / "out"
    )
    assert f"{checkpoint / SHARD[layout]}: this shard is missing" in reported
    assert main(["info", "--local_dir", str(checkpoint)]) == 1


@LAYOUTS
@pytest.mark.parametrize("left", [0, 100, -100, -1])
def test_a_truncated_shard(
    broken: Callable[[str], Path], refused: Refused, tmp_path: Path, layout: str, left: int
) -> None:
    checkpoint = broken(layout)
    shard = checkpoint / SHARD[layout]
    os.truncate(shard, left if left >= 0 else shard.stat().st_size + left)
    reported = refused(
        "merge", "--local_dir", checkpoint, "--target_dir", tmp_path / "out", target=tmp_path / "out"
    )
    assert f"{shard}: is truncated" in reported


@LAYOUTS
def test_a_foreign_shard_is_not_executed(
    broken: Callable[[str], Path], refused: Refused, tmp_path: Path, layout: str
) -> None:
    checkpoint = broken(layout)
    command = ("merge", "--local_dir", checkpoint, "--target_dir", tmp_path / "out")
    if layout == "verl":
        torch.save({"w": Payload(tmp_path / "hacked")}, checkpoint / SHARD[layout])
        reported = refused(*command, target=tmp_path / "out")
        assert (
            f"{checkpoint / SHARD[layout]}: holds what weights_only refuses" in reported
            and "nothing was executed" in reported
        )
        (checkpoint / SHARD[layout]).write_text("hello")
        assert "is truncated, or not a shard of a model" in refused(*command, target=tmp_path / "out")
        torch.save([1, 2], checkpoint / SHARD[layout])
        assert "holds a list, not a state dict" in refused(*command, target=tmp_path / "out")
    else:
        (checkpoint / "dcp" / ".metadata").write_bytes(pickle.dumps(Payload(tmp_path / "hacked")))
        assert "it names posix.mkdir, which no index holds; nothing was executed" in refused(
            *command, target=tmp_path / "out"
        )
        (checkpoint / "dcp" / ".metadata").write_bytes(pickle.dumps({"a": 1}))
        assert "holds a dict, not the index" in refused(*command, target=tmp_path / "out")
        (checkpoint / "dcp" / ".metadata").unlink()
        assert "index is missing" in refused(*command, target=tmp_path / "out")
    assert not (tmp_path / "hacked").exists()


COMMANDS = {
    "merge": ("--local_dir", "{checkpoint}", "--target_dir", "{out}"),
    "test": ("--local_dir", "{checkpoint}", "--test_hf_dir", "{model}"),
    "info": ("--local_dir", "{checkpoint}"),
}


@pytest.mark.parametrize("command", COMMANDS)
def test_no_command_runs_what_an_index_names(
    broken: Callable[[str], Path], models: dict[str, str], refused: Refused, tmp_path: Path, command: str
) -> None:
    checkpoint = broken("hydraflow")
    put_into_index(checkpoint, tmp_path / "hacked")
    given = {"checkpoint": checkpoint, "out": tmp_path / "out", "model": models["tied"]}
    said = refused(command, *(word.format(**given) for word in COMMANDS[command]), target=tmp_path / "out")
    assert f"{checkpoint}/dcp/.metadata: " in said and REFUSED in said
    assert not (tmp_path / "hacked").exists()


def test_an_object_where_a_weight_was_is_not_unpickled(
    broken: Callable[[str], Path], refused: Refused, tmp_path: Path
) -> None:
    checkpoint = broken("hydraflow")
    put_into_shard(checkpoint, tmp_path / "hacked", as_object=True)
    command = ("merge", "--local_dir", checkpoint, "--target_dir", tmp_path / "out")
    assert "1 tensors missing: model.norm.weight" in refused(*command, target=tmp_path / "out")
    assert not (tmp_path / "hacked").exists()


def test_pickled_weights_of_a_foreign_model_are_not_run(
    models: dict[str, str], refused: Refused, tmp_path: Path
) -> None:
    model = Path(shutil.copytree(models["tied"], tmp_path / "model"))
    (model / "model.safetensors").unlink()
    torch.save({"w": Payload(tmp_path / "hacked")}, model / "pytorch_model.bin")
    reported = refused(
        "split",
        "--hf_dir",
        model,
        "--target_dir",
        tmp_path / "out",
        "--world_size",
        2,
        target=tmp_path / "out",
    )
    assert f"--hf_dir={model}: its weights hold more than tensors, which was not executed" in reported
    assert not (tmp_path / "hacked").exists()


def test_other_bytes_in_a_shard(broken: Callable[[str], Path], refused: Refused, tmp_path: Path) -> None:
    checkpoint = broken("hydraflow")
    shard = checkpoint / SHARD["hydraflow"]
    shard.write_bytes(b"x" * shard.stat().st_size)
    reported = refused(
        "merge", "--local_dir", checkpoint, "--target_dir", tmp_path / "out", target=tmp_path / "out"
    )
    assert f"{shard}: cannot be read at byte" in reported


def test_a_shard_of_another_checkpoint(
    split: Callable[..., Path], broken: Callable[[str], Path], refused: Refused, tmp_path: Path
) -> None:
    checkpoint = broken("verl")
    command = ("merge", "--local_dir", checkpoint, "--target_dir", tmp_path / "out")
    shutil.copyfile(split("verl", "value") / SHARD["verl"], checkpoint / SHARD["verl"])
    assert "does not belong to rank 0's shard: only one of them has lm_head.weight (2 such names)" in refused(
        *command, target=tmp_path / "out"
    )
    shutil.copyfile(split("verl", "bf16") / SHARD["verl"], checkpoint / SHARD["verl"])
    assert "torch.bfloat16 [17, 32] here and torch.float32 [17, 32] in rank 0's shard" in refused(
        *command, target=tmp_path / "out"
    )


@LAYOUTS
def test_a_wrong_world_size(
    broken: Callable[[str], Path], refused: Refused, tmp_path: Path, layout: str
) -> None:
    checkpoint = broken(layout)
    command = ("merge", "--local_dir", checkpoint, "--target_dir", tmp_path / "out")
    config = checkpoint / ("fsdp_config.json" if layout == "verl" else "checkpoint.json")
    size = 4 if layout == "verl" else 1
    config.write_text(json.dumps({**json.loads(config.read_text()), "world_size": size}))
    assert f"world_size={size}" in refused(*command, target=tmp_path / "out")
    if layout == "hydraflow":
        return
    for rank in range(2):
        (checkpoint / f"model_world_size_2_rank_{rank}.pt").rename(
            checkpoint / f"model_world_size_4_rank_{rank}.pt"
        )
    assert "was cut for 2 ranks; the file's name says 4" in refused(*command, target=tmp_path / "out")


def test_weights_that_config_json_does_not_describe(
    broken: Callable[[str], Path], refused: Refused, tmp_path: Path
) -> None:
    checkpoint = broken("hydraflow")
    command = ("merge", "--local_dir", checkpoint, "--target_dir", tmp_path / "out")
    file = checkpoint / "huggingface" / "config.json"
    config = json.loads(file.read_text())
    file.write_text(json.dumps({**config, "num_hidden_layers": 3, "layer_types": ["full_attention"] * 3}))
    assert "11 tensors missing: model.layers.2." in refused(*command, target=tmp_path / "out")
    file.write_text(json.dumps({**config, "intermediate_size": 40}))
    assert "tensors of another shape: model.layers.0.mlp.down_proj.weight [32, 96], not [32, 40]" in refused(
        *command, target=tmp_path / "out"
    )
    file.write_text(json.dumps({**config, "tie_word_embeddings": False}))
    reported = refused(*command, target=tmp_path / "out")
    assert "1 tensors missing: lm_head.weight" in reported and "--tie-word-embedding" in reported
    file.write_text(json.dumps({**config, "model_type": "no_such_model"}))
    assert "config.json: cannot be read" in refused(*command, target=tmp_path / "out")
    file.unlink()
    assert "the model's configuration is missing" in refused(*command, target=tmp_path / "out")


def test_ties_that_the_user_knows_of(
    broken: Callable[[str], Path], models: dict[str, str], refused: Refused, tmp_path: Path
) -> None:
    checkpoint = broken("hydraflow")
    file = checkpoint / "huggingface" / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "tie_word_embeddings": False}))
    assert merge(checkpoint, tmp_path / "out", "--tie-word-embedding").keys() == read(models["tied"]).keys()
    assert json.loads((tmp_path / "out" / "config.json").read_text())["tie_word_embeddings"] is True


@LAYOUTS
def test_ties_that_are_none(
    split: Callable[..., Path], models: dict[str, str], refused: Refused, tmp_path: Path, layout: str
) -> None:
    """config.json says tied, the two matrices differ: both are kept, and the new config.json says so."""
    checkpoint = Path(shutil.copytree(split(layout, "untied"), tmp_path / "checkpoint"))
    reported = refused(
        "merge",
        "--local_dir",
        checkpoint,
        "--target_dir",
        tmp_path / "out",
        "--tie-word-embedding",
        target=tmp_path / "out",
    )
    assert "lm_head.weight and model.embed_tokens.weight hold different numbers" in reported
    file = checkpoint / "huggingface" / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "tie_word_embeddings": True}))
    assert merge(checkpoint, tmp_path / "out").keys() == read(models["untied"]).keys()
    assert json.loads((tmp_path / "out" / "config.json").read_text())["tie_word_embeddings"] is False


def test_directories_that_hold_no_checkpoint(
    split: Callable[..., Path], refused: Refused, tmp_path: Path
) -> None:
    target = tmp_path / "out"
    (tmp_path / "empty").mkdir()
    assert "holds no sharded checkpoint" in refused(
        "merge", "--local_dir", tmp_path / "empty", "--target_dir", target, target=target
    )
    assert "no such directory" in refused(
        "merge", "--local_dir", tmp_path / "none", "--target_dir", target, target=target
    )
    shutil.copytree(split("hydraflow"), tmp_path / "global_step_3.unfinished" / "actor")
    unfinished = tmp_path / "global_step_3.unfinished"
    assert "a save that was interrupted" in refused(
        "merge", "--local_dir", unfinished, "--target_dir", target, target=target
    )
    (tmp_path / "megatron" / "dist_ckpt").mkdir(parents=True)
    reported = refused("merge", "--local_dir", tmp_path / "megatron", "--target_dir", target, target=target)
    assert "dist_ckpt/.metadata: the checkpoint's index is missing" in reported
    assert "neither Megatron-Core's common.pt nor metadata.json" in refused(
        "merge", "--backend", "megatron", "--local_dir", split("verl"), "--target_dir", target, target=target
    )


def test_runs_and_steps_give_their_actor(
    split: Callable[..., Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    split("hydraflow"), split("hydraflow", "value")
    capsys.readouterr()
    for step in (2, 12):
        shutil.copytree(split("hydraflow"), tmp_path / "run" / f"global_step_{step}" / "actor")
    shutil.copytree(split("hydraflow", "value"), tmp_path / "run" / "global_step_12" / "critic")
    (tmp_path / "run" / "latest_checkpointed_iteration.txt").write_text("12\n")
    assert main(["info", "--local_dir", str(tmp_path / "run"), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [(Path(facts["directory"]).name, facts["step"]) for facts in found] == [
        ("actor", 12),
        ("critic", 12),
    ]
    assert (
        merge(tmp_path / "run", tmp_path / "a").keys()
        == merge(tmp_path / "run" / "global_step_2", tmp_path / "b").keys()
    )
    assert "score.weight" in merge(tmp_path / "run" / "global_step_12" / "critic", tmp_path / "c")


def test_a_step_without_an_actor_and_the_best_step(
    split: Callable[..., Path], refused: Refused, tmp_path: Path
) -> None:
    """The limits on kept checkpoints remove each role's alone."""
    step = tmp_path / "best" / "global_step_7"
    shutil.copytree(split("hydraflow", "value"), step / "critic")
    reported = refused("merge", "--local_dir", step, "--target_dir", tmp_path / "a", target=tmp_path / "a")
    assert "holds no actor, only critic" in reported and f"-> --local_dir {step / 'critic'}" in reported
    shutil.copytree(split("hydraflow"), step / "actor")
    assert merge(step.parent, tmp_path / "b").keys() == merge(split("hydraflow"), tmp_path / "c").keys()
    assert main(["info", "--local_dir", str(step.parent)]) == 0
    step.rename(f"{step}.unfinished")
    again = refused(
        "merge", "--local_dir", step.parent, "--target_dir", tmp_path / "d", target=tmp_path / "d"
    )
    assert "a save that was interrupted" in again


def test_ctrl_c_leaves_nothing(
    split: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    def interrupted(*_: object) -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr(safetensors_files, "_write_all", interrupted)
    assert main(["merge", "--local_dir", str(split("verl")), "--target_dir", str(tmp_path / "out")]) == 130
    assert capsys.readouterr().err == "interrupted\n"
    assert not list(tmp_path.iterdir())


def test_a_fault_of_the_disk_is_reported(
    split: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    def broken_disk(*_: object) -> int:
        raise OSError(5, "Input/output error", "/disk/shard")

    monkeypatch.setattr(safetensors_files, "_write_all", broken_disk)
    assert (
        main(["merge", "--local_dir", str(split("verl")), "--target_dir", str(tmp_path / "out")])
        == EnvironmentFault.exit_code
    )
    assert "Input/output error: '/disk/shard'; nothing was left there" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_an_index_that_lacks_what_every_index_has(
    broken: Callable[[str], Path], refused: Refused, tmp_path: Path
) -> None:
    checkpoint = broken("hydraflow")
    index = checkpoint / "dcp" / ".metadata"
    index.write_bytes(index.read_bytes().replace(b"offsets", b"0ffsets", 1))
    assert f"{index}: is damaged: offsets" in refused(
        "merge", "--local_dir", checkpoint, "--target_dir", tmp_path / "out", target=tmp_path / "out"
    )


def test_a_full_disk_leaves_nothing(
    split: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    def full(*_: object) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(safetensors_files, "_write_all", full)
    assert (
        main(["merge", "--local_dir", str(split("verl")), "--target_dir", str(tmp_path / "out")])
        == EnvironmentFault.exit_code
        == 3
    )
    assert "the disk is full" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_no_space_is_known_before(
    split: Callable[..., Path], refused: Refused, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda _: shutil._ntuple_diskusage(100, 99, 1))
    reported = refused(
        "merge", "--local_dir", split("verl"), "--target_dir", tmp_path / "out", target=tmp_path / "out"
    )
    assert "has 1 B left" in reported


def test_numbers_too_large_for_the_type(
    broken: Callable[[str], Path], refused: Refused, tmp_path: Path
) -> None:
    checkpoint = broken("verl")
    state = torch.load(checkpoint / SHARD["verl"], weights_only=True)
    state["model.norm.weight"].to_local().fill_(70000.0)
    torch.save(state, checkpoint / SHARD["verl"])
    command = ("merge", "--local_dir", checkpoint, "--target_dir", tmp_path / "out", "--dtype", "fp16")
    assert "model.norm.weight holds 70000, but float16 ends at 65504" in refused(
        *command, target=tmp_path / "out"
    )


def test_wishes_that_do_not_fit(split: Callable[..., Path], refused: Refused, tmp_path: Path) -> None:
    target = tmp_path / "out"
    command = ("merge", "--local_dir", split("hydraflow"), "--target_dir", target)
    assert "has no value head" in refused(*command, "--is-value-model", target=target)
    assert "has no adapters" in refused(*command, "--lora", "adapter", target=target)
    assert "applies to an upload" in refused(*command, "--private", target=target)
    assert "invalid choice" in refused(*command, "--dtype", "int8", target=target)
    assert "not a size" in refused(*command, "--max_shard_size", "much", target=target)
    assert "unrecognized" in refused(*command, "--is_value", target=target)
    assert "no such directory" in refused(
        "test", "--local_dir", split("verl"), "--test_hf_dir", tmp_path / "none"
    )
    (tmp_path / "empty").mkdir()
    assert "no safetensors" in refused(
        "test", "--local_dir", split("verl"), "--test_hf_dir", tmp_path / "empty"
    )
    assert "no config.json" in refused(
        "split", "--hf_dir", tmp_path / "empty", "--target_dir", target, "--world_size", 2, target=target
    )
    (tmp_path / "empty" / "config.json").write_text("{}")
    reported = refused(
        "split", "--hf_dir", tmp_path / "empty", "--target_dir", target, "--world_size", 2, target=target
    )
    assert f"--hf_dir={tmp_path}/empty: cannot be read as a model" in reported
    assert "at least 1" in refused(
        "split", "--hf_dir", tmp_path / "empty", "--target_dir", target, "--world_size", 0, target=target
    )


def test_an_adapter_on_a_tied_matrix(split: Callable[..., Path], refused: Refused, tmp_path: Path) -> None:
    checkpoint = Path(shutil.copytree(split("verl"), tmp_path / "checkpoint"))
    for rank in range(2):
        file = checkpoint / f"model_world_size_2_rank_{rank}.pt"
        state = torch.load(file, weights_only=True)
        state["lm_head.base_layer.weight"] = state.pop("lm_head.weight")
        state |= {
            "lm_head.lora_A.default.weight": torch.ones(2, 32),
            "lm_head.lora_B.default.weight": torch.ones(17, 2),
        }
        torch.save(state, file)
    (checkpoint / "lora_train_meta.json").write_text(json.dumps({"r": 2, "lora_alpha": 2}))
    command = ("merge", "--local_dir", checkpoint, "--target_dir", tmp_path / "out")
    assert "lm_head.weight has an adapter and is tied to model.embed_tokens.weight" in refused(
        *command, target=tmp_path / "out"
    )
    assert "lm_head.weight" not in merge(checkpoint, tmp_path / "out", "--lora", "adapter")
    assert read(tmp_path / "out" / "lora_adapter").keys() == {
        f"base_model.model.lm_head.lora_{side}.weight" for side in "AB"
    }
    differing = torch.load(checkpoint / SHARD["verl"], weights_only=True)
    differing["lm_head.lora_B.default.weight"][3] = 7
    torch.save(differing, checkpoint / SHARD["verl"])
    reported = refused(*command, target=tmp_path / "other")
    assert (
        "lm_head.lora_B.default.weight is not cut, but differs from the copy in model_world_size_2_rank_0.pt"
        in reported
    )
