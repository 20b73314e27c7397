"""What `submit` makes of a command line: options, the script, sweeps; no Slurm is needed."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from jobs.command import hydraflow

from hydraflow.compose.command_words import combinations
from hydraflow.errors import ConfigError, EnvironmentFault
from hydraflow.slurm.options import parse
from hydraflow.slurm.script import fill, shipped
from hydraflow.slurm.submit import submit as slurm_submit

ROOT = Path(__file__).parents[2]
CPU = ["--", "trainer.device=cpu"]


def submit(*words: str, home: Path) -> subprocess.CompletedProcess[str]:
    return hydraflow("slurm", "submit", *words, cwd=home)


def directives(script: str) -> dict[str, str]:
    lines = [line.removeprefix("#SBATCH ") for line in script.splitlines() if line.startswith("#SBATCH ")]
    return {line.partition("=")[0]: line.partition("=")[2] for line in lines}


def test_a_dry_run_prints_the_script_and_makes_nothing(tmp_path: Path) -> None:
    asked = [
        "--nodes",
        "4",
        "--gpus-per-node",
        "8",
        "--time",
        "8:00:00",
        "--partition",
        "gpu",
        "--sbatch=--reservation=r1",
    ]
    own = [
        "--python",
        "/opt/venv/bin/python",
        "--interface",
        "ib0",
        "--container",
        "apptainer:/images/hf.sif",
        "--dry-run",
    ]
    done = submit(
        *asked, *own, "--", "data.train_batch_size=128", "trainer.experiment_name=$HOME a", home=tmp_path
    )
    assert done.returncode == 0, done.stderr
    found = directives(done.stdout)
    assert {
        name: found[name]
        for name in (
            "--nodes",
            "--gpus-per-node",
            "--cpus-per-task",
            "--time",
            "--partition",
            "--reservation",
        )
    } == {
        "--nodes": "4",
        "--gpus-per-node": "8",
        "--cpus-per-task": "64",
        "--time": "8:00:00",
        "--partition": "gpu",
        "--reservation": "r1",
    }
    assert found["--signal"] == "B:USR1@120" and "--requeue" in found and found["--ntasks-per-node"] == "1"
    said = bash(
        done.stdout.partition("source ")[0]
        + 'printf "%s\\n" "$HYDRAFLOW_CONTAINER" "$HYDRAFLOW_PYTHON" "${ARGUMENTS[@]}"'
    )
    assert said == [
        "apptainer:/images/hf.sif",
        "/opt/venv/bin/python",
        "data.train_batch_size=128",
        "trainer.experiment_name=$HOME a",
    ]
    assert not list(tmp_path.iterdir())


def test_a_reader_that_has_seen_enough_is_no_error(tmp_path: Path) -> None:
    words = [sys.executable, "-m", "hydraflow.slurm", "submit", "--dry-run", *CPU]
    with subprocess.Popen(
        words,
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    ) as process:
        assert process.stdout is not None and process.stderr is not None
        process.stdout.close()
        assert (process.stderr.read(), process.wait(60)) == (b"", 0)


def bash(script: str, **environ: str) -> list[str]:
    done = subprocess.run(
        ["bash", "-c", script], env={**os.environ, **environ}, capture_output=True, text=True, check=True
    )
    return done.stdout.splitlines()


def test_what_is_not_asked_for_is_left_to_slurm(tmp_path: Path) -> None:
    found = directives(submit("--exclusive", "--no-requeue", "--dry-run", *CPU, home=tmp_path).stdout)
    assert found["--nodes"] == "1" and "--exclusive" in found and "--no-requeue" in found
    assert (
        not {"--gpus-per-node", "--cpus-per-task", "--time", "--mem", "--requeue", "--array", "--partition"}
        & found.keys()
    )


def test_the_run_is_judged_as_it_will_be_in_the_job(tmp_path: Path) -> None:
    words = ["--nodes", "2", "--gpus-per-node", "3", "--dry-run", "--", "trainer.nnodes=4"]
    done = submit(*words, home=tmp_path)
    assert done.returncode == 2 and not done.stdout
    assert "trainer.nnodes=4: Slurm gave job (to be submitted) 2 nodes (SLURM_JOB_NUM_NODES=2)" in done.stderr
    done = submit("--nodes", "2", "--gpus-per-node", "3", "--dry-run", home=tmp_path)
    assert done.returncode == 2
    assert "which 6 data ranks of the actor cannot share equally" in done.stderr, "the plan knows the GPUs"


def test_an_unknown_key_is_found_before_the_queue(tmp_path: Path) -> None:
    done = submit("--dry-run", "--", "data.train_batchsize=4", home=tmp_path)
    assert done.returncode == 2 and "data.train_batch_size=4" in done.stderr


def test_a_sweep_becomes_an_array(tmp_path: Path) -> None:
    words = [
        "--multirun",
        "--dry-run",
        "--",
        "trainer.device=cpu",
        "trainer.seed=1,2",
        "actor_rollout_ref.actor.optim.lr=1e-5,1e-6",
    ]
    done = submit(*words, home=tmp_path)
    assert done.returncode == 0, done.stderr
    assert directives(done.stdout)["--array"] == "0-3"
    script = done.stdout.partition("# shellcheck source")[0] + 'printf "%s\\n" "${ARGUMENTS[@]}"'
    seeds = [bash(script, SLURM_ARRAY_TASK_ID=str(task))[1] for task in range(4)]
    assert seeds == ["trainer.seed=1", "trainer.seed=1", "trainer.seed=2", "trainer.seed=2"]
    rates = [float(bash(script, SLURM_ARRAY_TASK_ID=str(task))[2].partition("=")[2]) for task in range(4)]
    assert rates == [1e-5, 1e-6, 1e-5, 1e-6]


def test_each_combination_of_a_sweep_is_judged(tmp_path: Path) -> None:
    done = submit(
        "--multirun", "--dry-run", "--", "trainer.device=cpu", "data.train_batch_size=64,63", home=tmp_path
    )
    assert done.returncode == 2 and "63" in done.stderr


def test_combinations_write_out_lists_ranges_and_nothing_else() -> None:
    assert combinations(["a=range(1,3)", "--config-name", "mine", "b=[1,2]"]) == [
        ["a=1", "--config-name", "mine", "b=[1,2]"],
        ["a=2", "--config-name", "mine", "b=[1,2]"],
    ]
    with pytest.raises(ConfigError, match="1001 jobs"):
        combinations(["a=range(0,1001)"])


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--nodes", "0"], "--nodes 0: must be at least 1"),
        (["--nodes", "two"], "argument --nodes: invalid int value"),
        (["--time", "soon"], "--time soon: is not of the form 24:00:00"),
        (["--mem", "1.5G"], "--mem 1.5G: is not of the form 512G"),
        (["--container", "image.sif"], "is not of the form apptainer:/path/image.sif"),
        (["--sbatch=reservation=x"], "-> --sbatch=--reservation=x"),
        (["--dry-run", "--wait"], "submits nothing that could be waited for"),
        (["--", "--multirun"], "the sweep is expanded when it is submitted"),
        (["--", "--help"], "only prints something"),
        (
            ["--", "--cfg", "job", "trainer.seed=1"],
            "-> python -m hydraflow.main_ppo --cfg job trainer.seed=1",
        ),
        (["--time", "2"], "the job would be asked to save 120 s before its end"),
        (["--time", "1:00:00", "--warning", "3600"], "-> --time 120 or --warning 1800"),
        (["--node", "2"], "unrecognized arguments"),
        (["data.shuffle=false"], "unrecognized arguments: data.shuffle=false"),
    ],
)
def test_wrong_options(words: list[str], said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse(words)
    assert said in str(caught.value)


def test_all_wrong_options_come_at_once() -> None:
    with pytest.raises(ConfigError) as caught:
        parse(["--nodes", "0", "--mem", "lots", "--time", "soon"])
    assert len(caught.value.problems) == 3


@pytest.mark.parametrize("time", ["30", "90:00", "24:00:00", "2-12", "2-12:30:00"])
def test_times_as_sbatch_takes_them(time: str) -> None:
    assert parse(["--time", time]).time == time


def test_files_that_are_missing_are_found_for_every_kind_of_job(tmp_path: Path) -> None:
    done = submit(
        "--dry-run",
        "--job",
        "generate",
        "--",
        "model.path=/no/model",
        "data.path=no.parquet",
        "output.path=x",
        home=tmp_path,
    )
    assert (
        done.returncode == 2
        and "model.path=/no/model" in done.stderr
        and "data.path=no.parquet" in done.stderr
    )


def test_jobs_of_a_sweep_do_not_share_a_run_folder(tmp_path: Path) -> None:
    words = ["--multirun", "--dry-run", "--", "trainer.device=cpu", "trainer.seed=1,2"]
    done = submit(*words, "trainer.default_local_dir=runs/mine", home=tmp_path)
    assert (
        done.returncode == 2
        and "trainer.default_local_dir=runs/mine: is the folder of 2 of the 2 jobs" in done.stderr
    )
    assert (
        submit(
            "--multirun", "--dry-run", *CPU, "trainer.default_local_dir=runs/a,runs/b", home=tmp_path
        ).returncode
        == 0
    )


def test_a_run_folder_of_a_file_is_shared_too(tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text(
        "defaults: [ppo, _self_]\ntrainer: {device: cpu, default_local_dir: runs/mine}\n"
    )
    words = ["--multirun", "--dry-run", "--", "--config-dir", ".", "--config-name", "mine"]
    done = submit(*words, "recipe=arithmetic", "trainer.seed=1,2", home=tmp_path)
    assert done.returncode == 2 and "runs/mine: is the folder of 2 of the 2 jobs" in done.stderr


def as_slurm_reads_it(script: str, home: Path) -> list[str]:
    """The options that sbatch itself finds in a script. It then ends, since the last one does not exist."""
    (home / "slurm.conf").write_text("ClusterName=x\nSlurmctldHost=localhost\n")
    lines = script.splitlines()
    last = max(number for number, line in enumerate(lines) if line.startswith("#SBATCH "))
    (home / "job.sh").write_text(
        "\n".join([*lines[: last + 1], "#SBATCH --no-such-option", *lines[last + 1 :]])
    )
    environ = {**os.environ, "SLURM_CONF": str(home / "slurm.conf")}
    words = ["sbatch", "-vvv", str(home / "job.sh")]
    done = subprocess.run(words, env=environ, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode != 0 and "no-such-option" in done.stderr, done.stderr
    return re.findall(r'Found in script, argument "(.*)"$', done.stderr, re.MULTILINE)[:-1]


@pytest.mark.skipif(shutil.which("sbatch") is None, reason="Slurm is not installed: apt install slurm-wlm")
def test_values_come_to_slurm_as_they_were_given(tmp_path: Path) -> None:
    odd = {
        "--comment": "two words, \"one\" in 'quotes' # and \\ a backslash",
        "--output": r"a\1b $HOME-%j.log",
        "--mail-user": "me",
    }
    own = [
        "--account",
        "our team",
        "--partition",
        "a#b,c",
        "--qos",
        "it's",
        "--sbatch=--reservation='my own'",
    ]
    done = submit(
        "--dry-run", *own, *(f"--sbatch={name}={value}" for name, value in odd.items()), *CPU, home=tmp_path
    )
    assert done.returncode == 0, done.stderr
    wanted = odd | {
        "--account": "our team",
        "--partition": "a#b,c",
        "--qos": "it's",
        "--reservation": "my own",
    }
    found = {
        name: value
        for name, _, value in (word.partition("=") for word in as_slurm_reads_it(done.stdout, tmp_path))
    }
    assert {name: found[name] for name in wanted} == wanted
    assert found["--nodes"] == "1" and found["--signal"] == "B:USR1@120" and "--requeue" in found


@pytest.mark.parametrize(
    "words",
    [
        ["--partition", "main\ntouch X #"],
        ["--account", "a\rb"],
        ["--qos", "a\x1b[31m"],
        ["--python", "/bin/python\n"],
        ["--container", "pyxis:a\tb"],
        ["--sbatch=--comment=x\necho INJECTED"],
        ["--sbatch=--comment\necho INJECTED"],
        ["--sbatch=--comment two words"],
        ["--sbatch=--exclusive --overcommit"],
    ],
)
def test_options_that_would_be_more_than_one_line_or_option(words: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        parse([*words, "--dry-run"])
    assert (
        len(caught.value.problems) == 1
        and not {"\r", "\x1b"} & set(str(caught.value))
        and "\necho" not in str(caught.value)
    )


def slurm(
    home: Path, monkeypatch: pytest.MonkeyPatch, *, sinfo: str = "main*|2|8", sbatch: str = "echo 41"
) -> None:
    """Slurm's commands, which print what they are given."""
    programs = home / "bin"
    programs.mkdir()
    for name, does in {
        "sinfo": f"echo '{sinfo}'",
        "sbatch": f"env >{home}/environment; cat >{home}/script; {sbatch}",
    }.items():
        (programs / name).write_text(f"#!/usr/bin/env bash\n{does}\n")
        (programs / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{programs}:{os.environ['PATH']}")


def test_what_is_submitted_is_reported_with_its_log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    slurm(tmp_path, monkeypatch)
    assert "job 41 submitted; its log: runs/slurm/hydraflow-ppo-41.log" in submit(*CPU, home=tmp_path).stdout
    said = submit("--multirun", *CPU, "trainer.seed=1,2", home=tmp_path).stdout
    assert "array 41 submitted; its log: runs/slurm/hydraflow-ppo-41_*.log" in said
    said = submit(
        "--multirun", "--sbatch=--output=mine/%x.%j", "--sbatch=--job-name=x", *CPU, home=tmp_path
    ).stdout
    assert "job 41 submitted; its log: mine/x.41" in said, "a sweep of one is no array"
    assert (
        "its log: my logs/41.log" in submit('--sbatch=--output="my logs/%j.log"', *CPU, home=tmp_path).stdout
    )


def test_a_job_does_not_inherit_the_job_that_it_is_submitted_from(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    slurm(tmp_path, monkeypatch)
    for name in ("SLURM_JOB_ID", "SLURM_MEM_PER_CPU", "SLURM_CPUS_PER_TASK", "SLURM_CONF"):
        monkeypatch.setenv(name, "7")
    assert submit(*CPU, home=tmp_path).returncode == 0
    found = (tmp_path / "environment").read_text().splitlines()
    assert [line for line in found if line.startswith("SLURM_")] == ["SLURM_CONF=7"]


def test_several_partitions_may_be_named_if_one_has_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    slurm(tmp_path, monkeypatch, sinfo="small|1|8\nlarge|9|8")
    asked = ["--nodes", "4", *CPU]
    assert submit("--partition", "small,large", *asked, home=tmp_path).returncode == 0
    assert (
        "--nodes 4: partition small has 1 node"
        in submit("--partition", "small", *asked, home=tmp_path).stderr
    )
    assert (
        "--partition small,larg: the partitions here are small, large"
        in submit("--partition", "small,larg", *asked, home=tmp_path).stderr
    )


def test_the_partition_that_sbatch_will_take_is_looked_at(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    slurm(tmp_path, monkeypatch, sinfo="small*|1|8\nlarge|9|8")
    asked = ["--nodes", "4", *CPU]
    assert "partition small has 1 node" in submit(*asked, home=tmp_path).stderr
    assert submit("--sbatch=--partition=large", *asked, home=tmp_path).returncode == 0
    monkeypatch.setenv("SBATCH_PARTITION", "large")
    assert submit("--partition", "small", *asked, home=tmp_path).returncode == 0
    monkeypatch.setenv("SBATCH_PARTITION", "larg")
    assert "-> unset SBATCH_PARTITION, and --partition" in submit(*asked, home=tmp_path).stderr


def test_a_controller_that_does_not_answer_is_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    slurm(tmp_path, monkeypatch, sbatch="sleep 5")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("hydraflow.slurm.submit.SECONDS", 0.5)
    with pytest.raises(EnvironmentFault, match="sbatch has not answered for 0.5 s"):
        slurm_submit(parse(CPU))


def test_without_slurm_it_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    done = submit(*CPU, home=tmp_path)
    assert (
        done.returncode == 2
        and "sbatch: is not on PATH: this is not a machine of a Slurm cluster" in done.stderr
    )


def test_the_example_is_a_whole_script_by_itself() -> None:
    text = shipped("examples/slurm/ppo.sbatch").read_text()
    assert {"--nodes", "--gpus-per-node", "--cpus-per-task", "--signal", "--requeue", "--time"} <= directives(
        text
    ).keys()
    done = subprocess.run(["bash", "-n"], input=text, text=True, capture_output=True, check=False)
    assert done.returncode == 0, done.stderr
    assert fill(text, {"--nodes": "9", "--time": None}, {}, [["a=b"]]).count("#SBATCH --nodes=9\n") == 1


def test_neither_torch_nor_ray_is_imported() -> None:
    code = (
        "import sys, hydraflow.slurm.__main__; print(*sorted({'torch', 'ray', 'transformers'} &"
        " sys.modules.keys()))"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == ""


def test_ci_installs_what_the_tests_need() -> None:
    said = (ROOT / ".ci" / "run").read_text()
    assert all(package in said for package in ("slurm-wlm", "munge", "tini", "shellcheck"))
