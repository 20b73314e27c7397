"""Every command of README.md and docs/tools.md does what the page says: here, or in .ci/run. The table of
what works is the code's, and what the pages cite exists."""

from __future__ import annotations

import ast
import itertools
import json
import re
import shlex
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from jobs.command import LOCAL, SMALL_RECIPE, hydraflow, python, read_steps
from jobs.conftest import write_lines
from source_tree import FILES, imports, tree_of
from transformers import AutoModelForCausalLM

from hydraflow.algorithms.config import ESTIMATORS, POLICY_LOSSES, AlgorithmConfig, Estimator, Loss
from hydraflow.algorithms.trial import try_estimator, try_loss
from hydraflow.compose import runnable
from hydraflow.data.files import write_rows
from hydraflow.engine.config import TRAIN_ENGINES
from hydraflow.generation.config import GENERATION_ENGINES
from hydraflow.models.tiny import make_model
from hydraflow.options import Implementation, Leaf, walk
from hydraflow.schema import PPOConfig
from hydraflow.workers.config import ActorConfig

ROOT = Path(__file__).parent.parent
PAGE = (ROOT / "README.md").read_text() + (ROOT / "docs" / "tools.md").read_text()


def commands() -> list[list[str]]:
    """The words of every command in a bash block, without comments."""
    blocks = re.findall(r"```bash\n(.*?)```", PAGE, re.DOTALL)
    lines = [line for block in blocks for line in block.replace("\\\n", " ").splitlines()]
    return [words for line in lines if (words := shlex.split(line, comments=True))]


def of(module: str) -> list[list[str]]:
    """Arguments of each `python -m hydraflow.<module>` on the page."""
    return [words[3:] for words in commands() if words[:3] == ["python", "-m", f"hydraflow.{module}"]]


RUNS = ("main_ppo", "main_sft", "main_dpo", "main_rm", "main_generate", "main_eval")
KNOWN = {f"hydraflow.{name}" for name in (*RUNS, "plan", "doctor", "logs", "report", "slurm", "model_merger")}
SCRIPTS = {
    "scripts/quickstart.sh",
    "scripts/test.sh",
    "scripts/install_vllm_cpu.sh",
    "scripts/prepare_gsm8k.py",
    "scripts/bench/grpo_step.py",
    "scripts/bench/vs_trl.py",
    "scripts/bench/all.py",
    "scripts/bench/weight_sync.py",
    "scripts/bench/generation.py",
    "scripts/bench/head.py",
    "scripts/bench/update_profile.py",
    "scripts/bench/learn.py",
    "scripts/gpu_check.sh",
    "scripts/gpu_ranks.py",
}


def test_no_command_is_left_out_here() -> None:
    named = {words[2] if words[1] == "-m" else words[1] for words in commands()}
    assert named == KNOWN | SCRIPTS, "a new command on these pages needs a test in this file"
    for script in ("scripts/quickstart.sh", "scripts/test.sh", "scripts/install_vllm_cpu.sh"):
        assert f"bash {script}" in (ROOT / ".ci" / "run").read_text()


# --- what works and what does not yet ----------------------------------------------------------------------

CHOSEN_BY: dict[str, Mapping[str, Implementation]] = {
    "algorithm.adv_estimator": ESTIMATORS,
    "actor.policy_loss.loss_mode": POLICY_LOSSES,
    "actor.strategy": TRAIN_ENGINES,
    "critic.strategy": TRAIN_ENGINES,
    "rollout.name": GENERATION_ENGINES,
}
"""The key that chooses -> the table it chooses from."""
Row = tuple[str, set[str], set[str]]


def table_of_what_works(page: str = PAGE) -> list[Row]:
    """Each row: what it is about, the names that work, the names that can only be planned."""
    (section,) = re.findall(r"^## What works.*?\n(.*?)^## ", page, re.DOTALL | re.MULTILINE)
    rows = [line.strip("|").split(" | ") for line in section.splitlines() if line.startswith("| ")]
    assert all(len(row) == 3 for row in rows)
    return [(about, names_in(works), names_in(planned)) for about, works, planned in rows[1:]]


def names_in(cell: str) -> set[str]:
    return set(re.findall(r"`([^`]+)`", cell))


def named_and_not_named(rows: list[Row]) -> dict[str, tuple[set[str], set[str]]]:
    """For each choosing key of the table, the names that work and those that can only be planned."""
    return {key: (works, planned) for about, works, planned in rows for key in names_in(about)}


