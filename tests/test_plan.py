"""python -m hydraflow.plan: numbers that a person can compute, all mistakes at once, and nothing heavy is
imported."""

from __future__ import annotations

import json
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pyarrow
import pyarrow.parquet
import pytest
from jobs.command import assert_refused, hydraflow

from hydraflow.batch_plan.resolve import resolve_plan
from hydraflow.compose.loading import load_command
from hydraflow.schema import PPOConfig

EXPERTS = "actor_rollout_ref.actor.megatron.expert_model_parallel_size"
GRPO_64_NODES = [
    "cluster=h100",
    "cluster.nodes=64",
    "algorithm.adv_estimator=grpo",
    "actor_rollout_ref.model.path=somewhere/a-moe",
    "data.train_files=/cluster/train.parquet",
    "actor_rollout_ref.actor.strategy=megatron",
    "actor_rollout_ref.actor.megatron.tensor_model_parallel_size=4",
    "actor_rollout_ref.actor.megatron.pipeline_model_parallel_size=2",
    f"{EXPERTS}=8",
    "actor_rollout_ref.rollout.name=vllm",
    "actor_rollout_ref.rollout.tensor_model_parallel_size=4",
    "data.train_batch_size=1024",
    "actor_rollout_ref.rollout.n=16",
    "actor_rollout_ref.actor.ppo_mini_batch_size=256",
    "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=2",
    "trainer.total_training_steps=100",
]
MOE = (
    "+actor_rollout_ref.model.override_config={model_type: qwen3_moe, hidden_size: 2048, num_hidden_layers:"
    " 48, num_attention_heads: 32, num_key_value_heads: 4, head_dim: 128, intermediate_size: 6144,"
    " moe_intermediate_size: 768, num_experts: 128, num_experts_per_tok: 8, vocab_size: 151936}"
)


def planned(*overrides: str, cwd: Path) -> dict[str, Any]:
    """The object that `--json` prints."""
    done = hydraflow("plan", *overrides, "--json", cwd=cwd)
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(done.stdout)
    assert isinstance(found, dict)
    return found


def quantities(report: dict[str, Any]) -> dict[str, Any]:
    return {quantity["name"]: quantity["value"] for quantity in report["plan"]["quantities"]}


def test_the_default_recipe(tmp_path: Path) -> None:
    done = hydraflow("plan", "trainer.device=cpu", cwd=tmp_path)
    assert done.returncode == 0 and not done.stderr, done.stderr
    for words in (
        "batch plan",
        "devices and roles: colocated",
        "64 prompts of at most 16 tokens are drawn",
        (
            "2 optimizer steps (2 mini-batches): each takes 32 prompts = 256 trajectories, on 2 data ranks of"
            " 128 rows"
        ),
        "400 training steps",
        "memory of one device",
        "1 key honoured",
    ):
        assert words in " ".join(done.stdout.split()), done.stdout
    assert not list(tmp_path.iterdir()), "a plan writes nothing"


def test_grpo_on_64_machines(tmp_path: Path) -> None:
    report = planned(*GRPO_64_NODES, MOE, cwd=tmp_path)
    plan = report["plan"]
    assert (plan["prompts_per_step"], plan["trajectories_per_step"]) == (1024, 16_384)
    actor = plan["actor"]
    assert actor["data_ranks"] == 512 // (4 * 2)  # experts never divide data ranks
    assert (actor["mini_batch_trajectories"], actor["rows_per_rank"], actor["accumulation_steps"]) == (
        4096,
        64,
        32,
    )
    assert (actor["optimizer_steps_per_step"], actor["total_optimizer_steps"]) == (4, 400)
    assert (plan["rollout"]["replicas"], plan["rollout"]["trajectories_per_engine"]) == (128, 128)
    assert report["placement"] == "colocated"
    assert any("shares with actor they take turns" in note for note in report["notes"])
    assert ["0-511", "0-63", "512", "■", "■"] in [line.split() for line in report["picture"]]
    assert any("/cluster/train.parquet is not on this machine" in note for note in report["notes"])
    lacks = [] if find_spec("vllm") else ["needs vLLM, which is not installed"]
    assert [found["rule"] for found in report["not_runnable_yet"]] == lacks
    assert report["memory"] is not None


def test_a_megatron_checkpoint_that_is_not_here_or_is_none(tmp_path: Path) -> None:
    path = "actor_rollout_ref.actor.megatron.dist_checkpointing_path"
    asked = [*GRPO_64_NODES, "actor_rollout_ref.actor.megatron.use_dist_checkpointing=true"]
    report = planned(*asked, f"{path}=/cluster/core", cwd=tmp_path)
    assert f"{path}: /cluster/core is not on this machine; a run would refuse to start" in report["notes"]
    done = hydraflow("plan", *asked, f"{path}={tmp_path}", cwd=tmp_path)
    assert_refused(done, f"{path}={tmp_path}: holds no checkpoint that Megatron-Core wrote")


