"""What the configuration asks of the batches in reinforcement learning: the numbers, and the keys that they
stand under.

In: settings, layouts, how many prompts there are. Out: one `Request`, in which nulls that follow another key
are replaced. With `batch_plan/handles.py`, `batch_plan/topology.py` and `batch_plan/sft.py` the only reader
of batch-size keys; a test proves it. Left out on purpose: whether the numbers fit each other
(`batch_plan/rules.py`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

from hydraflow.batch_plan.handles import EPOCHS, KEYS, Numbers, settle
from hydraflow.batch_plan.layout import Layout
from hydraflow.batch_plan.parts import MicroRequest
from hydraflow.batch_plan.repair import Violation
from hydraflow.batch_plan.roles import needs_critic, needs_reference
from hydraflow.batch_plan.settings import Settings
from hydraflow.batch_plan.topology import ACTOR, REF, REWARD, ROLLOUT
from hydraflow.engine.config import OptimConfig
from hydraflow.schema import PPOConfig

TRAIN_BATCH, SAMPLES = KEYS["Q"], KEYS["n"]
CRITIC_MINI = "critic.ppo_mini_batch_size"


@dataclass(frozen=True)
class RoleRequest:
    """What the configuration says about a trained role, and under which keys."""

    name: str
    mini: int
    mini_key: str
    ranks: int | None
    """Data ranks; None: its devices do not add up."""
    epochs: int
    epochs_key: str
    shuffle: bool
    micro: MicroRequest
    optim: OptimConfig
    optim_key: str
    first_step: int = 1
    """The training step, counted from 1, from which on it learns."""


@dataclass(frozen=True)
class FilterRequest:
    """Dynamic sampling as asked for."""

    prompts_per_call: int
    call_key: str
    most_calls: int
    """0: no limit."""


@dataclass(frozen=True)
class AsyncRequest:
    """Sampling beside training as asked for."""

    staleness: float
    rounds: int
    batches: int
    partial: bool


@dataclass(frozen=True)
class RolloutRequest:
    """The generation engine as asked for."""

    engine: str
    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int | None
    chunked_prefill: bool


@dataclass(frozen=True)
class Request:
    """Everything that the rules judge: numbers as asked for, nulls that follow another key replaced."""

    settings: Settings[PPOConfig]
    numbers: Numbers
    layouts: Mapping[str, Layout]
    """Of the roles whose devices add up."""
    prompts: int | None
    longest_prompt: int
    longest_response: int
    actor: RoleRequest
    critic: RoleRequest | None
    old_log_prob: MicroRequest
    ref: MicroRequest | None
    values: MicroRequest | None
    reward_model: MicroRequest | None
    rollout: RolloutRequest
    filter: FilterRequest | None
    asynchronous: AsyncRequest | None
    workers: int
    """Agent workers."""
    val_prompts: int | None
    val_n: int
    epochs: int
    """Passes over the training prompts."""
    asked_steps: int | None

    @property
    def q(self) -> int:
        """Prompts per step."""
        return self.numbers.values["Q"]

    @property
    def n(self) -> int:
        """Trajectories per prompt."""
        return self.numbers.values["n"]

    @property
    def longest_row(self) -> int:
        """Tokens of the longest prompt with the longest response."""
        return self.longest_prompt + self.longest_response

    @property
    def prompts_per_call(self) -> int:
        """Prompts that are sampled at a time."""
        return self.filter.prompts_per_call if self.filter else self.q

    @property
    def roles(self) -> list[RoleRequest]:
        """The trained roles."""
        return [self.actor] + ([self.critic] if self.critic else [])

    @property
    def passes(self) -> list[MicroRequest]:
        """The micro-batches of every pass that this run makes."""
        forward = [self.old_log_prob, self.ref, self.values, self.reward_model]
        return [role.micro for role in self.roles] + [request for request in forward if request]

    @property
    def steps_per_epoch(self) -> int:
        """Whole batches in one pass over the prompts; 0: not known."""
        return (self.prompts or 0) // self.q

    @property
    def total_steps(self) -> int:
        """Training steps of the run; 0: not known."""
        return self.asked_steps or self.steps_per_epoch * self.epochs


def sizes(config: PPOConfig) -> list[tuple[str, int | None]]:
    """Every size that must count at least one, where it is given."""
    policy, critic, reward, batch = (
        config.actor_rollout_ref,
        config.critic,
        config.reward.reward_model,
        config.batch,
    )
    actor, rollout, ref, training = policy.actor, policy.rollout, policy.ref, config.async_training
    return [
        (TRAIN_BATCH, config.data.train_batch_size),
        ("data.gen_batch_size", config.data.gen_batch_size),
        ("data.val_batch_size", config.data.val_batch_size),
        ("data.max_prompt_length", config.data.max_prompt_length),
        ("data.max_response_length", config.data.max_response_length),
        (SAMPLES, rollout.n),
        (f"{ROLLOUT}.val_kwargs.n", rollout.val_kwargs.n),
        (f"{ROLLOUT}.log_prob_micro_batch_size_per_gpu", rollout.log_prob_micro_batch_size_per_gpu),
        (f"{ROLLOUT}.log_prob_max_token_len_per_gpu", rollout.log_prob_max_token_len_per_gpu),
        (f"{ROLLOUT}.max_num_seqs", rollout.max_num_seqs),
        (f"{ROLLOUT}.max_num_batched_tokens", rollout.max_num_batched_tokens),
        (f"{ROLLOUT}.max_model_len", rollout.max_model_len),
        (f"{ROLLOUT}.agent.num_workers", rollout.agent.num_workers),
        (f"{REF}.log_prob_micro_batch_size_per_gpu", ref.log_prob_micro_batch_size_per_gpu),
        (f"{REF}.log_prob_max_token_len_per_gpu", ref.log_prob_max_token_len_per_gpu),
        (KEYS["M"], actor.ppo_mini_batch_size),
        (KEYS["m"], actor.ppo_micro_batch_size_per_gpu),
        (f"{ACTOR}.ppo_max_token_len_per_gpu", actor.ppo_max_token_len_per_gpu),
        (EPOCHS, actor.ppo_epochs),
        (CRITIC_MINI, critic.ppo_mini_batch_size),
        ("critic.ppo_micro_batch_size_per_gpu", critic.ppo_micro_batch_size_per_gpu),
        ("critic.ppo_max_token_len_per_gpu", critic.ppo_max_token_len_per_gpu),
        ("critic.forward_micro_batch_size_per_gpu", critic.forward_micro_batch_size_per_gpu),
        ("critic.forward_max_token_len_per_gpu", critic.forward_max_token_len_per_gpu),
        ("critic.ppo_epochs", critic.ppo_epochs),
        (f"{REWARD}.micro_batch_size_per_gpu", reward.micro_batch_size_per_gpu),
        (f"{REWARD}.max_token_len_per_gpu", reward.max_token_len_per_gpu),
        (KEYS["P"], training.trigger_parameter_sync_step),
        (KEYS["R"], training.require_batches),
        ("batch.trajectories_per_step", batch.trajectories_per_step),
        ("batch.global_batch_trajectories", batch.global_batch_trajectories),
        ("batch.optimizer_steps_per_step", batch.optimizer_steps_per_step),
        ("batch.gradient_accumulation_steps", batch.gradient_accumulation_steps),
        ("trainer.total_epochs", config.trainer.total_epochs),
        ("trainer.total_training_steps", config.trainer.total_training_steps),
    ]


def read(
    settings: Settings[PPOConfig], layouts: Mapping[str, Layout], prompts: int | None
) -> tuple[Request, list[Violation]]:
    """What the configuration asks for, and the relations between its numbers that cannot hold."""
    config: PPOConfig = settings.config
    ranks, group = _ranks(layouts, "actor"), _group(layouts.get("actor"))
    numbers, broken = settle(
        settings, ranks=ranks, group=group, shares=_critic_shares(config, layouts), whole=_critic_mini(config)
    )
    rollout = config.actor_rollout_ref.rollout
    critic = needs_critic(config)
    request = Request(
        settings=settings,
        numbers=numbers,
        layouts=layouts,
        prompts=prompts,
        longest_prompt=config.data.max_prompt_length,
        longest_response=config.data.max_response_length,
        actor=_read_actor(config, numbers, layouts),
        critic=_read_critic(config, numbers, layouts) if critic else None,
        old_log_prob=_read_log_prob(config, numbers, layouts, ROLLOUT),
        ref=_read_log_prob(config, numbers, layouts, REF) if needs_reference(config) else None,
        values=_read_values(config, numbers, layouts) if critic else None,
        reward_model=_read_reward(config) if config.reward.reward_model.enable else None,
        rollout=RolloutRequest(
            engine=rollout.name,
            max_num_seqs=rollout.max_num_seqs,
            max_num_batched_tokens=rollout.max_num_batched_tokens,
            max_model_len=rollout.max_model_len,
            chunked_prefill=rollout.engine_kwargs.vllm.get("enable_chunked_prefill", True) is not False,
        ),
        filter=_read_filter(config, numbers),
        asynchronous=_read_async(config, numbers),
        workers=rollout.agent.num_workers,
        val_prompts=config.data.val_batch_size,
        val_n=rollout.val_kwargs.n,
        epochs=config.trainer.total_epochs,
        asked_steps=config.trainer.total_training_steps,
    )
    return request, broken


def _ranks(layouts: Mapping[str, Layout], role: str) -> int | None:
    return layouts[role].data_ranks if role in layouts else None


def _group(layout: Layout | None) -> int:
    """Micro-batches that an interleaved pipeline takes together."""
    return layout.pipeline if layout and layout.virtual_pipeline > 1 else 1


def _critic_mini(config: PPOConfig) -> int:
    """The critic's own mini-batch, of which a step holds whole ones; 1: it has none."""
    return (config.critic.ppo_mini_batch_size or 1) if needs_critic(config) else 1


