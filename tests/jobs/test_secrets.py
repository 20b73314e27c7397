"""A run that is given secrets in every way there is: which of them are in which of its files, and that it
still runs again."""

from __future__ import annotations

import os
import stat
from importlib.util import find_spec
from pathlib import Path

import pytest
from jobs.command import assert_refused, completed, hydraflow

TYPED, IN_ADDRESS, EXPORTED = "S3CRETTYPED", "S3CRETADDRESS", "S3CRETEXPORTED"


def files_with(word: str, folder: Path) -> set[str]:
    return {
        path.relative_to(folder).as_posix()
        for path in folder.rglob("*")
        if path.is_file() and word.encode() in path.read_bytes()
    }


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


@pytest.fixture
def given(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, sft_keys: list[str]) -> list[str]:
    """One step of supervised training, with two secrets on its command line and a third one in its
    environment."""
    for name in [name for name in os.environ if name.startswith(("WANDB_", "SWANLAB_"))]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("MY_HF_TOKEN", EXPORTED)
    variables = f"ray_init.runtime_env.env_vars={{JUDGE: {TYPED}, REFERRED: '${{oc.env:MY_HF_TOKEN}}'}}"
    steps = [
        "trainer.total_training_steps=1",
        "trainer.save_freq=1",
        "trainer.save_final_model=false",
        "trainer.debug.local=true",
    ]
    return [
        *sft_keys,
        *steps,
        variables,
        f"+trainer.wandb_proxy=http://me:{IN_ADDRESS}@host:3128",
        "trainer.logger=[console,wandb]",
    ]


@pytest.mark.slow
@pytest.mark.skipif(find_spec("wandb") is None, reason="wandb is not installed")
def test_secrets_of_a_run_are_in_its_configuration_alone(tmp_path: Path, given: list[str]) -> None:
    done = completed("main_sft", *given, "trainer.default_local_dir=run", cwd=tmp_path)
    run = tmp_path / "run"
    assert not [word for word in (TYPED, IN_ADDRESS, EXPORTED) if word in done.stdout + done.stderr]
    assert files_with(TYPED, tmp_path) == files_with(IN_ADDRESS, tmp_path) == {"run/config.yaml"}
    assert files_with(EXPORTED, tmp_path) == set(), "the configuration refers to it"
    assert "${oc.env:MY_HF_TOKEN}" in (run / "config.yaml").read_text()
    assert {name: mode(run / name) for name in ("config.yaml", "config_origins.json", "run.json")} == {
        "config.yaml": 0o600,
        "config_origins.json": 0o600,
        "run.json": 0o600,
    }
    assert "wandb_proxy=http://(hidden)@host:3128" in (run / "run.json").read_text()
    again = ["--config-dir", "run", "--config-name", "config", "trainer.default_local_dir=again"]
    completed("main_sft", *again, cwd=tmp_path)
    assert (
        files_with(TYPED, tmp_path) == {"run/config.yaml", "again/config.yaml"}
        and files_with(EXPORTED, tmp_path) == set()
    )
    origins = [
        (tmp_path / name / "config_origins.json").read_text().count('"command line"')
        for name in ("run", "again")
    ]
    assert origins[0] == origins[1], "what is hidden there keeps its origin, too"


@pytest.mark.parametrize(
    "word",
    [
        f"trainer.wandb_api_key={TYPED}",
        f"trainer.wandb_proksy=http://me:{TYPED}@host",
        f"ray_init.runtime_env.env_varz={{JUDGE_TOKEN:{TYPED}}}",
        f"ray_init.runtime_env.env_vars={{JUDGE:'{TYPED}}}",
        f"ray_init.runtime_env.env_vars={{A=B:{TYPED}}}",
        f"ray_init.runtime_env.env_vars.JUDGE={TYPED},other",
        f"trainer.seed={{api_key:{TYPED}}}",
        f"--wandb-api-key={TYPED}",
        f"{{HF_TOKEN:{TYPED}}}",
    ],
)
def test_a_refusal_says_no_secrets(tmp_path: Path, word: str) -> None:
    done = hydraflow("main_ppo", word, cwd=tmp_path)
    assert_refused(done, "problem")
    assert TYPED not in done.stdout + done.stderr, done.stderr


def test_a_sweep_keeps_its_own_file_to_itself(tmp_path: Path) -> None:
    done = hydraflow(
        "main_ppo",
        "-m",
        "trainer.seed=1,2",
        f"trainer.wandb_proxy=http://me:{TYPED}@host",
        "data.train_files=no",
        cwd=tmp_path,
    )
    assert done.returncode == 2 and TYPED not in done.stderr
    assert {mode(path) for path in tmp_path.rglob("multirun.yaml")} == {0o600}
