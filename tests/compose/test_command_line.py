"""The command line as a user meets it, in a process of its own or, where only words matter, in this one."""

import json
import logging
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from compose import here
from hydra._internal.hydra import Hydra
from jobs.command import hydraflow, python

from hydraflow.compose.arguments import CommandLineOption
from hydraflow.compose.launch import help_text
from hydraflow.schema import PPOConfig

ENTRY = Path(__file__).parent / "dummy_entry.py"
ROOT = ENTRY.parent.parent.parent


def call(folder: Path, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return python(str(ENTRY), *arguments, cwd=folder, **environment)


def printed(result: subprocess.CompletedProcess[str]) -> list[dict]:
    assert result.returncode == 0, result.stderr
    return [json.loads(line) for line in result.stdout.splitlines()]


def test_a_run_gets_its_configuration_and_leaves_no_files(tmp_path):
    [seen] = printed(
        call(tmp_path, "ppo", "+data.shuffle=false", "++trainer.seed=3", "data.val_batch_size=5")
    )
    assert seen["config"]["data"]["shuffle"] is False
    assert seen["config"]["trainer"]["seed"] == 3
    assert seen["config"]["recipe"]["name"] == "arithmetic"
    assert {"data.shuffle", "trainer.seed", "data.val_batch_size"} <= set(seen["given"])
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["data.train_bach_size=4"], "-> data.train_batch_size=4"),
        (["trainer.seed=abc"], "trainer.seed=abc: must be a whole number"),
        (["recipe=arithmetik"], "none\n      -> recipe=arithmetic\n"),
        (["algorithm.adv_estimator=grop"], "-> algorithm.adv_estimator=grpo"),
        (["--trainer.seed", "5"], "-> trainer.seed=5"),
        (["seed"], "seed: is not key=value"),
        ([""], "'': is not key=value"),
        (["+=3"], "+=3: is not key=value"),
        (["data.=3"], "data. is not a key"),
        (["data..shuffle=3"], "data..shuffle is not a key"),
        (["data.train_files=~/a.parquet"], "'data.train_files=\"~/a.parquet\"'"),
        (["strict=yes"], "-> strict=true"),
        (["data.train_batch_size=1e30"], "-> data.train_batch_size=64"),
        (
            ["trainer.seed=${nope}"],
            "trainer.seed=${nope}: Interpolation key 'nope' not found\n      -> write the whole path",
        ),
        (
            ["trainer.seed=${oc.env:NOT_THERE}"],
            "the environment has no variable NOT_THERE\n      -> export NOT_THERE=<value>, or ${oc.env:",
        ),
        (["trainer.seed=${trainer.seed}"], "refer to each other in a circle\n      -> trainer.seed=<value>"),
        (["trainer.seed=${oc.nope:3}"], "there is no resolver oc.nope\n      -> ${oc.env:NAME}"),
        (["hydra.nope=3"], "hydra.nope: there is no such key or group to override\n      -> leave out"),
        (["trainer@mine=3"], "trainer@mine: there is no such key or group to override\n      -> leave out"),
        (["recipe@mine=none"], "recipe@mine: there is no such key or group to override\n      -> override "),
        (["--cfg", "jobb"], "--cfg jobb: must be job, hydra or all\n      -> --cfg job"),
        (
            ["--config-name", "pqo"],
            (
                "--config-name pqo: there is no such file; the folder has dpo, eval, generate, ppo, rm, sft"
                "\n      -> --config-name ppo"
            ),
        ),
        (["--config-dir", "missing"], "--config-dir missing: there is no such folder"),
        (["--cfg", "job", "-m"], "only one of these options"),
        (["--resolve", "trainer.seed=1"], "--resolve: goes with --cfg"),
    ],
)
def test_a_mistake_is_named_without_a_stack_trace(tmp_path, arguments, expected):
    result = here.call(tmp_path, "ppo", *arguments)
    assert (result.returncode, result.stdout) == (2, "")
    assert result.stderr.startswith("1 problem found")
    assert expected in result.stderr
    assert "Traceback" not in result.stderr


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (b"data:\n  train_files: [a\n", "is not YAML: expected ',' or ']'"),
        (b"data:\n  shuffle: true\n seed: 3\n", "(line 3)\n      -> write lines `key: value`"),
        (b"data:\n\tshuffle: true\n", "(line 2)\n      -> indent with spaces, not tabs"),
        (
            b"trainer: {seed: 1}\ntrainer: {seed: 2}\n",
            "is not YAML: found duplicate key trainer (line 2)\n      -> leave out one of the two lines",
        ),
        (b"defaults: 3\n", "mine.yaml: defaults must be a list, not int\n      -> defaults: [_self_]"),
        (b"defaults: [3]\n", "must be text or a mapping, not int\n      -> write the name of a file"),
        (b"defaults: [mine]\n", "the defaults lists are circular\n      -> leave out one"),
        (b"\xff\xfe", "-> write it in UTF-8"),
        (b"trainer: {experiment_name: caf\xe9}\n", "mine.yaml: is not UTF-8: 'utf-8' codec can't decode"),
        (
            b"trainer: {experiment_name: 'a\x1bb'}\n",
            "mine.yaml: is not YAML: unacceptable character #x001b: special characters are not allowed\n"
            "      -> remove that character",
        ),
        (b"- a\n- b\n", "mine.yaml: holds a list where keys belong"),
        (
            b"defaults: [ppo, nowhere, _self_]\n",
            "its defaults list names 'nowhere', and there is no such file\n      -> ",
        ),
        (b"defaults: [mine2, _self_]\n", "-> leave out mine2, or --config-dir DIR"),
    ],
)
def test_a_file_that_cannot_be_read_is_named_without_a_stack_trace(tmp_path, content, expected):
    (tmp_path / "mine.yaml").write_bytes(content)
    result = here.call(tmp_path, "ppo", "--config-dir", ".", "--config-name", "mine")
    assert (result.returncode, result.stdout) == (2, "")
    assert expected in result.stderr and "Traceback" not in result.stderr