def _critic_shares(config: PPOConfig, layouts: Mapping[str, Layout]) -> list[int]:
    """What a critic with the actor's mini-batches divides their trajectories into."""
    critic, layout = config.critic, layouts.get("critic")
    if not needs_critic(config) or critic.ppo_mini_batch_size is not None or layout is None:
        return []
    dynamic = (
        config.actor_rollout_ref.actor.use_dynamic_bsz
        if critic.use_dynamic_bsz is None
        else critic.use_dynamic_bsz
    )
    rows = 1 if dynamic else (critic.ppo_micro_batch_size_per_gpu or 1) * _group(layout)
    return [layout.data_ranks * rows]


def _shared(micro: MicroRequest, layouts: Mapping[str, Layout], role: str) -> MicroRequest:
    """With what the role's layout says: devices that share a row, and the groups of an interleaved
    pipeline."""
    layout = layouts.get(role)
    if layout is None:
        return micro
    return replace(micro, sharers=layout.context, group=_group(layout))


def _read_actor(config: PPOConfig, numbers: Numbers, layouts: Mapping[str, Layout]) -> RoleRequest:
    actor = config.actor_rollout_ref.actor
    micro = MicroRequest(
        purpose="the actor's update",
        rows=numbers.values.get("m", actor.ppo_micro_batch_size_per_gpu),
        rows_key=numbers.key("m"),
        dynamic=actor.use_dynamic_bsz,
        max_tokens=actor.ppo_max_token_len_per_gpu,
        tokens_key=f"{ACTOR}.ppo_max_token_len_per_gpu",
        switch_key=f"{ACTOR}.use_dynamic_bsz",
        group_key=f"{ACTOR}.megatron.virtual_pipeline_model_parallel_size",
    )
    return RoleRequest(
        name="actor",
        mini=numbers.values["M"],
        mini_key=numbers.key("M"),
        ranks=_ranks(layouts, "actor"),
        epochs=actor.ppo_epochs,
        epochs_key=EPOCHS,
        shuffle=actor.shuffle,
        micro=_shared(micro, layouts, "actor"),
        optim=actor.optim,
        optim_key=f"{ACTOR}.optim",
        first_step=max(1, config.trainer.critic_warmup),
    )


