"""Runs of a mixture of experts with routing replay."""

from __future__ import annotations

from pathlib import Path

import pytest
from jobs.command import LOCAL, STEPS_ALONE, assert_refused, completed, hydraflow, read_steps, write_sums

from hydraflow.models.tiny import make_model, make_tokenizer

pytestmark = pytest.mark.slow

ACTOR = "actor_rollout_ref.actor"
MODE = f"{ACTOR}.router_replay.mode"
STEPS = [
    "data.train_batch_size=4",
    "data.max_response_length=8",
    f"{ACTOR}.ppo_mini_batch_size=2",
    f"{ACTOR}.ppo_micro_batch_size_per_gpu=2",
    f"{ACTOR}.optim.lr=0.05",
    f"{ACTOR}.fsdp_config.dtype=fp32",
    f"{ACTOR}.megatron.dtype=fp32",
    "actor_rollout_ref.rollout.n=4",
    "algorithm.adv_estimator=grpo",
    "trainer.total_training_steps=3",
    "trainer.save_freq=1",
    "trainer.test_freq=-1",
    *STEPS_ALONE,
    "reward.custom_reward_function.path=reward.py",
]
"""Two optimizer steps in each step."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With a mixture of experts, a dense model, prompts and a reward function."""
    import torch
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    made, tokenizer = tmp_path_factory.mktemp("replay"), make_tokenizer()
    sizes = dict(hidden_size=32, intermediate_size=48, num_attention_heads=4, num_key_value_heads=2)
    sizes |= dict(moe_intermediate_size=16, num_experts=6, num_experts_per_tok=2, num_hidden_layers=2)
    end, pad = tokenizer.eos_token_id, tokenizer.pad_token_id
    tokens = dict(vocab_size=len(tokenizer), bos_token_id=None, eos_token_id=end, pad_token_id=pad)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = Qwen3MoeForCausalLM(Qwen3MoeConfig(**sizes, **tokens, head_dim=8, norm_topk_prob=True))
        for parameter in model.parameters():
            parameter.data += 0.2 * torch.randn_like(parameter)
    model.save_pretrained(made / "experts")
    tokenizer.save_pretrained(made / "experts")
    make_model(made / "dense", hidden=32, layers=1, heads=2, kv_heads=1)
    write_sums(made, 12)
    return made


def train(folder: Path, run: str, *overrides: str, model: str = "experts") -> dict[int, dict[str, float]]:
    """The metrics of a run, by step."""
    completed("main_ppo", *given(folder, run, model), *overrides, cwd=folder)
    return {line["step"]: line for line in read_steps(folder / run)}


def given(folder: Path, run: str, model: str) -> list[str]:
    files = [f"actor_rollout_ref.model.path={folder / model}", f"data.train_files={folder / 'data.parquet'}"]
    return [*files, f"trainer.default_local_dir={folder / run}", *STEPS, *LOCAL]


def learned(line: dict[str, float]) -> dict[str, float]:
    """What a step computes."""
    return {
        name: value
        for name, value in line.items()
        if name.startswith(("actor/", "critic/", "response_length/"))
    }


def test_a_run_that_records_and_replays(folder: Path) -> None:
    """On Megatron-Core; resumed, it goes on as it would have."""
    chosen = [f"{ACTOR}.strategy=megatron", f"{MODE}=R2"]
    whole = train(folder, "R2", *chosen)
    assert all(0 < share < 0.5 for share in changed(whole))  # the second update of a step has other weights
    checkpoint = f"trainer.resume_from_path={folder / 'R2' / 'global_step_1'}"
    again = train(folder, "R2", *chosen, "trainer.resume_mode=resume_path", checkpoint)
    assert [learned(again[step]) for step in (2, 3)] == [learned(whole[step]) for step in (2, 3)]


def test_a_run_that_replays_what_the_generation_engine_tells(folder: Path) -> None:
    """On FSDP2 and Megatron-Core alike; files of trajectories hold the experts, too."""
    dump, short = folder / "dump", "trainer.total_training_steps=2"
    whole = train(folder, "R3", f"{MODE}=R3", short, f"trainer.debug.save_rollouts={dump}")
    assert all(0 < share < 0.5 for share in changed(whole))
    loaded = "trainer.total_training_steps=1", f"trainer.debug.load_rollouts={dump}"
    assert changed(train(folder, "read", f"{MODE}=R3", *loaded)) == changed(whole)[:1]
    assert len(changed(train(folder, "recorded again", f"{MODE}=R2", *loaded))) == 1
    core = [f"{ACTOR}.strategy=megatron", f"{MODE}=R3", "trainer.total_training_steps=1"]
    on_core = train(folder, "R3 core", *core)[1]
    for name in ("router_replay_changed", "grad_norm", "pg_loss", "entropy"):
        assert on_core[f"actor/{name}"] == pytest.approx(whole[1][f"actor/{name}"], rel=1e-4), name


def changed(lines: dict[int, dict[str, float]]) -> list[float]:
    return [line["actor/router_replay_changed"] for line in lines.values()]


@pytest.mark.parametrize("strategy", ["fsdp2", "megatron"])
def test_a_dense_model_has_nothing_to_replay(folder: Path, strategy: str) -> None:
    """Nothing starts: another mistake is reported with it."""
    wrong = [f"{ACTOR}.strategy={strategy}", f"{MODE}=R2", "reward.functions=[{name: maths}]"]
    done = hydraflow("main_ppo", *given(folder, "dense", "dense"), *wrong, cwd=folder)
    assert_refused(done, f"{MODE}=R2: the model has no experts that can be replayed", f"-> {MODE}=disabled")
    assert_refused(done, "reward.functions[0].name=maths")