def test_a_mode_that_is_set_is_hydras(tmp_path):
    """A sweep without --multirun, of one run or of those that a file names."""
    one = here.call(tmp_path, "ppo", "hydra.mode=MULTIRUN")
    assert len(printed(one)) == 1 and "run 0 of the sweep" in one.stderr
    swept = "hydra: {mode: MULTIRUN, sweeper: {params: {trainer.seed: '1,2'}}}"
    (tmp_path / "mine.yaml").write_text(f"defaults: [ppo, _self_]\n{swept}\n")
    two = here.call(tmp_path, "ppo", "--config-dir", ".", "--config-name", "mine", "recipe=arithmetic")
    assert [seen["config"]["trainer"]["seed"] for seen in printed(two)] == [1, 2]


def test_where_nothing_sets_the_mode_hydra_composes_once(tmp_path, monkeypatch):
    composed = []
    whole = Hydra.compose_config
    monkeypatch.setattr(Hydra, "compose_config", lambda *a, **k: composed.append(1) or whole(*a, **k))
    printed(here.call(tmp_path, "ppo", "trainer.seed=3"))
    assert len(composed) == 1


def test_several_mistakes_are_reported_at_once(tmp_path):
    result = here.call(tmp_path, "ppo", "data.train_bach_size=4", "trainer.seed=abc", "recipe=x", "--lr=3")
    assert result.returncode == 2
    assert result.stderr.startswith("4 problems found")


def test_the_stack_trace_is_there_for_who_asks(tmp_path):
    result = call(tmp_path, "ppo", "trainer.seed=abc", HYDRAFLOW_FULL_ERROR="1")
    assert result.returncode == 2
    assert "Traceback" in result.stderr


@pytest.mark.parametrize(("error", "code"), [("7", 7), ("worker", 4), ("interrupt", 130), ("ours", 1)])
def test_exit_codes(tmp_path, error, code):
    result = call(tmp_path, "ppo", HYDRAFLOW_TEST_ERROR=error)
    assert result.returncode == code
    assert ("Traceback" in result.stderr) == (error == "ours")


