"""The batch sizes that a reinforcement-learning configuration requests, with their keys.

In: settings, layouts, how many prompts there are. Out: one `Request`, in which nulls that follow another key
are replaced. Only this file and `handles.py`, `roles.py`, `topology.py`, `sft.py` and `generate.py` read
batch-size keys; a test proves it. Left out on purpose: whether the numbers fit each other
(`batch_plan/rules.py`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from fractions import Fraction

from hydraflow.batch_plan.handles import KEYS, StepNumbers, settle
from hydraflow.batch_plan.layout import Layout
from hydraflow.batch_plan.parts import MicroRequest, RoleRequest
from hydraflow.batch_plan.plans import AsyncPlan, FilterPlan, ValidationPlan
from hydraflow.batch_plan.repair import Violation
from hydraflow.batch_plan.roles import fills_by_tokens, keeps_groups, needs_critic, needs_reference
from hydraflow.batch_plan.settings import Settings
from hydraflow.batch_plan.topology import ACTOR, REWARD, SECTIONS
from hydraflow.device import planned_type
from hydraflow.generation.config import RolloutConfig
from hydraflow.schema import PPOConfig

TRAIN_BATCH, SAMPLES = KEYS["Q"], KEYS["n"]
CRITIC_MINI = "critic.ppo_mini_batch_size"
ROUNDS, PER_ROUND = "async_training.trigger_parameter_sync_step", "async_training.require_batches"
GEN_BATCH = "data.gen_batch_size"


@dataclass(frozen=True)
class Request:
    """The input of the rules: numbers as configured, nulls replaced by the keys that they follow."""

    settings: Settings[PPOConfig]
    numbers: StepNumbers
    layouts: Mapping[str, Layout]
    """Layouts of the roles whose devices are valid."""
    prompts: int | None
    longest_prompt: int
    longest_response: int
    actor: RoleRequest
    critic: RoleRequest | None
    old_log_prob: MicroRequest
    ref: MicroRequest | None
    values: MicroRequest | None
    reward_model: MicroRequest | None
    rollout: RolloutConfig
    filter: FilterPlan | None
    """None: every sampled prompt is trained on."""
    call_key: str
    """The key that decides how many prompts are sampled at a time."""
    asynchronous: AsyncPlan | None
    """None: sampling and training take turns."""
    async_derived: str | None
    """The key of its number that was not given and follows from the step's mini-batches."""
    staleness: float
    workers: int
    """Agent workers."""
    validation: ValidationPlan

    @property
    def q(self) -> int:
        """Number of prompts per step."""
        return self.numbers.values["Q"]

    @property
    def n(self) -> int:
        """Number of trajectories per prompt."""
        return self.numbers.values["n"]

    @property
    def longest_row(self) -> int:
        """Tokens of the longest prompt with the longest response."""
        return self.longest_prompt + self.longest_response

    @property
    def device_type(self) -> str:
        """Type of the devices that are planned for."""
        config = self.settings.config
        return planned_type(config.trainer.device, config.cluster.device)

    @property
    def prompts_per_call(self) -> int:
        """Prompts that are sampled at a time."""
        return self.filter.prompts_per_call if self.filter else self.q

    @property
    def roles(self) -> list[RoleRequest]:
        """The trained roles: actor and, if there is one, critic."""
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
        config: PPOConfig = self.settings.config
        return config.trainer.total_training_steps or self.steps_per_epoch * config.trainer.total_epochs