def test_functions_of_ones_own_that_are_not_here_or_do_not_fit(tmp_path: Path) -> None:
    key = "actor_rollout_ref.actor.policy_loss.loss_mode"
    notes = planned(*GRPO_64_NODES, f"{key}=/cluster/mine.py:loss", cwd=tmp_path)["notes"]
    assert any(note.startswith(f"{key}: /cluster/mine.py is not on this machine, so") for note in notes)
    (tmp_path / "mine.py").write_text("def loss(tokens):\n    pass\n")
    assert planned(*GRPO_64_NODES, f"{key}=mine.py:loss", cwd=tmp_path)["notes"] == [
        note for note in notes if "mine.py" not in note
    ]
    done = hydraflow("plan", *GRPO_64_NODES, f"{key}=mine.py:los", cwd=tmp_path)
    assert_refused(done, f"{key}=mine.py:los: the file defines no such function; it has loss")


def test_paths_that_are_not_here_are_noted(tmp_path: Path) -> None:
    tokenizer, resume = "actor_rollout_ref.model.tokenizer_path", "trainer.resume_from_path"
    asked = [*GRPO_64_NODES, f"{tokenizer}=/cluster/words", "trainer.resume_mode=resume_path"]
    notes = planned(*asked, f"{resume}=/cluster/run/global_step_5", cwd=tmp_path)["notes"]
    assert f"{tokenizer}: /cluster/words is not on this machine; a run would refuse to start" in notes
    assert (
        f"{resume}: /cluster/run/global_step_5 is not on this machine; a run would refuse to start" in notes
    )
    notes = planned(*GRPO_64_NODES, f"{tokenizer}=Qwen/Qwen3-8B", f"{resume}=/cluster/run", cwd=tmp_path)[
        "notes"
    ]
    assert not any(
        key in note and "is not on this machine" in note for key in (tokenizer, resume) for note in notes
    )


def test_a_model_of_unknown_shape_leaves_memory_out_and_says_what_is_missing(tmp_path: Path) -> None:
    report = planned(*GRPO_64_NODES, cwd=tmp_path)
    assert report["memory"] is None
    assert any("override_config" in note and "hidden_size" in note for note in report["notes"])


def test_json_is_the_plans(tmp_path: Path) -> None:
    overrides = [
        "recipe=arithmetic",
        "trainer.device=cpu",
        "data.train_batch_size=96",
        "trainer.n_gpus_per_node=4",
    ]
    report = planned(*overrides, cwd=tmp_path)
    config, command = load_command("ppo", PPOConfig, overrides)
    plan = resolve_plan(config, prompts=9000, origins=command.origins)
    assert report["plan"] == json.loads(plan.to_json())
    assert quantities(report)["training prompts"] == 9000
    assert report["keys"] == {"honoured": 3, "without_effect": 0, "unsupported": 0}
    assert [phase["name"] for phase in report["step"]][:3] == ["prompts", "generate", "score"]


def test_prompts_are_counted_in_the_files(tmp_path: Path) -> None:
    pyarrow.parquet.write_table(pyarrow.table({"prompt": ["a"] * 1000}), tmp_path / "train.parquet")
    own = [
        "actor_rollout_ref.model.path=somewhere/else",
        f"data.train_files={tmp_path}/train.parquet",
        "algorithm.adv_estimator=grpo",
    ]
    sizes = ["data.train_batch_size=64", "data.train_max_samples=650", "data.filter_overlong_prompts=true"]
    report = planned(*own, *sizes, cwd=tmp_path)
    assert report["plan"]["steps_per_epoch"] == 10
    assert any("at most 650 prompts, an upper bound" in note for note in report["notes"])


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (  # verl's train / mini / micro, three rules at once
            [
                "data.train_batch_size=100",
                "actor_rollout_ref.actor.ppo_mini_batch_size=64",
                "trainer.n_gpus_per_node=7",
            ],
            ["data.train_batch_size=100", "7 data ranks"],
        ),
        (  # devices that do not add up, and a key that there is not
            [
                "actor_rollout_ref.rollout.device_mapping=0-15",
                "data.train_batch_sise=64",
                "trainer.n_gpus_per_node=8",
            ],
            ["device_mapping", "data.train_batch_size=64"],
        ),
        (  # parallel sizes beyond the machines
            [
                *GRPO_64_NODES,
                "actor_rollout_ref.actor.megatron.context_parallel_size=3",
                "data.max_response_length=100000",
            ],
            ["context 3", "100000", "ppo_max_token_len_per_gpu"],
        ),
        (  # a reward function that there is not, and experts that the recipe's model does not have
            [
                "trainer.device=cpu",
                "reward.functions=[{name: maths}]",
                "actor_rollout_ref.actor.router_replay.mode=R2",
            ],
            [
                "reward.functions[0].name=maths: must be data_source",
                "router_replay.mode=R2: the model has no experts that can be replayed",
                "-> actor_rollout_ref.actor.router_replay.mode=disabled",
            ],
        ),
        (  # layers of stages that do not add up, with a number that does
            [
                *GRPO_64_NODES,
                MOE,
                "+actor_rollout_ref.actor.megatron.override_transformer_config"
                ".num_layers_in_first_pipeline_stage=50",
                "actor_rollout_ref.actor.megatron.context_parallel_size=3",
            ],
            ["gives the 2 stages 50, -2 of the model's 48 layers", "in_first_pipeline_stage=47", "context 3"],
        ),
    ],
)
def test_all_mistakes_of_a_command_line_are_reported_together(
    overrides: list[str], words: list[str], tmp_path: Path
) -> None:
    done = hydraflow("plan", *overrides, cwd=tmp_path)
    assert_refused(done, *words)
    assert not done.stdout and "  2. " in done.stderr