def test_a_users_file_is_checked_whole(tmp_path):
    (tmp_path / "mine.yaml").write_text(
        "defaults: [ppo, _self_]\ndata: {train_bach_size: 3, shuffle: maybe}\nnew: 3\n"
    )
    result = here.call(tmp_path, "ppo", "--config-dir", ".", "--config-name", "mine")
    assert result.returncode == 2
    found = (
        "5 problems",
        "data.train_bach_size=3",
        "data.shuffle=maybe",
        "new=3",
        "model.path=null: must be",
        "train_files=null: must be",
    )
    assert all(key in result.stderr for key in found)


def test_a_users_files_are_used(tmp_path):
    (tmp_path / "mine.yaml").write_text(
        "defaults: [ppo, _self_]\nactor_rollout_ref: {model: {path: m}}\ndata: {train_files: t}\n"
    )
    (tmp_path / "experiment").mkdir()
    (tmp_path / "experiment" / "big.yaml").write_text("# @package _global_\ntrainer: {nnodes: 2}\n")
    [seen] = printed(
        here.call(tmp_path, "ppo", "--config-dir", ".", "--config-name", "mine", "+experiment=big")
    )
    assert (seen["config"]["trainer"]["nnodes"], seen["config"]["recipe"]["name"]) == (2, "none")
    assert "must be big" in here.call(tmp_path, "ppo", "--config-dir", ".", "+experiment=small").stderr


def test_a_sweep_runs_each_value(tmp_path):
    constant = ["algorithm.gamma=0.5", "trainer.val_before_train=false"]  # which Hydra writes as False
    done = here.call(tmp_path, "ppo", "--multirun", "trainer.seed=1,2", *constant)
    assert [one["config"]["trainer"]["seed"] for one in printed(done)] == [1, 2]
    assert "run 0 of the sweep: trainer.seed=1\n" in done.stderr
    assert here.call(tmp_path, "ppo", "-m", "trainer.seed=1,x").returncode == 2
    wrong = here.call(tmp_path, "ppo", "-m", "trainer.seed=1", "algorithm.gamma=0.5,7")
    assert wrong.returncode == 2 and "run 1 of the sweep: algorithm.gamma=7\n1 problem" in wrong.stderr
    old = ["-m", "critic.ppo_micro_batch_size=4,8", "trainer.n_gpus_per_node=2", "critic.enable=true"]
    seen = printed(here.call(tmp_path, "ppo", *old))
    assert [one["config"]["critic"]["ppo_micro_batch_size_per_gpu"] for one in seen] == [2, 4]


def test_hydra_does_not_log_the_settings_of_a_sweep(tmp_path, caplog):
    """They may hold secrets; the first run of a sweep sets up logging for the others."""
    caplog.set_level(logging.INFO)
    printed(here.call(tmp_path, "ppo", "--multirun", "trainer.seed=1,2", "trainer.experiment_name=S3CRET"))
    assert "S3CRET" not in caplog.text


def test_a_folder_that_is_gone(tmp_path):
    code = (
        "import os, sys; os.mkdir('x'); os.chdir('x'); os.rmdir('../x'); import runpy; sys.argv[1:] = ['ppo']"
    )
    result = python(
        "-c", f"{code}; runpy.run_path({str(ENTRY)!r}, run_name='__main__')", cwd=tmp_path, fresh=True
    )
    assert result.returncode == 2 and "this shell is in a folder that no longer exists" in result.stderr


@pytest.mark.parametrize(
    ("key", "options"),
    [("hydra.run.dir", []), ("hydra.sweep.dir", ["--multirun", "trainer.seed=1,2"])],
)
def test_a_folder_that_hydra_cannot_create(tmp_path, key, options):
    (tmp_path / "file").write_text("")
    result = here.call(tmp_path, "ppo", *options, f"{key}=file/folder")
    assert result.returncode == 2 and "Traceback" not in result.stderr
    assert f"{key}=file/folder: the folder cannot be created: Not a directory" in result.stderr


def test_an_interrupt_ends_the_sweep(tmp_path):
    result = call(tmp_path, "ppo", "-m", "trainer.seed=1,2", HYDRAFLOW_TEST_ERROR="interrupt")
    assert (result.returncode, result.stderr) == (130, "run 0 of the sweep: trainer.seed=1\ninterrupted\n")