def read(
    settings: Settings[PPOConfig], layouts: Mapping[str, Layout], prompts: int | None
) -> tuple[Request, list[Violation]]:
    """The requested sizes, and the violations found while reading them."""
    config: PPOConfig = settings.config
    rollout, groups = config.actor_rollout_ref.rollout, config.algorithm.filter_groups
    has_critic, mini = needs_critic(config), config.critic.ppo_mini_batch_size
    numbers, broken = settle(
        settings,
        ranks=layouts["actor"].data_ranks if "actor" in layouts else 1,
        group=_group(layouts.get("actor")),
        shares=_critic_shares(config, layouts) if has_critic and mini is None else [],
        whole=mini or 1 if has_critic else 1,
        keeps_groups=keeps_groups(config),
    )
    q, filtered, call_key = numbers.values["Q"], None, numbers.key("Q")
    if groups.enable:
        size = config.data.gen_batch_size or q
        filtered = FilterPlan(size, -(-q // size) * size, groups.max_num_gen_batches * size or None)
        call_key = call_key if config.data.gen_batch_size is None else GEN_BATCH
    actor = _read_actor(config, numbers, layouts)
    critic = _read_critic(config, actor, layouts) if has_critic else None
    asynchronous, derived = _read_async(settings, numbers, actor.mini)
    of_ref = layouts.get("ref", layouts.get("actor"))
    request = Request(
        settings=settings,
        numbers=numbers,
        layouts=layouts,
        prompts=prompts,
        longest_prompt=config.data.max_prompt_length,
        longest_response=config.data.max_response_length,
        actor=actor,
        critic=critic,
        old_log_prob=_read_log_prob(config, "rollout", actor.micro, layouts.get("actor")),
        ref=_read_log_prob(config, "ref", actor.micro, of_ref) if needs_reference(config) else None,
        values=_read_values(config, critic.micro) if critic else None,
        reward_model=_read_reward(config) if config.reward.reward_model.enable else None,
        rollout=rollout,
        filter=filtered,
        call_key=call_key,
        asynchronous=asynchronous,
        async_derived=derived,
        staleness=config.async_training.staleness_threshold,
        workers=rollout.agent.num_workers,
        validation=ValidationPlan(config.data.val_batch_size, rollout.val_kwargs.n),
    )
    return request, broken


def _read_async(
    settings: Settings[PPOConfig], numbers: StepNumbers, mini: int
) -> tuple[AsyncPlan | None, str | None]:
    """Asynchronous training, None if no key asks for it. If P or R is a default, it may follow from the
    other: also returns its key."""
    config: PPOConfig = settings.config
    training, q, n = config.async_training, numbers.values["Q"], numbers.values["n"]
    rounds, per_round = training.trigger_parameter_sync_step, training.require_batches
    staleness = training.staleness_threshold
    if staleness <= 0 and max(rounds, per_round) == 1 and not training.partial_rollout:
        return None, None
    staleness = staleness if math.isfinite(staleness) else 0.0  # another check refuses it
    updates, derived = q // mini, None
    if rounds * per_round * mini != q:
        if not settings.strength(PER_ROUND) and updates % rounds == 0:
            per_round, derived = updates // rounds, PER_ROUND
        elif not settings.strength(ROUNDS) and updates % per_round == 0:
            rounds, derived = updates // per_round, ROUNDS
    flying = math.floor(q * (1 + Fraction(str(staleness))))  # of the decimal as written
    plan = AsyncPlan(
        rounds_per_sync=rounds,
        mini_batches_per_round=per_round,
        prompts_per_round=per_round * mini,
        prompts_in_flight=flying,
        trajectories_in_flight=flying * n,
        stale_trajectories=(flying - q) * n,
    )
    return plan, derived


def _group(layout: Layout | None) -> int:
    """Micro-batches that an interleaved pipeline takes together."""
    return layout.pipeline if layout and layout.virtual_pipeline > 1 else 1


def _critic_shares(config: PPOConfig, layouts: Mapping[str, Layout]) -> list[int]:
    """Number of ranks into which a critic with the actor's mini-batches divides them."""
    critic, layout = config.critic, layouts.get("critic")
    if layout is None:
        return []
    by_tokens = fills_by_tokens(config, "critic")
    together = config.actor_rollout_ref.rollout.n if keeps_groups(config) else 1
    rows = together if by_tokens else (critic.ppo_micro_batch_size_per_gpu or together) * _group(layout)
    return [layout.data_ranks * rows]


def _shared(micro: MicroRequest, layout: Layout | None) -> MicroRequest:
    """The request, completed with its role's layout: devices that share a row, groups of an interleaved
    pipeline."""
    return replace(micro, sharers=layout.context, group=_group(layout)) if layout else micro


def _read_update(config: PPOConfig, role: str, layout: Layout | None) -> MicroRequest:
    """The micro-batches of the actor's or the critic's update."""
    section = config.critic if role == "critic" else config.actor_rollout_ref.actor
    key = SECTIONS[role]
    micro = MicroRequest(
        purpose=f"the {role}'s update",
        rows=section.ppo_micro_batch_size_per_gpu,
        rows_key=f"{key}.ppo_micro_batch_size_per_gpu",
        dynamic=fills_by_tokens(config, role),
        max_tokens=section.ppo_max_token_len_per_gpu,
        tokens_key=f"{key}.ppo_max_token_len_per_gpu",
        group_key=f"{key}.megatron.virtual_pipeline_model_parallel_size",
    )
    return _shared(micro, layout)


def _read_actor(config: PPOConfig, numbers: StepNumbers, layouts: Mapping[str, Layout]) -> RoleRequest:
    actor, layout = config.actor_rollout_ref.actor, layouts.get("actor")
    micro = _read_update(config, "actor", layout)
    micro = replace(
        micro,
        rows=numbers.values.get("m", micro.rows),
        rows_key=numbers.key("m"),
        together=numbers.values["n"] if keeps_groups(config) else 1,
    )
    return RoleRequest(
        name="actor",
        mini=numbers.values["M"],
        mini_key=numbers.key("M"),
        ranks=layout.data_ranks if layout else None,
        epochs=actor.ppo_epochs,
        shuffle=actor.shuffle,
        micro=micro,
        optim=actor.optim,
        optim_key=f"{ACTOR}.optim",
        first_step=max(1, config.trainer.critic_warmup),
    )


def _read_critic(config: PPOConfig, actor: RoleRequest, layouts: Mapping[str, Layout]) -> RoleRequest:
    """Nulls follow the actor; the key reported for such a number is the actor's."""
    critic, layout = config.critic, layouts.get("critic")
    return RoleRequest(
        name="critic",
        mini=critic.ppo_mini_batch_size or actor.mini,
        mini_key=actor.mini_key if critic.ppo_mini_batch_size is None else CRITIC_MINI,
        ranks=layout.data_ranks if layout else None,
        epochs=critic.ppo_epochs or actor.epochs,
        shuffle=actor.shuffle if critic.shuffle is None else critic.shuffle,
        micro=replace(_read_update(config, "critic", layout), together=actor.micro.together),
        optim=critic.optim,
        optim_key="critic.optim",
    )


def _read_log_prob(config: PPOConfig, role: str, update: MicroRequest, layout: Layout | None) -> MicroRequest:
    """Log-probabilities of the actor (settings of the rollout) or the reference; nulls follow the actor's
    update."""
    policy, key = config.actor_rollout_ref, SECTIONS[role]
    section = policy.rollout if role == "rollout" else policy.ref
    tokens = section.log_prob_max_token_len_per_gpu
    micro = MicroRequest(
        purpose="the old log-probabilities" if role == "rollout" else "the reference's log-probabilities",
        rows=section.log_prob_micro_batch_size_per_gpu,
        rows_key=f"{key}.log_prob_micro_batch_size_per_gpu",
        dynamic=fills_by_tokens(config, role),
        max_tokens=tokens or update.max_tokens,
        tokens_key=update.tokens_key if tokens is None else f"{key}.log_prob_max_token_len_per_gpu",
        together=update.together,
    )
    return _shared(micro, layout)


def _read_values(config: PPOConfig, update: MicroRequest) -> MicroRequest:
    """Values without an update; nulls follow the critic's update."""
    critic = config.critic
    rows, tokens = critic.forward_micro_batch_size_per_gpu, critic.forward_max_token_len_per_gpu
    return replace(
        update,
        purpose="the values",
        rows=rows or update.rows,
        rows_key=update.rows_key if rows is None else "critic.forward_micro_batch_size_per_gpu",
        max_tokens=tokens or update.max_tokens,
        tokens_key=update.tokens_key if tokens is None else "critic.forward_max_token_len_per_gpu",
    )


def _read_reward(config: PPOConfig) -> MicroRequest:
    """The reward model's micro-batches: a number of rows where it is given, else the tokens that fit."""
    reward = config.reward.reward_model
    return MicroRequest(
        purpose="the reward model",
        rows=reward.micro_batch_size_per_gpu,
        rows_key=f"{REWARD}.micro_batch_size_per_gpu",
        dynamic=False,
        max_tokens=reward.max_token_len_per_gpu,
        tokens_key=f"{REWARD}.max_token_len_per_gpu",
    )
