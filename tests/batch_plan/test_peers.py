"""The batch plan against five other trainers: for their settings, their trajectories, optimizer steps and
accumulation.

Each case has the peer's keys, the numbers that its own formula gives (worked out in a comment), and the plan
of the same settings in our keys. `*_formula` is how the peer counts, `*_keys` is how its keys are written
here. W devices, dp data ranks.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
from batch_plan.overrides import plan_of

ACTOR, ROLLOUT = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"
Settings = dict[str, Any]


@dataclass(frozen=True)
class Numbers:
    """What every one of the systems comes down to."""

    trajectories: int
    """In one training step: one round of sampling."""
    optimizer_steps: int
    """In one training step."""
    accumulation: int | None
    """Forward passes per optimizer step and data rank; None: as many as the tokens ask for."""


def _megatron(theirs: Settings, **names: str) -> Settings:
    """Megatron's sizes under our keys; `names` maps our short name to theirs."""
    sizes = {ours: theirs.get(name, 1) for ours, name in names.items()}
    return {f"{ACTOR}.strategy": "megatron"} | {
        f"{ACTOR}.megatron.{ours}_parallel_size": size for ours, size in sizes.items()
    }


MEGATRON_NAMES = {
    "tensor_model": "tensor_model_parallel_size",
    "pipeline_model": "pipeline_model_parallel_size",
    "context": "context_parallel_size",
    "expert_model": "expert_model_parallel_size",
}


# --- verl: mini-batches in prompts, micro-batches per data rank ---------------------------------------------


def verl_formula(theirs: Settings) -> Numbers:
    """N = B·n; dp = W/sp, or W/(tp·pp·cp); per rank g = M·n/dp; g/micro forwards; B/M·epochs optimizer
    steps."""
    ranks = (
        theirs["W"]
        // theirs.get("sp", 1)
        // theirs.get("tp", 1)
        // theirs.get("pp", 1)
        // theirs.get("cp", 1)
    )
    per_rank = theirs["mini"] * theirs["n"] // ranks
    return Numbers(
        trajectories=theirs["B"] * theirs["n"],
        optimizer_steps=theirs["B"] // theirs["mini"] * theirs.get("epochs", 1),
        accumulation=per_rank // theirs["micro"] if theirs.get("micro") else None,
    )


def verl_keys(theirs: Settings) -> Settings:
    """The same keys: verl's names are ours."""
    short = {"tensor_model": "tp", "pipeline_model": "pp", "context": "cp", "expert_model": "ep"}
    engine = (
        _megatron(theirs, **short)
        if "tp" in theirs
        else {f"{ACTOR}.fsdp_config.ulysses_sequence_parallel_size": theirs.get("sp", 1)}
    )
    return engine | {
        "trainer.n_gpus_per_node": theirs["W"],
        "data.train_batch_size": theirs["B"],
        f"{ROLLOUT}.n": theirs["n"],
        f"{ACTOR}.ppo_mini_batch_size": theirs["mini"],
        f"{ACTOR}.ppo_micro_batch_size_per_gpu": theirs.get("micro"),
        f"{ACTOR}.use_dynamic_bsz": "micro" not in theirs,
        f"{ACTOR}.ppo_epochs": theirs.get("epochs", 1),
    }


VERL: list[tuple[Settings, Numbers]] = [
    # 1024·5 = 5120; 1024/256 = 4; dp 8, 256·5/8 = 160 rows a rank, 160/40 = 4
    (dict(W=8, B=1024, n=5, mini=256, micro=40), Numbers(5120, 4, 4)),
    # 512·4 = 2048; 512/128·2 = 8; dp = 16/2 = 8, 128·4/8 = 64, 64/8 = 8
    (dict(W=16, sp=2, B=512, n=4, mini=128, micro=8, epochs=2), Numbers(2048, 8, 8)),
    # 128·16 = 2048; 128/64 = 2; dp = 64/(4·2) = 8 (ep 8 is not divided out), 64·16/8 = 128, 128/2 = 64
    (dict(W=64, tp=4, pp=2, ep=8, B=128, n=16, mini=64, micro=2), Numbers(2048, 2, 64)),
    # by tokens: 32·8 = 256; 32/32 = 1
    (dict(W=4, B=32, n=8, mini=32), Numbers(256, 1, None)),
]


# --- ROLL: gradient accumulation is given, the mini-batch follows -------------------------------------------