def facts_of_the_tables() -> dict[str, tuple[set[str], set[str]]]:
    return {
        key: (
            {name for name, named in table.items() if named.where},
            {name for name, named in table.items() if not named.where},
        )
        for key, table in CHOSEN_BY.items()
    }


def refused_keys() -> set[str]:
    """Keys of which some value can only be planned, except those that choose a name."""
    found = set()
    most = max(len(other_values(leaf)) for leaf in walk(PPOConfig()))
    for number, engine in itertools.product(range(most), TRAIN_ENGINES):
        config = PPOConfig()
        for leaf in walk(PPOConfig()):
            if number < len(values := other_values(leaf)):
                change(config, leaf.key, values[number])
        config.actor_rollout_ref.actor.strategy = config.critic.strategy = engine
        config.trainer.nnodes, config.trainer.n_gpus_per_node = 1, 4
        found |= {problem.field for problem in runnable.problems(config)}
    return {key for key in found if not key.endswith(tuple(CHOSEN_BY))}


def other_values(leaf: Leaf) -> Sequence[Any]:
    """Values of the key's kind that ask for more than its default does."""
    if isinstance(leaf.value, str):
        return leaf.option.rule.choices if leaf.option.rule is not None else ()
    if isinstance(leaf.value, bool):
        return (not leaf.value,)
    by_kind: dict[type, Sequence[Any]] = {int: (2,), float: (0.5,), type(None): ("0-3", 2)}
    return by_kind.get(type(leaf.value), ())


def change(config: PPOConfig, key: str, value: Any) -> None:
    section: Any = config
    *path, name = key.split(".")
    for part in path:
        section = getattr(section, part)
    setattr(section, name, value)


def misplaced(rows: list[Row]) -> dict[str, set[str]]:
    """By choosing key, names in the wrong column, unknown ones, and planned ones that are missing. The table
    may leave out names that work: `--help` lists all of them, and a new one needs no line on the page."""
    found, facts = named_and_not_named(rows), facts_of_the_tables()
    wrong = {}
    for key in found.keys() | facts.keys():
        works, planned = found.get(key, (set(), set()))
        real, real_planned = facts.get(key, (set(), set()))
        wrong[key] = (works - real) | (planned ^ real_planned) | (set() if works else {key})
    return {key: names for key, names in wrong.items() if names}


def test_the_table_names_choices_where_they_belong() -> None:
    assert misplaced(table_of_what_works()) == {}


def unlisted_and_idle(rows: list[Row]) -> tuple[set[str], set[str]]:
    """Keys that can only be planned and are not in the table; and the table's keys that are no such keys. The
    table may leave out the start of a key."""
    listed = {name for about, _, planned in rows if not names_in(about) for name in planned}
    refused = refused_keys()
    ends = {name: {key for key in refused if f".{key}".endswith(f".{name}")} for name in listed}
    return refused - set().union(*ends.values()), {name for name, keys in ends.items() if not keys}


def test_the_table_lists_every_key_that_can_only_be_planned() -> None:
    assert unlisted_and_idle(table_of_what_works()) == (set(), set())


@pytest.mark.parametrize(
    ("cell", "other"),
    [
        ("| `fsdp2`, `megatron` | |", "| `fsdp2` | `megatron` |"),
        ("`rloo`, ", "`rlooo`, "),
        ("`algorithm.filter_groups.enable`", ""),
        ("`algorithm.filter_groups.enable`", "`algorithm.filter_groups.enable`, `rollout.n`"),
    ],
)
def test_a_wrong_table_is_noticed(cell: str, other: str) -> None:
    assert PAGE.count(cell) == 1
    rows = table_of_what_works(PAGE.replace(cell, other))
    assert misplaced(rows) or unlisted_and_idle(rows) != (set(), set())


# --- what the pages cite -----------------------------------------------------------------------------------

PAGES = [
    *(ROOT / "README.md", ROOT / "CONTRIBUTING.md"),
    *sorted((ROOT / "docs").glob("*.md")),
    *sorted((ROOT / "examples").glob("*/README.md")),
]
FOLDERS = ("hydraflow", "tests", "scripts", "examples")