def _read_critic(config: PPOConfig, numbers: Numbers, layouts: Mapping[str, Layout]) -> RoleRequest:
    """Nulls follow the actor; a key that does so is named as the actor's."""
    critic, actor = config.critic, _read_actor(config, numbers, layouts)
    own_mini = critic.ppo_mini_batch_size is not None
    own_switch = critic.use_dynamic_bsz is not None
    own_epochs = critic.ppo_epochs is not None
    micro = MicroRequest(
        purpose="the critic's update",
        rows=critic.ppo_micro_batch_size_per_gpu,
        rows_key="critic.ppo_micro_batch_size_per_gpu",
        dynamic=bool(critic.use_dynamic_bsz) if own_switch else actor.micro.dynamic,
        max_tokens=critic.ppo_max_token_len_per_gpu,
        tokens_key="critic.ppo_max_token_len_per_gpu",
        switch_key="critic.use_dynamic_bsz" if own_switch else actor.micro.switch_key,
        group_key="critic.megatron.virtual_pipeline_model_parallel_size",
    )
    return RoleRequest(
        name="critic",
        mini=critic.ppo_mini_batch_size or actor.mini,
        mini_key=CRITIC_MINI if own_mini else actor.mini_key,
        ranks=_ranks(layouts, "critic"),
        epochs=critic.ppo_epochs or actor.epochs,
        epochs_key="critic.ppo_epochs" if own_epochs else actor.epochs_key,
        shuffle=actor.shuffle if critic.shuffle is None else critic.shuffle,
        micro=_shared(micro, layouts, "critic"),
        optim=critic.optim,
        optim_key="critic.optim",
    )