def roll_formula(theirs: Settings) -> Numbers:
    """S = rollout_batch_size·n; S·ppo_epochs / (p·g·DP) optimizer steps; g micro-batches in each."""
    ranks = theirs["W"] // theirs.get("ulysses_size", 1)
    for name in ("tensor_model_parallel_size", "pipeline_model_parallel_size", "context_parallel_size"):
        ranks //= theirs.get(name, 1)
    rows = theirs["rollout_batch_size"] * theirs["num_return_sequences_in_group"]
    global_batch = theirs["per_device_train_batch_size"] * theirs["gradient_accumulation_steps"] * ranks
    return Numbers(
        rows, theirs.get("ppo_epochs", 1) * rows // global_batch, theirs["gradient_accumulation_steps"]
    )


def roll_keys(theirs: Settings) -> Settings:
    """p is our micro-batch; g goes in as it is, and the plan finds ppo_mini_batch_size = p·g·DP/n."""
    ulysses = {f"{ACTOR}.fsdp_config.ulysses_sequence_parallel_size": theirs.get("ulysses_size", 1)}
    return (_megatron(theirs, **MEGATRON_NAMES) if "tensor_model_parallel_size" in theirs else ulysses) | {
        "trainer.n_gpus_per_node": theirs["W"],
        "data.train_batch_size": theirs["rollout_batch_size"],
        f"{ROLLOUT}.n": theirs["num_return_sequences_in_group"],
        f"{ACTOR}.ppo_micro_batch_size_per_gpu": theirs["per_device_train_batch_size"],
        "batch.gradient_accumulation_steps": theirs["gradient_accumulation_steps"],
        f"{ACTOR}.ppo_epochs": theirs.get("ppo_epochs", 1),
    }


ROLL: list[tuple[Settings, Numbers]] = [
    # 64·8 = 512; DP = 16/2 = 8, 1·32·8 = 256 rows an optimizer step, 512/256 = 2
    (
        dict(
            W=16,
            tensor_model_parallel_size=2,
            rollout_batch_size=64,
            num_return_sequences_in_group=8,
            per_device_train_batch_size=1,
            gradient_accumulation_steps=32,
        ),
        Numbers(512, 2, 32),
    ),
    # 32·8 = 256; DP = 8/2 = 4, 2·32·4 = 256, 256/256 = 1
    (
        dict(
            W=8,
            ulysses_size=2,
            rollout_batch_size=32,
            num_return_sequences_in_group=8,
            per_device_train_batch_size=2,
            gradient_accumulation_steps=32,
        ),
        Numbers(256, 1, 32),
    ),
    # 128·4 = 512; DP = 32/(4·2) = 4 (expert parallelism never enters), 4·16·4 = 256, 2·512/256 = 4
    (
        dict(
            W=32,
            tensor_model_parallel_size=4,
            pipeline_model_parallel_size=2,
            expert_model_parallel_size=4,
            rollout_batch_size=128,
            num_return_sequences_in_group=4,
            per_device_train_batch_size=4,
            gradient_accumulation_steps=16,
            ppo_epochs=2,
        ),
        Numbers(512, 4, 16),
    ),
]


# --- ChatLearn: everything in responses ---------------------------------------------------------------------


def chatlearn_formula(theirs: Settings) -> Numbers:
    """num_training_epoch·sample_per_episode/train_global_batch_size steps; global/(DP·micro)
    micro-batches."""
    ranks = theirs["num_gpu"] // theirs.get("ulysses_sequence_parallel_size", 1)
    for name in ("tensor_model_parallel_size", "pipeline_model_parallel_size", "context_parallel_size"):
        ranks //= theirs.get(name, 1)
    steps = (
        theirs.get("num_training_epoch", 1)
        * theirs["sample_per_episode"]
        // theirs["train_global_batch_size"]
    )
    micro = theirs["train_global_batch_size"] // (ranks * theirs["train_micro_batch_size"])
    return Numbers(theirs["sample_per_episode"], steps, micro)


def chatlearn_keys(theirs: Settings) -> Settings:
    """S and G go in as they are, and the plan finds train_batch_size = S/n and ppo_mini_batch_size = G/n."""
    sp = "ulysses_sequence_parallel_size"
    ulysses = {f"{ACTOR}.fsdp_config.{sp}": theirs.get(sp, 1)}
    return (_megatron(theirs, **MEGATRON_NAMES) if "tensor_model_parallel_size" in theirs else ulysses) | {
        "trainer.n_gpus_per_node": theirs["num_gpu"],
        f"{ROLLOUT}.n": theirs["num_inference_per_prompt"],
        "batch.trajectories_per_step": theirs["sample_per_episode"],
        "batch.global_batch_trajectories": theirs["train_global_batch_size"],
        f"{ACTOR}.ppo_micro_batch_size_per_gpu": theirs["train_micro_batch_size"],
        f"{ACTOR}.ppo_epochs": theirs.get("num_training_epoch", 1),
    }