def test_the_configuration_can_be_shown(tmp_path):
    shown = here.call(tmp_path, "ppo", "--cfg", "job", "data.train_batch_size=96").stdout
    assert "train_batch_size: 96" in shown
    assert "max_prompt_length: 16" in shown  # the recipe's
    assert "searchpath" in here.call(tmp_path, "ppo", "--info", "searchpath").stdout.lower().replace(" ", "")


def test_help_lists_groups_and_keys(tmp_path):
    text = here.call(tmp_path, "ppo", "--help").stdout
    assert "recipe=arithmetic|arithmetic_megatron|none" in text
    line = "data.train_batch_size=1024   (a whole number; at least 1)\n      Prompts per training step"
    assert line in text
    assert "Groups:" not in here.call(tmp_path, "sft", "--help").stdout


def test_help_on_a_key_or_a_section(tmp_path):
    [title, *lines] = here.call(tmp_path, "ppo", "--help", "data").stdout.splitlines()
    assert title.startswith("data: ") and len(lines) > 20
    assert {line.split(".")[0] for line in lines if "=" in line.split(" ")[2]} == {"  data"}
    one = here.call(tmp_path, "ppo", "--help", "data.train_batch_size=5").stdout
    assert one.splitlines()[0].strip() == "data.train_batch_size=1024   (a whole number; at least 1)"
    wrong = here.call(tmp_path, "ppo", "--help", "train_batch_size")
    assert (wrong.returncode, "-> --help data.train_batch_size\n" in wrong.stderr) == (2, True)


@pytest.mark.parametrize("width", [80, 100])
def test_help_is_as_wide_as_the_terminal(width, monkeypatch):
    monkeypatch.setenv("COLUMNS", str(width))
    option = CommandLineOption(
        "--svg", value="FILE", doc=f"Draws the step. {'And so on. ' * 9}\nExit codes: 0"
    )
    lines = help_text("ppo", PPOConfig, [option]).splitlines()
    assert max(map(len, lines)) <= width
    assert "          Exit codes: 0" in lines


@pytest.mark.parametrize("option", ["--hydra-help", "--version"])
def test_hydras_own_pages_need_no_configuration(tmp_path, option):
    with pytest.raises(SystemExit) as ended:  # Hydra's way after its pages
        here.call(tmp_path, "ppo", option)
    assert ended.value.code == 0


def test_what_is_shown_is_what_keys_came_to(tmp_path):
    shown = here.call(
        tmp_path, "ppo", "--cfg", "job", "--package", "ray_init", "ray_kwargs.ray_init.num_cpus=8"
    ).stdout
    assert (
        shown
        == "# @package ray_init\naddress: local\nnum_cpus: 8\nruntime_env:\n  env_vars: {}\ntimeline_file:"
        " null\n"
    )
    words = [
        "trainer.seed=${data.train_batch_size}",
        "data.train_batch_size=96",
        "--cfg=job",
        "-p",
        "trainer",
    ]
    assert "seed: ${data.train_batch_size}\n" in here.call(tmp_path, "ppo", *words).stdout
    assert "seed: 96\n" in here.call(tmp_path, "ppo", *words, "--resolve").stdout
    assert (
        "there is no such section"
        in here.call(tmp_path, "ppo", "--cfg", "job", "--package", "nothing").stderr
    )
    wrong = here.call(tmp_path, "ppo", "--cfg", "hydra", "--package", "nothing")
    assert (wrong.returncode, wrong.stderr) == (2, "package 'nothing' not found in config\n")
    wrong = here.call(tmp_path, "ppo", "--cfg", "job", "data.train_bach_size=96", "trainer.nnodes=0")
    # Keys are judged, values are shown as they are.
    assert (wrong.returncode, "1 problem" in wrong.stderr) == (2, True)


def test_a_reader_may_stop_early(tmp_path):
    command = f"{sys.executable} {ENTRY} ppo --help | head -1"
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    result = subprocess.run(
        ["bash", "-c", command], cwd=tmp_path, env=env, capture_output=True, text=True, timeout=120
    )
    assert (result.stdout.count("\n"), result.stderr) == (1, "")


