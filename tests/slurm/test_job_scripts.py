"""The batch script's part of a job, with an srun that only notes how it was called, and ends as it was
asked to."""

from __future__ import annotations

import json
import os
import signal
import stat
import subprocess
import time
from pathlib import Path

import pytest

from hydraflow.compose.loading import load
from hydraflow.dispatch.runtime import ALL_JOINED
from hydraflow.schema import PPOConfig
from hydraflow.slurm.job_settings import JobSettings, job_settings_of
from hydraflow.system.allocation import Allocation

pytestmark = [pytest.mark.slow, pytest.mark.timeout(60)]  # each waits for a job script, two seconds or more

ROOT = Path(__file__).parents[2]
SRUN = """#!/usr/bin/env bash
printf '%s\\n' "$@" >"$HOME/srun.words"
cp "$HYDRAFLOW_JOB_FOLDER/token" "$HOME/token" && stat -c %a "$HYDRAFLOW_JOB_FOLDER/token" >"$HOME/token.mode"
env | grep '^RAY_AUTH' | sort >"$HOME/srun.environment"
"""
SCONTROL = (
    '#!/usr/bin/env bash\necho "$@" >>"$HOME/scontrol.words"\n(sleep 1 && kill -TERM "$PPID") >/dev/null'
    " 2>&1 &\n"
)
ENDS_WITH = 'echo {0} >"$HYDRAFLOW_JOB_FOLDER/exit_code"; exit {0}'


def program(home: Path, name: str, text: str) -> None:
    file = home / "bin" / name
    file.parent.mkdir(exist_ok=True)
    file.write_text(text)
    file.chmod(0o755)


def batch(home: Path, srun: str, *arguments: str, **variables: str) -> subprocess.Popen[str]:
    """A batch script as Slurm runs it: on the first of two nodes."""
    program(home, "srun", SRUN + srun)
    if not (home / "bin" / "scontrol").exists():
        program(home, "scontrol", SCONTROL)
    environ = {
        "PATH": f"{home / 'bin'}:{os.environ['PATH']}",
        "HOME": str(home),
        "SLURM_JOB_ID": "77",
        "SLURM_JOB_NUM_NODES": "2",
        "SLURM_JOB_NODELIST": "node[1-2]",
        "HYDRAFLOW_PYTHON": "python",
        "HYDRAFLOW_MODULE": "hydraflow.main_ppo",
        "HYDRAFLOW_SCRIPTS": str(ROOT / "scripts" / "slurm"),
        **variables,
    }
    words = [
        "bash",
        "-c",
        'set -euo pipefail; source "$HYDRAFLOW_SCRIPTS/job.sh"; run_job "$@"',
        "batch",
        *arguments,
    ]
    return subprocess.Popen(
        words, cwd=home, env=environ, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )


def ended(process: subprocess.Popen[str], seconds: float = 30) -> tuple[int, str]:
    said, _ = process.communicate(timeout=seconds)
    return process.returncode, said


@pytest.mark.parametrize("code", [0, 2, 4])
def test_the_exit_code_is_the_trainings(tmp_path: Path, code: int) -> None:
    assert ended(batch(tmp_path, ENDS_WITH.format(code)))[0] == code
    assert not (tmp_path / "scontrol.words").exists()


def test_without_a_training_it_is_sruns(tmp_path: Path) -> None:
    code, said = ended(batch(tmp_path, "exit 9"))
    assert code == 9 and "the nodes exited before the training left an exit code; srun: 9" in said


def test_nodes_are_started_once_with_the_runs_arguments_as_they_are(tmp_path: Path) -> None:
    ended(
        batch(
            tmp_path,
            ENDS_WITH.format(0),
            "data.train_files=a b.parquet",
            "trainer.experiment_name=$HOME",
            SLURM_CPUS_PER_TASK="64",
        )
    )
    words = (tmp_path / "srun.words").read_text().splitlines()
    assert {"--nodes=2", "--ntasks=2", "--ntasks-per-node=1", "--cpus-per-task=64", "--export=ALL"} <= set(
        words
    )
    assert words[-4:] == [
        "bash",
        str(ROOT / "scripts/slurm/node.sh"),
        "data.train_files=a b.parquet",
        "trainer.experiment_name=$HOME",
    ]