CHATLEARN: list[tuple[Settings, Numbers]] = [
    # 512/512 = 1 step; 512/(8·8) = 8
    (
        dict(
            num_gpu=8,
            sample_per_episode=512,
            num_inference_per_prompt=32,
            train_global_batch_size=512,
            train_micro_batch_size=8,
        ),
        Numbers(512, 1, 8),
    ),
    # 2048/512 = 4 steps; DP = 16/2 = 8, 512/(8·4) = 16
    (
        dict(
            num_gpu=16,
            ulysses_sequence_parallel_size=2,
            sample_per_episode=2048,
            num_inference_per_prompt=32,
            train_global_batch_size=512,
            train_micro_batch_size=4,
        ),
        Numbers(2048, 4, 16),
    ),
    # 2·1024/256 = 8 steps; DP = 32/(4·1·2) = 4, 256/(4·2) = 32
    (
        dict(
            num_gpu=32,
            tensor_model_parallel_size=4,
            context_parallel_size=2,
            expert_model_parallel_size=8,
            sample_per_episode=1024,
            num_inference_per_prompt=16,
            train_global_batch_size=256,
            train_micro_batch_size=2,
            num_training_epoch=2,
        ),
        Numbers(1024, 8, 32),
    ),
]


# --- slime: prompts in, samples per optimizer step, or the number of optimizer steps ------------------------


def slime_formula(theirs: Settings) -> Numbers:
    """R·N = G·steps; dp = actor devices/(tp·pp·cp); G/(dp·micro) micro-batches when not dynamic."""
    rows = theirs["rollout_batch_size"] * theirs["n_samples_per_prompt"]
    steps = (
        theirs["num_steps_per_rollout"]
        if "num_steps_per_rollout" in theirs
        else rows // theirs["global_batch_size"]
    )
    ranks = theirs["actor_num_nodes"] * theirs["actor_num_gpus_per_node"]
    for name in ("tensor_model_parallel_size", "pipeline_model_parallel_size", "context_parallel_size"):
        ranks //= theirs.get(name, 1)
    micro = theirs.get("micro_batch_size", 1)
    return Numbers(
        rows, steps, None if theirs.get("use_dynamic_batch_size") else rows // steps // ranks // micro
    )


def slime_keys(theirs: Settings) -> Settings:
    """G, or the number of optimizer steps, goes in as it is; the budget counts tokens per device in both."""
    steps, batch, dynamic = (
        "num_steps_per_rollout",
        "global_batch_size",
        theirs.get("use_dynamic_batch_size", False),
    )
    handles = {
        "batch.optimizer_steps_per_step": theirs.get(steps),
        "batch.global_batch_trajectories": theirs.get(batch),
    }
    micro = (
        {f"{ACTOR}.ppo_max_token_len_per_gpu": theirs["max_tokens_per_gpu"]}
        if dynamic
        else {f"{ACTOR}.ppo_micro_batch_size_per_gpu": theirs.get("micro_batch_size", 1)}
    )
    return (
        _megatron(theirs, **MEGATRON_NAMES)
        | {key: value for key, value in handles.items() if value is not None}
        | micro
        | {
            "trainer.nnodes": theirs["actor_num_nodes"],
            "trainer.n_gpus_per_node": theirs["actor_num_gpus_per_node"],
            "data.train_batch_size": theirs["rollout_batch_size"],
            f"{ROLLOUT}.n": theirs["n_samples_per_prompt"],
            f"{ACTOR}.use_dynamic_bsz": dynamic,
        }
    )


SLIME: list[tuple[Settings, Numbers]] = [
    # its qwen3-4B script: 32·8 = 256 samples, 256/256 = 1; by tokens
    (
        dict(
            actor_num_nodes=1,
            actor_num_gpus_per_node=8,
            tensor_model_parallel_size=2,
            rollout_batch_size=32,
            n_samples_per_prompt=8,
            global_batch_size=256,
            use_dynamic_batch_size=True,
            max_tokens_per_gpu=9216,
        ),
        Numbers(256, 1, None),
    ),
    # 128·8 = 1024, 4 steps of 256; dp = 16/(2·2) = 4, 256/4 = 64 rows a rank, 64/4 = 16
    (
        dict(
            actor_num_nodes=2,
            actor_num_gpus_per_node=8,
            tensor_model_parallel_size=2,
            pipeline_model_parallel_size=2,
            rollout_batch_size=128,
            n_samples_per_prompt=8,
            num_steps_per_rollout=4,
            micro_batch_size=4,
        ),
        Numbers(1024, 4, 16),
    ),
    # 256·16 = 4096, 4096/1024 = 4; dp = 32/4 = 8, 1024/8 = 128 rows a rank, 128/1 = 128
    (
        dict(
            actor_num_nodes=4,
            actor_num_gpus_per_node=8,
            tensor_model_parallel_size=2,
            context_parallel_size=2,
            rollout_batch_size=256,
            n_samples_per_prompt=16,
            global_batch_size=1024,
        ),
        Numbers(4096, 4, 128),
    ),
]