@pytest.mark.slow(short=True)
@pytest.mark.parametrize(
    "words",
    ["plan", "plan --help", "plan --cfg job", "plan --json data.train_batch_size=0", "doctor"],
)
def test_output_that_cannot_be_written_is_said_in_a_sentence(tmp_path, words):
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    for stream, expected in (
        (">/dev/full", (3, "standard output cannot be written: No space left on device\n")),
        (">&-", (2 if "=0" in words else 0, "")),
    ):
        command = f"{sys.executable} -m hydraflow.{words} {stream}"
        result = subprocess.run(
            ["bash", "-c", command], cwd=tmp_path, env=env, capture_output=True, text=True, timeout=120
        )
        assert (result.returncode, result.stderr) == expected


def test_verls_files_and_names_are_taken_from_the_command_line(tmp_path):
    own = ["actor_rollout_ref.model.path=m", "data.train_files=t", "actor_rollout_ref.actor.grad_clip=0.5"]
    result = here.call(
        tmp_path, "ppo", "--config-path=config", "--config-name=ppo_megatron_trainer.yaml", *own
    )
    [seen] = printed(result)
    assert (
        seen["config"]["critic"]["strategy"]
        == seen["config"]["actor_rollout_ref"]["actor"]["strategy"]
        == "megatron"
    )
    assert "actor_rollout_ref.actor.optim.clip_grad" in seen["given"]
    assert (
        "note: actor_rollout_ref.actor.grad_clip: taken as actor_rollout_ref.actor.optim.clip_grad=0.5"
        in result.stderr
    )


def test_the_plans_rules_stand_in_the_same_report(tmp_path):
    wrong = [
        "trainer.sed=3",
        "data.shuffle=maybe",
        "--jsn",
        "algorithm.kl_penalty=k9",
        "data.train_batch_size=96",
        "actor_rollout_ref.actor.ppo_mini_batch_size=36",
        "algorithm.filter_groups.enable=true",
        "trainer.default_hdfs_dir=x",
    ]
    result = hydraflow("main_ppo", *wrong, cwd=tmp_path)
    assert result.returncode == 2
    assert result.stderr.startswith("7 problems found before anything was started:")
    assert (
        "actor_rollout_ref.actor.ppo_mini_batch_size=36: must divide data.train_batch_size=96"
        in result.stderr
    )
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("line", "answer"),
    [
        ("app data.train_b", ["data.train_batch_size="]),
        ("app recipe=", ["recipe=arithmetic", "recipe=arithmetic_megatron", "recipe=none"]),
        ("app trainer.nnodes=", ["trainer.nnodes=1"]),
        ("app trainer.seed=3 ray_i", ["ray_init."]),
    ],
)
def test_tab_completes(tmp_path, line, answer):
    assert call(tmp_path, "ppo", "-sc", "query=bash", COMP_LINE=line).stdout.split() == answer


def test_bash_completes_modules(tmp_path):
    script = call(tmp_path, "ppo", "-sc", "install=bash").stdout
    ask = (
        'COMP_LINE="python -m hydraflow.main_ppo data.train_b"; COMP_WORDS=($COMP_LINE); COMP_CWORD=3;'
        " _hydraflow_completion"
    )
    env = {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
    }
    result = subprocess.run(
        ["bash", "-c", f"{script}\n{ask}; echo ${{COMPREPLY[@]}}"],
        cwd=tmp_path,
        env=env,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert result.stdout == "data.train_batch_size=\n", result.stderr


def test_neither_torch_nor_ray_is_imported_and_it_is_quick(tmp_path):
    code = (
        "import sys\n"
        "from hydraflow import schema\n"
        "from hydraflow.batch_plan import resolve, sft\n"
        "from hydraflow.compose.loading import load\n"
        "config = load('ppo', schema.PPOConfig)\n"
        "resolve.resolve_plan(config, prompts=9000)\n"
        "print([name for name in ('torch', 'ray', 'transformers', 'numpy') if name in sys.modules])\n"
    )
    start = time.perf_counter()
    result = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=120
    )
    assert result.stdout == "[]\n", result.stderr
    assert time.perf_counter() - start < 10  # about 0.6 s on an idle core; the machine may be busy