def anchors(page: Path) -> set[str]:
    """The anchors of a page's headings, as GitHub makes them."""
    text = re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL)
    headings = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\((?!https?:)([^)]*)\)", page.read_text()):
        path, _, anchor = target.partition("#")
        file = (page.parent / path).resolve() if path else page
        assert file.exists(), f"{page.name}: {target}"
        assert not anchor or anchor in anchors(file), f"{page.name}: {target}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_files_that_a_page_cites_exist(page: Path) -> None:
    """Paths from the root of the clone, from `hydraflow/` or from the page; or the bare name of a file."""
    names = {file.name for folder in FOLDERS for file in (ROOT / folder).rglob("*.*")}
    for name in re.findall(
        r"`([\w/]+\.(?:py|sh|sbatch)|(?:tests|scripts|examples)/[\w/]+)`", page.read_text()
    ):
        places = (ROOT, ROOT / "hydraflow", page.parent)
        assert name in names or any((place / name).exists() for place in places), f"{page.name}: {name}"


PRIVATE = re.compile(r"\b(torch|ray|transformers)\.(?:\w+\.)*_[a-z]\w*")


def test_private_names_of_libraries_are_listed() -> None:
    page = (ROOT / "docs" / "upgrading.md").read_text()
    users = {path.relative_to(ROOT / "hydraflow").as_posix() for path in FILES if uses_private_names(path)}
    assert len(users) > 5
    assert users <= names_in(page), "docs/upgrading.md lacks them"


def uses_private_names(path: Path) -> bool:
    """Imports such as `torch.nested._internal`, and attributes such as `torch._foreach_norm`."""
    if not re.search(r"\b(torch|ray|transformers)\b.*[. ]_[a-z]", path.read_text()):
        return False
    nodes = [node for node in ast.walk(tree_of(path)) if isinstance(node, ast.Attribute)]
    return any(PRIVATE.match(name) for name in (*imports(path), *map(ast.unparse, nodes)))


# --- commands ----------------------------------------------------------------------------------------------


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
    """The commands of that section in their order, on runs of three steps: with Ray, then without."""
    small = [
        *SMALL_RECIPE,
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
        *LOCAL,
        f"recipe.cache_dir={recipe_cache}",
        "trainer.total_training_steps=1",
    ]
    done = hydraflow("main_ppo", *arguments, *small, cwd=tmp_path)
    assert done.returncode == 0, done.stderr[-3000:]


def code_with(text: str) -> str:
    """The Python block of the page that has this text."""
    [source] = [code for code in re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL) if text in code]
    return source


@pytest.mark.slow
def test_a_loss_and_an_estimator_of_ones_own(tmp_path: Path, recipe_cache: Path) -> None:
    (tmp_path / "my_code.py").write_text(code_with("def my_loss"))
    [arguments] = [words for words in of("main_ppo") if any("my_code.py" in word for word in words)]
    small = [*SMALL_RECIPE, *LOCAL, f"recipe.cache_dir={recipe_cache}"]
    small += ["trainer.total_training_steps=1", "trainer.default_local_dir=OWN"]
    done = hydraflow("main_ppo", *arguments, *small, cwd=tmp_path)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "actor/ratio" in read_steps(tmp_path / "OWN")[-1]


def test_a_loss_and_an_estimator_added_to_the_tables(monkeypatch: pytest.MonkeyPatch) -> None:
    module = ModuleType("hydraflow.algorithms.mine")
    exec(code_with("def my_loss"), vars(module))
    monkeypatch.setitem(sys.modules, module.__name__, module)
    lines = code_with('"mine": Loss(').splitlines()
    loss, estimator = (eval(f"{{{line.partition('  #')[0]}}}")["mine"] for line in lines)
    assert isinstance(loss, Loss) and isinstance(estimator, Estimator)
    monkeypatch.setitem(ESTIMATORS, "mine", estimator)
    assert try_loss(loss.bound(ActorConfig()), ()) is None
    assert try_estimator(AlgorithmConfig(adv_estimator="mine")) is None