# --- Trinity-RFT: experiences per optimizer step, tasks per explore step, explore steps per weight sync -----


def trinity_formula(theirs: Settings) -> Numbers:
    """Between two weight syncs: batch_size·sync_interval tasks, each repeat_times; train_batch_size
    experiences an update."""
    sampled = theirs["batch_size"] * theirs["repeat_times"]
    update = theirs.get("train_batch_size") or sampled
    rows = sampled * theirs.get("sync_interval", 1)
    ranks = theirs["trainer_gpus"] // theirs.get("ulysses_sequence_parallel_size", 1)
    micro = theirs.get("ppo_micro_batch_size_per_gpu")
    return Numbers(rows, rows // update, update // ranks // micro if micro else None)


def trinity_keys(theirs: Settings) -> Settings:
    """One of our steps is one weight sync: B·I prompts; the mini-batch is given in experiences."""
    sp, micro = "ulysses_sequence_parallel_size", theirs.get("ppo_micro_batch_size_per_gpu")
    sampled = theirs["batch_size"] * theirs["repeat_times"]
    return {
        "trainer.n_gpus_per_node": theirs["trainer_gpus"],
        "data.train_batch_size": theirs["batch_size"] * theirs.get("sync_interval", 1),
        f"{ROLLOUT}.n": theirs["repeat_times"],
        "batch.global_batch_trajectories": theirs.get("train_batch_size") or sampled,
        f"{ACTOR}.ppo_micro_batch_size_per_gpu": micro,
        f"{ACTOR}.use_dynamic_bsz": micro is None,
        f"{ACTOR}.fsdp_config.{sp}": theirs.get(sp, 1),
    }


TRINITY: list[tuple[Settings, Numbers]] = [
    # its gspo example: 96·8 = 768 experiences, all in one update; by tokens
    (dict(trainer_gpus=2, batch_size=96, repeat_times=8), Numbers(768, 1, None)),
    # its dapo example: 32·16 = 512 an update, 16 of them between two syncs = 8192; 512/8 = 64 a device, 64/8
    # = 8
    (
        dict(
            trainer_gpus=8, batch_size=32, repeat_times=16, sync_interval=16, ppo_micro_batch_size_per_gpu=8
        ),
        Numbers(8192, 16, 8),
    ),
    # its FAQ: 128 experiences on 4 data ranks are 32 each, 4 micro-batches of 8; 64·4 = 256 sampled, 2
    # updates
    (
        dict(
            trainer_gpus=4,
            batch_size=64,
            repeat_times=4,
            train_batch_size=128,
            ppo_micro_batch_size_per_gpu=8,
        ),
        Numbers(256, 2, 4),
    ),
    # DP = 8/2 = 4: 256/4 = 64, 64/16 = 4
    (
        dict(
            trainer_gpus=8,
            ulysses_sequence_parallel_size=2,
            batch_size=32,
            repeat_times=8,
            ppo_micro_batch_size_per_gpu=16,
        ),
        Numbers(256, 1, 4),
    ),
]


PEERS: dict[
    str, tuple[Callable[[Settings], Numbers], Callable[[Settings], Settings], list[tuple[Settings, Numbers]]]
] = {
    "verl": (verl_formula, verl_keys, VERL),
    "ROLL": (roll_formula, roll_keys, ROLL),
    "ChatLearn": (chatlearn_formula, chatlearn_keys, CHATLEARN),
    "slime": (slime_formula, slime_keys, SLIME),
    "Trinity-RFT": (trinity_formula, trinity_keys, TRINITY),
}


@pytest.mark.parametrize(
    ("peer", "theirs", "numbers"),
    [
        pytest.param(peer, theirs, numbers, id=f"{peer}-{k}")
        for peer, (_, _, cases) in PEERS.items()
        for k, (theirs, numbers) in enumerate(cases)
    ],
)
def test_a_peers_settings_give_the_peers_numbers(peer: str, theirs: Settings, numbers: Numbers) -> None:
    formula, keys, _ = PEERS[peer]
    assert formula(theirs) == numbers
    plan = plan_of({"algorithm.adv_estimator": "grpo"} | keys(theirs))
    accumulation = plan.actor.rows_per_rank // plan.actor.micro.rows if plan.actor.micro.rows else None
    assert Numbers(plan.trajectories_per_step, plan.actor.optimizer_steps_per_step, accumulation) == numbers
