"""What a run was made with: commit and state of a real repository, versions, the command."""

from __future__ import annotations

import importlib.metadata
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import hydraflow
from hydraflow.tracking.provenance import commit_of, facts_of_start, versions
from hydraflow.tracking.run_folder import RunFolder


def git(folder: Path, *words: str) -> str:
    identity = ["-c", "user.name=a", "-c", "user.email=a@b.c"]
    return subprocess.run(
        ["git", "-C", str(folder), *identity, *words], check=True, capture_output=True, text=True
    ).stdout.strip()


def test_commit_branch_and_changed_files_of_a_repository(tmp_path: Path) -> None:
    git(tmp_path, "init", "-q", "-b", "trunk")
    (tmp_path / "reward.py").write_text("a = 1\n")
    git(tmp_path, "add", "reward.py")
    git(tmp_path, "commit", "-qm", "first")
    commit = git(tmp_path, "rev-parse", "HEAD")
    inside = tmp_path / "deep"
    inside.mkdir()
    assert commit_of(inside) == {
        "commit": commit,
        "branch": "trunk",
        "changed_files": 0,
        "folder": str(tmp_path),
    }
    (tmp_path / "reward.py").write_text("a = 2\n")
    found = commit_of(tmp_path)
    assert found is not None and found["changed_files"] == 1


def test_looking_at_a_repository_runs_none_of_its_programs(tmp_path: Path) -> None:
    """An unpacked folder may have another project's .git."""
    git(tmp_path, "init", "-q")
    program = tmp_path / "program"
    program.write_text(f"#!/bin/sh\ntouch {tmp_path}/ran\n")
    program.chmod(0o755)
    git(tmp_path, "commit", "-q", "--allow-empty", "-m", "first")
    git(tmp_path, "config", "core.fsmonitor", str(program))
    (tmp_path / ".git" / "hooks").mkdir(exist_ok=True)
    shutil.copy(program, tmp_path / ".git" / "hooks" / "post-index-change")
    git(tmp_path, "status")
    assert (tmp_path / "ran").exists(), "git itself does run it"
    (tmp_path / "ran").unlink()
    assert commit_of(tmp_path) is not None
    assert not (tmp_path / "ran").exists()


def test_no_repository_is_no_mistake(tmp_path: Path) -> None:
    assert commit_of(tmp_path) is None
    git(tmp_path, "init", "-q")
    assert commit_of(tmp_path) is None, "there is no commit yet"


def test_an_installed_package_has_no_commit_of_the_repository_around_it(tmp_path: Path) -> None:
    """As in an environment inside of a user's repository, which git ignores."""
    git(tmp_path, "init", "-q")
    (tmp_path / ".gitignore").write_text("env\n")
    git(tmp_path, "add", ".gitignore")
    git(tmp_path, "commit", "-qm", "first")
    shutil.copytree(Path(hydraflow.__file__).parent, tmp_path / "env" / "hydraflow")
    program = (
        "import json, sys; from hydraflow.tracking import provenance as p; print(json.dumps([p.__file__,"
        " p.facts_of_start(0, [])]))"
    )
    environ = {**os.environ, "PYTHONPATH": str(tmp_path / "env")}
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=tmp_path, env=environ, check=True, capture_output=True, text=True
    )
    file, facts = json.loads(done.stdout)
    assert file.startswith(str(tmp_path))
    assert facts["git"] is None and facts["git_of_folder"]["folder"] == str(tmp_path)


def test_versions_and_command(tmp_path: Path) -> None:
    found = facts_of_start(7, ["python", "-m", "hydraflow.main_ppo", "data.path=a b"])
    assert found["command"] == "python -m hydraflow.main_ppo 'data.path=a b'"
    assert found["after_step"] == 7
    assert found["versions"]["torch"] == importlib.metadata.version("torch")
    assert "vllm" not in versions() or importlib.metadata.version("vllm")


def test_every_start_of_a_run_is_noted(tmp_path: Path) -> None:
    folder = RunFolder.make(str(tmp_path / "run"), "e")
    assert folder.starts() == []
    folder.note_start({"after_step": 0})
    folder.note_start({"after_step": 5})
    assert json.loads((tmp_path / "run" / "run.json").read_text()) == {
        "starts": [{"after_step": 0}, {"after_step": 5}]
    }
    folder.run.write_text("{")
    assert folder.starts() == []
