"""Whether what a configuration names is there."""

from __future__ import annotations

from pathlib import Path

import pytest

from hydraflow.errors import ConfigError
from hydraflow.system.paths import (
    core_checkpoint_problems,
    expanded,
    file_problems,
    is_hub_name,
    listed,
    model_problems,
    no_file,
    require_writable,
)
from hydraflow.tracking.run_folder import RunFolder


def rules(problems: list) -> list[str]:
    return [f"{problem.field}: {problem.rule}" for problem in problems]


def test_each_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    (tmp_path / "here.parquet").touch()
    files = [str(tmp_path / "here.parquet"), str(tmp_path / "gone.parquet"), str(tmp_path)]
    assert rules(file_problems(files, "k")) == [
        f"k: no such file in {tmp_path}",
        "k: is a folder, not a file",
    ]
    assert file_problems(files[0], "k") == []


def test_what_is_there_instead_is_suggested(tmp_path: Path) -> None:
    for name in ("train.parquet", "train_a.parquet", "train_b.parquet", "train.md"):
        (tmp_path / name).touch()
    (tmp_path / "train.jsonl").mkdir()
    meant = [f"k={tmp_path}/{name}.parquet" for name in ("train", "train_a", "train_b")]
    assert no_file(tmp_path, "k").remedy == " or ".join(meant)
    near = no_file(tmp_path / "train_b.parqet", "k").remedy
    assert near.startswith(meant[2]) and ".md" not in near and ".jsonl" not in near
    assert no_file(tmp_path, "k", endings=(".py",), after=":f").remedy == f"k={tmp_path}/<file>:f"


def test_the_folder_that_is_missing_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    gone = no_file(tmp_path / "data" / "train.parquet", "k")
    assert (gone.rule, gone.remedy) == (f"no such file: {tmp_path}/data does not exist", "k=<a file>")
    assert no_file(tmp_path / "file" / "a", "k").rule == f"no such file: {tmp_path}/file is not a folder"
    assert rules(file_problems("/a" * 2000, "k")), "a path that is too long"


def test_a_list_of_files_keeps_its_others(tmp_path: Path) -> None:
    (tmp_path / "a.parquet").touch()
    [problem] = file_problems([str(tmp_path / "a.parquet"), str(tmp_path / "aa.parquet")], "k")
    assert problem.remedy == f"{tmp_path}/a.parquet"


@pytest.mark.parametrize("files", [[], 3, [3], None, {}])
def test_what_is_no_list_of_files(files: object) -> None:
    assert listed(files) is None
    assert rules(file_problems(files, "k")) == ["k: must be a Parquet or JSONL file, or a list of them"]


def test_a_home_folder_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "config.json").touch()
    assert listed("~/a.parquet") == [tmp_path / "a.parquet"]
    assert model_problems("~", "k") == []
    assert rules(model_problems("~/gone", "k")) == ["k: there is no such directory"]


def test_a_model_is_a_folder_with_a_config_or_a_name_on_the_hub(tmp_path: Path) -> None:
    weights = tmp_path / "model.safetensors"
    weights.touch()
    assert rules(model_problems(str(tmp_path), "k")) == [
        "k: this directory has no config.json, so it is not a Hugging Face model"
    ]
    [problem] = model_problems(str(weights), "k")
    assert (problem.rule, problem.remedy) == ("is a file, not a directory", f"k={tmp_path}")
    assert rules(model_problems("models/of/mine", "k")) == ["k: there is no such directory"]
    assert model_problems("org/name", "k") == []


def test_the_model_inside_of_a_folder_is_suggested(tmp_path: Path) -> None:
    """The final models of a run are in a folder for each role."""
    (tmp_path / "actor").mkdir()
    (tmp_path / "actor" / "config.json").touch()
    [problem] = model_problems(str(tmp_path), "k")
    assert problem.remedy == f"k={tmp_path}/actor"