def test_each_job_has_a_token_of_its_own_that_only_the_user_reads_and_that_goes_with_it(
    tmp_path: Path,
) -> None:
    tokens = []
    for _ in range(2):
        ended(batch(tmp_path, ENDS_WITH.format(0), RAY_AUTH_TOKEN="from outside"))
        tokens.append((tmp_path / "token").read_text())
    assert len({*tokens}) == 2 and all(len(token) == 64 for token in tokens)
    assert (tmp_path / "token.mode").read_text() == "600\n"
    folder = tmp_path / "runs" / "slurm" / "job-77"
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700 and not (folder / "token").exists()
    assert (
        tmp_path / "srun.environment"
    ).read_text() == f"RAY_AUTH_MODE=token\nRAY_AUTH_TOKEN_PATH={folder}/token\n"


def test_a_job_folder_that_somebody_else_made_in_between_is_not_used(tmp_path: Path) -> None:
    program(tmp_path, "rm", '#!/usr/bin/env bash\n/bin/rm "$@" && mkdir -p -m 777 "${@: -1}"\n')
    code, said = ended(batch(tmp_path, ENDS_WITH.format(0)))
    assert code == 3 and f"HYDRAFLOW_JOB_DIR={tmp_path}/runs/slurm: other users can write to it" in said
    assert not list((tmp_path / "runs" / "slurm" / "job-77").iterdir()), "no token"
    assert not (tmp_path / "srun.words").exists(), "nothing was started"


def test_a_container_by_apptainer(tmp_path: Path) -> None:
    variables = {
        "HYDRAFLOW_CONTAINER": "apptainer:/images/hf.sif",
        "HYDRAFLOW_CONTAINER_MOUNTS": "/data:/data",
        "SLURM_GPUS_ON_NODE": "8",
    }
    ended(batch(tmp_path, ENDS_WITH.format(0), **variables))
    words = (tmp_path / "srun.words").read_text().splitlines()
    start = words.index("apptainer")
    mounted = (tmp_path, tmp_path / "runs/slurm/job-77", ROOT / "scripts/slurm")
    mounts = ",".join(f"{folder}:{folder}" for folder in mounted)
    expected = [
        "apptainer",
        "exec",
        "--bind",
        f"{mounts},/data:/data",
        "--pwd",
        str(tmp_path),
        "--nv",
        "/images/hf.sif",
        "bash",
    ]
    assert words[start:-1] == expected


def test_a_container_by_pyxis(tmp_path: Path) -> None:
    ended(batch(tmp_path, ENDS_WITH.format(0), HYDRAFLOW_CONTAINER="pyxis:nvcr.io#nvidia/pytorch:25.10-py3"))
    words = (tmp_path / "srun.words").read_text().splitlines()
    assert (
        "--container-image=nvcr.io#nvidia/pytorch:25.10-py3" in words
        and f"--container-workdir={tmp_path}" in words
    )
    assert next(word for word in words if word.startswith("--container-mounts=")).startswith(
        f"--container-mounts={tmp_path}:{tmp_path},"
    )
    assert words[-2] == "bash"


def test_a_container_of_another_kind_is_refused(tmp_path: Path) -> None:
    code, said = ended(batch(tmp_path, ENDS_WITH.format(0), HYDRAFLOW_CONTAINER="image.sif"))
    assert code == 2 and "HYDRAFLOW_CONTAINER=image.sif: must be apptainer:FILE.sif or pyxis:IMAGE" in said
    assert not (tmp_path / "srun.words").exists()


@pytest.mark.parametrize("sign", [":", ","])
def test_a_path_that_a_container_cannot_mount_is_refused(sign: str, tmp_path: Path) -> None:
    folder = {"HYDRAFLOW_JOB_DIR": str(tmp_path / f"jobs{sign}2")}
    container = {"HYDRAFLOW_CONTAINER": "apptainer:/images/hf.sif"}
    code, said = ended(batch(tmp_path, ENDS_WITH.format(0), **folder, **container))
    assert code == 2 and f"jobs{sign}2/job-77: a container cannot mount a path that contains" in said
    assert not (tmp_path / "srun.words").exists()
    ended(batch(tmp_path, ENDS_WITH.format(0), **folder))
    assert (tmp_path / "srun.words").exists(), "only containers cannot"