def _read_log_prob(
    config: PPOConfig, numbers: Numbers, layouts: Mapping[str, Layout], prefix: str
) -> MicroRequest:
    """Log-probabilities of the actor (`rollout.log_prob_*`) or of the reference (`ref.log_prob_*`); nulls
    follow the actor."""
    actor = _read_actor(config, numbers, layouts).micro
    section = config.actor_rollout_ref.rollout if prefix == ROLLOUT else config.actor_rollout_ref.ref
    own_switch, own_tokens = (
        section.log_prob_use_dynamic_bsz is not None,
        section.log_prob_max_token_len_per_gpu is not None,
    )
    micro = MicroRequest(
        purpose="the old log-probabilities" if prefix == ROLLOUT else "the reference's log-probabilities",
        rows=section.log_prob_micro_batch_size_per_gpu,
        rows_key=f"{prefix}.log_prob_micro_batch_size_per_gpu",
        dynamic=bool(section.log_prob_use_dynamic_bsz) if own_switch else actor.dynamic,
        max_tokens=section.log_prob_max_token_len_per_gpu or actor.max_tokens,
        tokens_key=f"{prefix}.log_prob_max_token_len_per_gpu" if own_tokens else actor.tokens_key,
        switch_key=f"{prefix}.log_prob_use_dynamic_bsz" if own_switch else actor.switch_key,
    )
    return _shared(micro, layouts, "ref" if prefix == REF and "ref" in layouts else "actor")


def _read_values(config: PPOConfig, numbers: Numbers, layouts: Mapping[str, Layout]) -> MicroRequest:
    """Values without an update; nulls follow the critic's update."""
    critic, update = config.critic, _read_critic(config, numbers, layouts).micro
    own_rows, own_tokens = (
        critic.forward_micro_batch_size_per_gpu is not None,
        critic.forward_max_token_len_per_gpu is not None,
    )
    return replace(
        update,
        purpose="the values",
        rows=critic.forward_micro_batch_size_per_gpu or update.rows,
        rows_key="critic.forward_micro_batch_size_per_gpu" if own_rows else update.rows_key,
        max_tokens=critic.forward_max_token_len_per_gpu or update.max_tokens,
        tokens_key="critic.forward_max_token_len_per_gpu" if own_tokens else update.tokens_key,
    )


def _read_reward(config: PPOConfig) -> MicroRequest:
    """The reward model fills its micro-batches by rows where their number is given, else by the tokens that
    fit."""
    reward = config.reward.reward_model
    return MicroRequest(
        purpose="the reward model",
        rows=reward.micro_batch_size_per_gpu,
        rows_key=f"{REWARD}.micro_batch_size_per_gpu",
        dynamic=False,
        max_tokens=reward.max_token_len_per_gpu,
        tokens_key=f"{REWARD}.max_token_len_per_gpu",
        switch_key="",
    )


def _read_filter(config: PPOConfig, numbers: Numbers) -> FilterRequest | None:
    groups, own = config.algorithm.filter_groups, config.data.gen_batch_size
    if not groups.enable:
        return None
    key = "data.gen_batch_size" if own is not None else numbers.key("Q")
    return FilterRequest(own or numbers.values["Q"], key, groups.max_num_gen_batches)


def _read_async(config: PPOConfig, numbers: Numbers) -> AsyncRequest | None:
    training = config.async_training
    if not numbers.asynchronous:
        return None
    staleness = (
        training.staleness_threshold if math.isfinite(training.staleness_threshold) else 0.0
    )  # checks.py says it
    return AsyncRequest(staleness, numbers.values["P"], numbers.values["R"], training.partial_rollout)