@pytest.mark.parametrize(
    ("file", "writer"),
    [
        ("common.pt", "Megatron-Core"),
        ("iter_0000010/common.pt", "Megatron-Core"),
        ("dist_ckpt/common.pt", "Megatron-Core"),
        ("global_step_3/actor/dist_ckpt/common.pt", "Megatron-Core"),
        ("mp_rank_00/x.pt", "Megatron-Core"),
        ("checkpoint.json", "several ranks"),
        ("global_step_3/actor/checkpoint.json", "several ranks"),
        ("model_world_size_2_rank_0.pt", "several ranks"),
    ],
)
@pytest.mark.parametrize("pointer", [True, False])
def test_a_checkpoint_in_parts_must_be_merged_first(
    tmp_path: Path, file: str, writer: str, pointer: bool
) -> None:
    """With or without the file that names the last iteration; configuration and tokenizer may be there."""
    (tmp_path / file).parent.mkdir(exist_ok=True, parents=True)
    (tmp_path / file).touch()
    (tmp_path / "huggingface").mkdir()
    (tmp_path / "huggingface" / "config.json").touch()
    if pointer:
        (tmp_path / "latest_checkpointed_iteration.txt").write_text("10")
    [problem] = model_problems(str(tmp_path), "k")
    assert problem.rule == f"holds a checkpoint of {writer}, which must be merged first"
    command = f"python -m hydraflow.model_merger merge --local_dir {tmp_path} --target_dir MERGED"
    assert problem.remedy == f"{command}, then k=MERGED"
    (tmp_path / "huggingface" / "config.json").unlink()
    [problem] = model_problems(str(tmp_path), "k")
    assert (
        problem.remedy == f"{command} --hf_model_path <Hugging Face directory of that model>, then k=MERGED"
    )


def test_a_checkpoint_of_megatron_core_is_found_where_trainers_put_it(tmp_path: Path) -> None:
    assert rules(core_checkpoint_problems(str(tmp_path / "gone"), "k")) == ["k: there is no such directory"]
    (tmp_path / "config.json").touch()
    assert rules(core_checkpoint_problems(str(tmp_path / "config.json"), "k")) == [
        "k: is a file, not a directory"
    ]
    [problem] = core_checkpoint_problems(str(tmp_path), "k")
    assert problem.rule == "holds no checkpoint that Megatron-Core wrote: there is no common.pt in it"
    assert problem.remedy.endswith(f"{tmp_path} as the path of the model")
    (tmp_path / "iter_0000010").mkdir()
    (tmp_path / "iter_0000010" / "common.pt").touch()
    assert core_checkpoint_problems(str(tmp_path), "k") == []


def test_a_file_that_cannot_be_written_is_refused_before_the_start(tmp_path: Path) -> None:
    require_writable(None, "ray_init.timeline_file")
    require_writable(str(tmp_path / "new" / "folder" / "t.json"), "ray_init.timeline_file")
    assert not list(tmp_path.iterdir())
    for path in (str(tmp_path), "/proc/t.json"):
        with pytest.raises(ConfigError, match="ray_init.timeline_file=.*cannot be written"):
            require_writable(path, "ray_init.timeline_file")


@pytest.mark.parametrize("name", ["x" * 300, "~nobody-of-this-name/x"])
def test_names_that_no_file_can_have(name: str) -> None:
    assert expanded(name) == Path(name)
    assert len(file_problems(name, "data.train_files")) == 1
    assert len(model_problems(f"./{name}", "model.path")) == 1
    assert len(core_checkpoint_problems(name, "path")) == 1
    assert is_hub_name("x" * 300) and not is_hub_name("")


def test_the_home_of_an_unknown_user_is_not_made_here(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for look in (
        lambda: require_writable("~nobody-of-this-name/x.json", "output.path"),
        lambda: RunFolder.prove_writable("~nobody-of-this-name/run"),
    ):
        with pytest.raises(ConfigError, match="that home folder is not known"):
            look()
    assert list(tmp_path.iterdir()) == []