REQUEUE_NOTE = 'echo note >"$HYDRAFLOW_JOB_FOLDER/requeue"; ' + ENDS_WITH.format(0)
LOST = 'echo node2 >"$HYDRAFLOW_JOB_FOLDER/lost"; echo 4 >"$HYDRAFLOW_JOB_FOLDER/exit_code"; exec sleep 60'


def test_a_run_that_saved_because_it_was_asked_to_goes_back_into_the_queue(tmp_path: Path) -> None:
    code, said = ended(batch(tmp_path, REQUEUE_NOTE))
    assert (tmp_path / "scontrol.words").read_text() == "requeue 77\n"
    assert "it was asked to stop, and saved" in said
    assert code == 143, "Slurm ended it"


def test_a_lost_node_is_named_at_once_and_nobody_waits_for_it(tmp_path: Path) -> None:
    since = time.monotonic()
    _, said = ended(batch(tmp_path, LOST))
    assert time.monotonic() - since < 10
    assert "lost: node2. It no longer answers" in said and "a node was lost" in said
    assert (tmp_path / "scontrol.words").read_text() == "requeue 77\n"


@pytest.mark.parametrize(
    ("variables", "said", "code"),
    [
        ({"HYDRAFLOW_REQUEUE": "0"}, "HYDRAFLOW_REQUEUE=0: the same command resumes", 4),
        ({"HYDRAFLOW_MAX_REQUEUES": "3", "SLURM_RESTART_COUNT": "3"}, "already requeued 3 times", 4),
    ],
)
def test_it_is_put_back_only_so_often_and_only_if_wanted(
    tmp_path: Path, variables: dict[str, str], said: str, code: int
) -> None:
    ended_with, log = ended(batch(tmp_path, LOST, **variables))
    assert ended_with == code and said in log and not (tmp_path / "scontrol.words").exists()


def test_where_slurm_does_not_put_it_back_the_command_that_resumes_it_is_printed(tmp_path: Path) -> None:
    program(tmp_path, "scontrol", "#!/usr/bin/env bash\nexit 1\n")
    code, said = ended(batch(tmp_path, REQUEUE_NOTE))
    refused = "Slurm refused to requeue the job: the same command resumes from the last checkpoint"
    assert code == 0 and refused in said


def test_slurms_warning_reaches_the_training_and_not_the_step(tmp_path: Path) -> None:
    waits = 'until [[ -e "$HYDRAFLOW_JOB_FOLDER/signal" ]]; do sleep 0.1; done; ' + ENDS_WITH.format(0)
    process = batch(tmp_path, waits)
    words = tmp_path / "srun.environment"
    for _ in range(100):
        time.sleep(0.1)
        if words.exists():
            break
    process.send_signal(signal.SIGUSR1)
    code, said = ended(process)
    assert code == 0 and "SIGUSR1: asking the training to save and stop" in said


def test_cancelling_ends_what_was_started_and_nothing_else(tmp_path: Path) -> None:
    bystander = subprocess.Popen(["sleep", "60"])
    process = batch(tmp_path, 'echo $$ >"$HOME/step"; exec sleep 60')
    for _ in range(100):
        time.sleep(0.1)
        if (tmp_path / "step").exists() and (tmp_path / "step").read_text():
            break
    step = int((tmp_path / "step").read_text())
    process.terminate()
    code, said = ended(process)
    assert code == 143 and "SIGTERM: Slurm ends the job" in said
    assert not Path(f"/proc/{step}").exists() and bystander.poll() is None
    bystander.kill()
    bystander.wait()


PYTHON = """#!/usr/bin/env bash
shift 2 # -m hydraflow.slurm
case "$1" in
    check) echo "$FACTS" >"$HYDRAFLOW_JOB_FOLDER/facts" ;;
    start)
        echo 10.0.0.1:6379 >"$HYDRAFLOW_JOB_FOLDER/address"
        echo $$ >"$HYDRAFLOW_JOB_FOLDER/ray"
        exec sleep 60 ;;
    await) until [[ -s "$HYDRAFLOW_JOB_FOLDER/ray" ]]; do sleep 0.1; done ;;
    lost) ;;
    *)
        env | grep ^HYDRAFLOW_ALL >"$HYDRAFLOW_JOB_FOLDER/joined"
        printf '%s\\n' "$@" >"$HYDRAFLOW_JOB_FOLDER/training"
        exit "$CODE" ;;
esac
"""


