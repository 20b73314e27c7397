"""Every command of the README does what the page says: here, or in .ci/run."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from jobs.command import LOCAL, SMALL_RECIPE, SMALL_STEPS, hydraflow
from jobs.conftest import write_lines
from transformers import AutoModelForCausalLM

from hydraflow.data.files import write_rows
from hydraflow.models.tiny import make_model

ROOT = Path(__file__).parent.parent
PAGE = (ROOT / "README.md").read_text()


def commands() -> list[list[str]]:
    """The words of every command in a bash block, without comments."""
    blocks = re.findall(r"```bash\n(.*?)```", PAGE, re.DOTALL)
    lines = [line for block in blocks for line in block.replace("\\\n", " ").splitlines()]
    return [words for line in lines if (words := shlex.split(line, comments=True))]


def of(module: str) -> list[list[str]]:
    """Arguments of each `python -m hydraflow.<module>` on the page."""
    return [words[3:] for words in commands() if words[:3] == ["python", "-m", f"hydraflow.{module}"]]


RUNS = ("main_ppo", "main_sft", "main_generate", "main_eval")
KNOWN = {f"hydraflow.{name}" for name in (*RUNS, "plan", "doctor", "logs", "report", "slurm", "model_merger")}
SCRIPTS = {
    "scripts/quickstart.sh",
    "scripts/test.sh",
    "scripts/prepare_gsm8k.py",
    "scripts/bench/grpo_step.py",
    "scripts/bench/vs_trl.py",
}


def test_no_command_is_left_out_here() -> None:
    named = {words[2] if words[1] == "-m" else words[1] for words in commands()}
    assert named == KNOWN | SCRIPTS, "a new command in the README needs a test in this file"
    for script in ("scripts/quickstart.sh", "scripts/test.sh"):
        assert f"bash {script}" in (ROOT / ".ci" / "run").read_text()


@pytest.mark.parametrize("arguments", of("plan"), ids=" ".join)
def test_plan(arguments: list[str], tmp_path: Path) -> None:
    done = hydraflow("plan", *arguments, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "prompts per step Q" in done.stdout


def test_doctor(tmp_path: Path) -> None:
    (arguments,) = of("doctor")
    done = hydraflow("doctor", *arguments, cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_gsm8k_run_composes_and_can_be_planned(tmp_path: Path) -> None:
    (arguments,) = [words for words in of("main_ppo") if any("gsm8k" in word for word in words)]
    done = hydraflow(
        "plan", *arguments, "trainer.n_gpus_per_node=8", "cluster=h100", "cluster.nodes=1", cwd=tmp_path
    )
    assert done.returncode == 0, done.stderr
    assert "256·8" in done.stdout


def test_the_job_for_slurm_is_planned_and_printed(tmp_path: Path) -> None:
    (tmp_path / "data" / "gsm8k").mkdir(parents=True)
    write_rows(
        tmp_path / "data" / "gsm8k" / "train.parquet",
        [{"prompt": "1+1=", "reward_model": {"ground_truth": "2"}}],
    )
    (arguments,) = of("slurm")
    done = hydraflow("slurm", arguments[0], "--dry-run", *arguments[1:], cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "#SBATCH --nodes=4" in done.stdout and "data.train_batch_size=512" in done.stdout


@pytest.mark.slow
def test_seeing_what_happens(tmp_path: Path, recipe_cache: Path) -> None:
    """The commands of that section, in their order, on a run of three steps."""
    small = [
        *SMALL_RECIPE,
        *SMALL_STEPS,
        f"recipe.cache_dir={recipe_cache}",
        "trainer.total_training_steps=3",
    ]
    seen, local = [
        words
        for words in of("main_ppo")
        if any(word.startswith(("ray_init.", "trainer.debug.")) for word in words)
    ]
    for arguments, run in ((seen, "RUN"), (local, "LOCAL")):
        done = hydraflow("main_ppo", *arguments, *small, f"trainer.default_local_dir={run}", cwd=tmp_path)
        assert done.returncode == 0, done.stderr[-3000:]
    for command in ("logs", "report"):
        (arguments,) = of(command)
        done = hydraflow(command, *arguments, cwd=tmp_path)
        assert done.returncode == 0, done.stderr
    made = (
        "timeline.json",
        "RUN/profile/step_3",
        "RUN/logs/actor-1.log",
        "RUN/report.html",
        "LOCAL/summary.json",
    )
    assert [name for name in made if not (tmp_path / name).exists()] == []


@pytest.mark.slow
def test_a_reward_of_ones_own(tmp_path: Path, recipe_cache: Path) -> None:
    (source,) = [
        code for code in re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL) if "def compute_score" in code
    ]
    (tmp_path / "my_reward.py").write_text(source)
    (arguments,) = [
        words for words in of("main_ppo") if any("custom_reward_function" in word for word in words)
    ]
    small = [
        *SMALL_RECIPE,
        *SMALL_STEPS,
        *LOCAL,
        f"recipe.cache_dir={recipe_cache}",
        "trainer.total_training_steps=1",
    ]
    done = hydraflow("main_ppo", *arguments, *small, cwd=tmp_path)
    assert done.returncode == 0, done.stderr[-3000:]


@pytest.mark.slow
def test_a_checkpoint_becomes_a_model(tmp_path: Path, recipe_cache: Path) -> None:
    small = [
        *SMALL_RECIPE,
        *SMALL_STEPS,
        *LOCAL,
        f"recipe.cache_dir={recipe_cache}",
        "trainer.default_local_dir=RUN",
        "trainer.save_freq=1",
    ]
    run = hydraflow("main_ppo", *small, "trainer.total_training_steps=1", cwd=tmp_path)
    assert run.returncode == 0, run.stderr[-3000:]
    for arguments in of("model_merger"):
        done = hydraflow(
            "model_merger",
            *(word.replace("global_step_50", "global_step_1") for word in arguments),
            cwd=tmp_path,
        )
        assert done.returncode == 0, done.stderr[-3000:]
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "merged").num_parameters() > 0


@pytest.mark.slow
def test_supervised_training_then_answers_then_their_score(tmp_path: Path) -> None:
    """On a tiny model and rows of sums in the places of those that the page names."""
    tiny = str(make_model(tmp_path / "tiny", hidden=32, layers=2, heads=2, kv_heads=1))
    rows = [{"prompt": f"{a}+{b}=", "response": f"{a + b:03d}"} for a in range(16) for b in range(16)]
    problems = [
        {
            "prompt": row["prompt"],
            "data_source": "arithmetic",
            "reward_model": {"style": "rule", "ground_truth": row["response"]},
        }
        for row in rows[:8]
    ]
    for name in ("conversations.jsonl", "held_out.jsonl"):
        write_lines(tmp_path / name, rows)
    (tmp_path / "data" / "gsm8k").mkdir(parents=True)
    write_rows(tmp_path / "data" / "gsm8k" / "test.parquet", problems)
    short = {
        "main_sft": ["data.max_length=32", *LOCAL],
        "main_generate": ["data.max_prompt_length=16", "data.max_response_length=4", *LOCAL],
        "main_eval": [],
    }
    for command, more in short.items():
        (arguments,) = of(command)
        local = [re.sub(r"^model\.path=Qwen/.*", f"model.path={tiny}", word) for word in arguments]
        done = hydraflow(command, *local, *more, cwd=tmp_path)
        assert done.returncode == 0, done.stderr[-3000:]
    assert (tmp_path / "report.json").exists()


@pytest.mark.slow
def test_the_bench_of_a_step(recipe_cache: Path) -> None:
    small = [*SMALL_RECIPE, *SMALL_STEPS, *LOCAL, f"recipe.cache_dir={recipe_cache}"]
    run = [sys.executable, "scripts/bench/grpo_step.py", "--steps", "2", *small]
    done = subprocess.run(run, cwd=ROOT, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    assert '"timing_s/step"' in done.stdout
    help_of_the_other = subprocess.run(
        [sys.executable, "scripts/bench/vs_trl.py", "--help"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert "TRL's GRPOTrainer" in help_of_the_other.stdout