@pytest.mark.slow
def test_a_checkpoint_becomes_a_model(tmp_path: Path, recipe_cache: Path) -> None:
    small = [
        *SMALL_RECIPE,
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
def test_training_on_examples_then_answers_then_their_score(tmp_path: Path) -> None:
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
    pairs = [{"prompt": row["prompt"], "chosen": row["response"], "rejected": "000"} for row in rows[1:]]
    for name in ("pairs.jsonl", "held_out_pairs.jsonl"):
        write_lines(tmp_path / name, pairs)
    (tmp_path / "data" / "gsm8k").mkdir(parents=True)
    write_rows(tmp_path / "data" / "gsm8k" / "test.parquet", problems)
    short = {
        "main_sft": ["data.max_length=32", *LOCAL],
        "main_dpo": ["data.max_length=32", "data.train_batch_size=128", *LOCAL],
        "main_rm": ["data.max_length=32", "data.train_batch_size=128", *LOCAL],
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
    small = [*SMALL_RECIPE, *LOCAL, f"recipe.cache_dir={recipe_cache}"]
    done = python("scripts/bench/grpo_step.py", "--steps", "2", *small, cwd=ROOT)
    assert done.returncode == 0, done.stderr[-3000:]
    assert '"timing_s/step"' in done.stdout
    assert "TRL's GRPOTrainer" in python("scripts/bench/vs_trl.py", "--help", cwd=ROOT).stdout


def test_the_list_of_benches() -> None:
    done = subprocess.run(
        [sys.executable, "scripts/bench/all.py", "--list"], cwd=ROOT, capture_output=True, text=True
    )
    assert {"step", "head", "weights", "generation"} <= set(done.stdout.split())


@pytest.mark.slow
def test_the_bench_of_learning(recipe_cache: Path) -> None:
    """A line for each value; so short a run need not have learned anything."""
    small = [*SMALL_RECIPE, f"recipe.cache_dir={recipe_cache}"]
    run = ["scripts/bench/learn.py", "--steps", "1", "algorithm.adv_estimator=opo,nonsense"]
    done = python(*run, *small, cwd=ROOT)
    assert done.returncode == 1, done.stderr[-3000:]
    header, learned, failed = done.stdout.splitlines()[:3]
    assert header.split() == ["before", "after", "seconds", "choice"]
    assert learned.count("%") == 2 and learned.endswith("algorithm.adv_estimator=opo")
    assert "algorithm.adv_estimator=nonsense: exit code 2" in failed


@pytest.mark.slow
def test_the_bench_of_weights() -> None:
    case = ["--models", "small", "--publishes", "1", "--bucket-megabytes", "4"]
    done = python("scripts/bench/weight_sync.py", *case, cwd=ROOT)
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout)
    two_buckets = 2 * 4 * 2**20
    assert found["bytes"] > 8 * two_buckets
    assert 0.9 * two_buckets < found["shared_memory"]["slots"] < 1.1 * two_buckets
    grown = [most for link in ("shared_memory", "broadcast") for most in found[link]["grew"].values()]
    assert len(grown) == 4 and max(grown) < 2.5 * two_buckets
    links = ("same_process", "shared_memory", "broadcast")
    assert all(found[link]["median_share"] > 0 for link in links)


@pytest.mark.slow
def test_the_bench_of_rollout_engines() -> None:
    case = ["--models", "1M", "--lengths", "ragged", "--sequences", "8"]
    done = python("scripts/bench/generation.py", *case, "--engines", "native,transformers", cwd=ROOT)
    assert done.returncode == 0, done.stderr[-3000:]
    found = [json.loads(line) for line in done.stdout.splitlines()]
    assert [one["engine"] for one in found] == ["native", "transformers"]
    assert all(8 * 10 < one["tokens"] < 8 * 256 and one["tokens_per_second"] > 0 for one in found)


@pytest.mark.slow
def test_the_profile_of_an_update() -> None:
    case = ["--model", "0.85M", "--rows", "8", "--operators", "200"]
    done = python("scripts/bench/update_profile.py", *case, cwd=ROOT)
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout)
    assert found["cpu_s"] > 0 and found["shares"]["products"] > 0.1
    kinds = {name.rpartition("::")[2]: kind for name, (kind, _) in found["operators"].items()}
    assert kinds["_fused_adamw_"] == "optimizer" and kinds["copy_"] == "copies" and kinds["mul"] == "other"
    assert kinds["_log_softmax"] == "softmax of the head"
    assert {kind for name, kind in kinds.items() if "scaled_dot" in name or name == "bmm"} == {"attention"}
    assert {name for name, kind in kinds.items() if kind == "products"} & {"mm", "_linear_pointwise"}


@pytest.mark.slow
def test_the_bench_of_heads() -> None:
    size = ["--tokens", "256", "--vocabulary", "65536", "--hidden", "8", "--chunk", "64", "--repeats", "2"]
    done = python("scripts/bench/head.py", *size, "--entropy", cwd=ROOT)
    assert done.returncode == 0, done.stderr[-3000:]
    found = {one["way"]: one for one in map(json.loads, done.stdout.splitlines())}
    assert set(found) == {"fused", "module"} and all(one["cpu_s"] > 0 for one in found.values())
    chunk_mib = 64 * 65536 * 4 / 2**20
    assert found["fused"]["gradients_mib"] == (65536 + 256) * 8 * 4 / 2**20
    assert 2 * chunk_mib < found["fused"]["peak_mib"] < 4 * chunk_mib < found["module"]["peak_mib"]