def first_node(tmp_path: Path, code: int = 0, facts: str = 'HF_RUN_FOLDER=""') -> Path:
    """node.sh and train.sh with a Python that only notes how it was called; the job's folder."""
    program(tmp_path, "python", PYTHON)
    folder = tmp_path / "job"
    folder.mkdir()
    environ = {
        **os.environ,
        "HYDRAFLOW_PYTHON": str(tmp_path / "bin" / "python"),
        "HYDRAFLOW_MODULE": "hydraflow.main_ppo",
        "HYDRAFLOW_JOB_FOLDER": str(folder),
        "HYDRAFLOW_NODE_TMP": str(tmp_path),
        "SLURM_JOB_ID": "78",
        "SLURM_NODEID": "0",
        "CODE": str(code),
        "FACTS": facts,
    }
    words = ["bash", str(ROOT / "scripts" / "slurm" / "node.sh"), "trainer.seed=3"]
    done = subprocess.run(words, env=environ, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == code, done.stderr
    (folder / "said").write_text(done.stderr)
    return folder


@pytest.mark.parametrize("code", [0, 4])
def test_the_first_node_trains_and_ends_its_ray(tmp_path: Path, code: int) -> None:
    folder = first_node(tmp_path, code)
    assert (folder / "exit_code").read_text() == f"{code}\n"
    assert (folder / "training").read_text().split() == ["trainer.seed=3", "ray_init.address=10.0.0.1:6379"]
    assert (folder / "joined").read_text() == f"{ALL_JOINED}=1\n", "a node that is gone does not come back"
    assert not Path(f"/proc/{(folder / 'ray').read_text().strip()}").exists(), (
        "Ray outlives its node's script"
    )
    assert not (folder / "lost").exists() or not (folder / "lost").read_text()
    assert not list(tmp_path.glob("hydraflow-*/78")), "its temporary folder is gone"


def test_a_run_folder_with_any_name_reaches_the_training(tmp_path: Path) -> None:
    """Hydra would read brackets, commas and quotes in it."""
    run = tmp_path / "it's [mine], (2)" / "a=b"
    given = JobSettings(cpus=1, gpus=0, run_folder=str(run), start_timeout=1)
    words = (first_node(tmp_path, facts=given.to_shell()) / "training").read_text().splitlines()
    assert load("ppo", PPOConfig, words).trainer.default_local_dir == str(run)


@pytest.mark.parametrize(("job", "resumes"), [("77", True), ("76", False)])
def test_a_job_that_was_put_back_resumes_even_with_resume_mode_disable(
    tmp_path: Path, job: str, resumes: bool
) -> None:
    """But an earlier job's run in the same folder is not gone on with."""
    run = tmp_path / "run"
    run.mkdir()
    (run / "run.json").write_text(json.dumps({"starts": [{"slurm_job": job}]}))
    config = load(
        "ppo",
        PPOConfig,
        ["trainer.resume_mode=disable", f"trainer.default_local_dir={run}", "trainer.device=cpu"],
    )
    facts = job_settings_of(config, Allocation("77"))
    assert facts.resumes == resumes
    words = (first_node(tmp_path, facts=facts.to_shell()) / "training").read_text().splitlines()
    assert ("trainer.resume_mode=auto" in words) == resumes


def test_a_folder_on_the_node_that_somebody_else_made_is_not_used(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / f"hydraflow-{os.getuid()}").symlink_to(tmp_path / "elsewhere")
    folder = first_node(tmp_path, code=3)
    assert (folder / "exit_code").read_text() == "3\n" and not list((tmp_path / "elsewhere").iterdir())
    assert "another user owns it; set HYDRAFLOW_NODE_TMP to another folder" in (folder / "said").read_text()
    assert len(list((folder / "failed").iterdir())) == 1