def test_a_file_that_is_here_and_broken_is_reported_with_the_rest(tmp_path: Path) -> None:
    (tmp_path / "train.parquet").write_bytes(b"no")
    done = hydraflow(
        "plan",
        "actor_rollout_ref.model.path=somewhere/else",
        f"data.train_files={tmp_path}/train.parquet",
        "data.train_batch_size=100",
        "actor_rollout_ref.actor.ppo_mini_batch_size=64",
        cwd=tmp_path,
    )
    assert_refused(done, "not a readable Parquet file", "ppo_mini_batch_size=64")


def test_the_picture_of_a_step_is_a_file(tmp_path: Path) -> None:
    done = hydraflow("plan", "trainer.device=cpu", "--svg", "step.svg", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    words = [
        element.text
        for element in ElementTree.parse(tmp_path / "step.svg").iter()
        if element.tag.endswith("text")
    ]
    assert {"64 prompts", "512 trajectories", "256 trajectories per optimizer step"} <= set(words)
    assert_refused(hydraflow("plan", "--job", "generate", "--svg", "x.svg", cwd=tmp_path), "--svg")


@pytest.mark.parametrize("path", ["missing/step.svg", "."])
def test_a_picture_that_cannot_be_written_is_the_users_mistake(path: str, tmp_path: Path) -> None:
    assert_refused(
        hydraflow("plan", "--svg", path, cwd=tmp_path), f"--svg={path}: the picture cannot be written"
    )


def test_absurd_sizes_are_answered_at_once(tmp_path: Path) -> None:
    done = hydraflow("plan", "data.train_batch_size=99999999999999999999999", cwd=tmp_path, timeout=20)
    assert_refused(done, "99999999999999999999999")


def test_what_does_not_fit_is_said_with_what_to_change(tmp_path: Path) -> None:
    done = hydraflow("plan", "trainer.device=cpu", "cluster.host_memory_gib=0.5", cwd=tmp_path)
    assert done.returncode == 1 and "of 512 MiB: DOES NOT FIT" in done.stdout
    assert "of host memory is missing" in done.stdout and "larger devices are needed" in done.stdout
    as_json = hydraflow("plan", "trainer.device=cpu", "cluster.host_memory_gib=0.5", "--json", cwd=tmp_path)
    assert (as_json.returncode, json.loads(as_json.stdout)["memory"]["fits"]) == (1, False)


def test_the_rows_of_a_step_count_as_host_memory(tmp_path: Path) -> None:
    """64 * 10^8 rows of 16 prompt and 8 response tokens: 8·16 + (16 + 4·5)·8 = 416 bytes each."""
    given = ["trainer.device=cpu", "cluster.host_memory_gib=1024", "actor_rollout_ref.rollout.n=100000000"]
    done = hydraflow("plan", *given, "--json", cwd=tmp_path)
    assert (done.returncode, json.loads(done.stdout)["memory"]["host"]["rows"]) == (1, 64 * 10**8 * 416)
    done = hydraflow("plan", *given, cwd=tmp_path)
    assert done.returncode == 1 and "a step's trajectories take 2.42 TiB" in done.stdout


def test_problems_are_json_where_json_is_asked_for(tmp_path: Path) -> None:
    done = hydraflow("plan", "--json", "data.train_batch_size=63", "data.trian=3", cwd=tmp_path)
    assert (done.returncode, done.stderr) == (2, "")
    first, second = json.loads(done.stdout)["problems"]
    assert (first["field"], first["value"]) == ("data.trian", "3")
    assert (second["field"], second["rule"]) == (
        "actor_rollout_ref.actor.ppo_mini_batch_size",
        "must divide data.train_batch_size=63",
    )
    assert "data.train_batch_size=64" in second["remedy"]
    done = hydraflow("plan", "--json", "--job", "sift", cwd=tmp_path)
    assert done.returncode == 2 and "--job sift" in json.loads(done.stdout)["problems"][0]["field"]


@pytest.mark.parametrize("columns", [None, "80"])
def test_lines_fit_the_width_also_in_a_pipe(
    tmp_path: Path, columns: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("COLUMNS", raising=False)
    if columns:
        monkeypatch.setenv("COLUMNS", columns)
    brief, full = (
        hydraflow("plan", "trainer.device=cpu", *switch, cwd=tmp_path).stdout.splitlines()
        for switch in ([], ["--all"])
    )
    for lines in (brief, full):
        assert max(map(len, lines)) <= int(columns or 100)
        assert not [line for line in lines if line != line.rstrip()]
    assert len(brief) < 60 < len(full) and "--all" in brief[-1]
    text = " ".join(" ".join(full).split())
    for word in ("config/recipe/arithmetic.yaml", "log-probabilities", "activations", "validation responses"):
        assert word in text
    assert not {"validation responses", "activations"} & {line.strip()[:20].strip() for line in brief}


def test_the_other_commands(tmp_path: Path) -> None:
    (tmp_path / "talk.jsonl").write_text('{"prompt": "a", "response": "b"}\n' * 640)
    sft = planned(
        "--job",
        "sft",
        "data.train_files=talk.jsonl",
        "data.train_batch_size=64",
        "trainer.device=cpu",
        cwd=tmp_path,
    )
    assert (sft["job"], sft["plan"]["total_steps"], sft["plan"]["role"]["rows_per_rank"]) == ("sft", 10, 32)
    generate = planned(
        "--job=generate",
        "data.path=talk.jsonl",
        "rollout.n=4",
        "rollout.max_num_seqs=100",
        "trainer.device=cpu",
        cwd=tmp_path,
    )
    assert (generate["plan"]["prompts"], generate["plan"]["prompts_per_call"]) == (640, 200)
    assert_refused(hydraflow("plan", "--job", "sift", cwd=tmp_path), "--job")


def test_a_reader_may_stop_early(tmp_path: Path) -> None:
    command = f"{sys.executable} -m hydraflow.plan trainer.device=cpu --json | head -n 1"
    done = subprocess.run(["bash", "-c", command], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert (done.stdout, done.stderr) == ("{\n", "")


def test_verls_keys_are_counted_and_said(tmp_path: Path) -> None:
    keys = ["data.return_raw_chat=True", "trainer.v1.trainer_mode=separate_async", "data.train_batch_size=32"]
    report = planned("trainer.device=cpu", *keys, cwd=tmp_path)
    assert report["keys"] == {"honoured": 2, "without_effect": 1, "unsupported": 1}
    for key in ("data.return_raw_chat", "trainer.v1.trainer_mode"):
        assert any(note.startswith(key) for note in report["notes"]), report["notes"]


def test_placements_are_named_and_drawn(tmp_path: Path) -> None:
    policy = "actor_rollout_ref"
    own = [
        "cluster=h100",
        "cluster.nodes=2",
        "algorithm.adv_estimator=grpo",
        "data.train_batch_size=64",
        "recipe=none",
    ]
    mapped = [
        f"{policy}.actor.device_mapping=0-7",
        f"{policy}.rollout.device_mapping=8-15",
        f"{policy}.model.path=elsewhere",
    ]
    done = hydraflow("plan", *own, *mapped, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    rows = [line.split() for line in done.stdout.splitlines()]
    assert "devices and roles: disaggregated" in done.stdout
    assert ["device", *map(str, range(16))] in rows
    assert [row[1:17] for row in rows if row[:1] == ["rollout"] and len(row) == 17] == [
        ["·"] * 8 + [str(i) for i in range(8)]
    ]


def test_nothing_heavy_is_imported(tmp_path: Path) -> None:
    program = (
        "import runpy, sys\nsys.argv = ['plan', 'trainer.device=cpu', *sys.argv[1:]]\ntry:\n   "
        " runpy.run_module('hydraflow.plan', run_name='__main__')\nexcept SystemExit as end:\n    assert not"
        " end.code, end.code\nheavy = {'torch', 'ray', 'transformers', 'numpy', 'pyarrow', 'matplotlib',"
        " 'datasets', 'rich'} & set(sys.modules)\nassert not heavy, heavy\n"
    )
    for switches in ([], ["--json"]):
        done = subprocess.run(
            [sys.executable, "-c", program, *switches],
            cwd=tmp_path,
            capture_output=True,
            text=True,
            check=False,
        )
        assert (done.returncode, done.stderr) == (0, ""), done.stderr
