"""What the configuration asks of the batches in reinforcement learning: the numbers, and the keys that they stand under.

In: the configuration, how many processes and prompts there are. Out: one `Request`, in which nulls that follow another key are
replaced. With `batch_plan_sft.py` the only reader of batch-size keys; a test proves it. Letters: see `batch_plan.py`.
Left out on purpose: whether the numbers fit each other (`batch_plan.py`).
"""

from __future__ import annotations

from dataclasses import dataclass

from hydraflow.batch_plan_parts import MicroRequest
from hydraflow.engine.config import OptimConfig
from hydraflow.schema import PPOConfig

TRAIN_BATCH = "data.train_batch_size"
ACTOR, REF, ROLLOUT = "actor_rollout_ref.actor", "actor_rollout_ref.ref", "actor_rollout_ref.rollout"


@dataclass(frozen=True)
class RoleRequest:
    """What the configuration says about a trained role, and under which keys."""

    name: str
    mini: int
    mini_key: str
    epochs: int
    shuffle: bool
    micro: MicroRequest
    optim: OptimConfig
    optim_key: str


@dataclass(frozen=True)
class Request:
    """Everything that the rules judge: numbers as asked for, nulls that follow another key replaced."""

    config: PPOConfig
    processes: int
    prompts: int | None
    q: int
    n: int
    longest_row: int
    actor: RoleRequest
    critic: RoleRequest | None
    old_log_prob: MicroRequest
    ref: MicroRequest | None
    values: MicroRequest | None
    val_prompts: int | None
    val_n: int

    @property
    def roles(self) -> list[RoleRequest]:
        """The trained roles."""
        return [self.actor] + ([self.critic] if self.critic else [])

    @property
    def passes(self) -> list[MicroRequest]:
        """The micro-batches of every pass that this run makes."""
        forward = [self.old_log_prob, self.ref, self.values]
        return [role.micro for role in self.roles] + [request for request in forward if request]

    @property
    def steps_per_epoch(self) -> int:
        """Whole batches in one pass over the prompts; 0: not known."""
        return (self.prompts or 0) // self.q

    @property
    def total_steps(self) -> int:
        """Training steps of the run; 0: not known."""
        trainer = self.config.trainer
        return trainer.total_training_steps or self.steps_per_epoch * trainer.total_epochs


def sizes(config: PPOConfig) -> list[tuple[str, int | None]]:
    """Every size that must count at least one, where it is given."""
    policy, critic = config.actor_rollout_ref, config.critic
    actor, rollout, ref = policy.actor, policy.rollout, policy.ref
    return [
        (TRAIN_BATCH, config.data.train_batch_size),
        ("data.val_batch_size", config.data.val_batch_size),
        ("data.max_prompt_length", config.data.max_prompt_length),
        ("data.max_response_length", config.data.max_response_length),
        (f"{ROLLOUT}.n", rollout.n),
        (f"{ROLLOUT}.val_kwargs.n", rollout.val_kwargs.n),
        (f"{ROLLOUT}.log_prob_micro_batch_size_per_gpu", rollout.log_prob_micro_batch_size_per_gpu),
        (f"{ROLLOUT}.log_prob_max_token_len_per_gpu", rollout.log_prob_max_token_len_per_gpu),
        (f"{REF}.log_prob_micro_batch_size_per_gpu", ref.log_prob_micro_batch_size_per_gpu),
        (f"{REF}.log_prob_max_token_len_per_gpu", ref.log_prob_max_token_len_per_gpu),
        (f"{ACTOR}.ppo_mini_batch_size", actor.ppo_mini_batch_size),
        (f"{ACTOR}.ppo_micro_batch_size_per_gpu", actor.ppo_micro_batch_size_per_gpu),
        (f"{ACTOR}.ppo_max_token_len_per_gpu", actor.ppo_max_token_len_per_gpu),
        (f"{ACTOR}.ppo_epochs", actor.ppo_epochs),
        ("critic.ppo_mini_batch_size", critic.ppo_mini_batch_size),
        ("critic.ppo_micro_batch_size_per_gpu", critic.ppo_micro_batch_size_per_gpu),
        ("critic.ppo_max_token_len_per_gpu", critic.ppo_max_token_len_per_gpu),
        ("critic.forward_micro_batch_size_per_gpu", critic.forward_micro_batch_size_per_gpu),
        ("critic.forward_max_token_len_per_gpu", critic.forward_max_token_len_per_gpu),
        ("critic.ppo_epochs", critic.ppo_epochs),
        ("trainer.total_epochs", config.trainer.total_epochs),
        ("trainer.total_training_steps", config.trainer.total_training_steps),
    ]


def read(config: PPOConfig, *, processes: int, prompts: int | None, critic: bool, reference: bool) -> Request:
    """What the configuration asks for; `critic` and `reference` say whether those roles run."""
    return Request(
        config=config,
        processes=processes,
        prompts=prompts,
        q=config.data.train_batch_size,
        n=config.actor_rollout_ref.rollout.n,
        longest_row=config.data.max_prompt_length + config.data.max_response_length,
        actor=_read_actor(config),
        critic=_read_critic(config) if critic else None,
        old_log_prob=_read_log_prob(config, ROLLOUT),
        ref=_read_log_prob(config, REF) if reference else None,
        values=_read_values(config) if critic else None,
        val_prompts=config.data.val_batch_size,
        val_n=config.actor_rollout_ref.rollout.val_kwargs.n,
    )


def _read_actor(config: PPOConfig) -> RoleRequest:
    actor = config.actor_rollout_ref.actor
    micro = MicroRequest(
        purpose="the actor's update",
        rows=actor.ppo_micro_batch_size_per_gpu,
        rows_key=f"{ACTOR}.ppo_micro_batch_size_per_gpu",
        dynamic=actor.use_dynamic_bsz,
        max_tokens=actor.ppo_max_token_len_per_gpu,
        tokens_key=f"{ACTOR}.ppo_max_token_len_per_gpu",
        switch_key=f"{ACTOR}.use_dynamic_bsz",
    )
    mini_key = f"{ACTOR}.ppo_mini_batch_size"
    return RoleRequest("actor", actor.ppo_mini_batch_size, mini_key, actor.ppo_epochs, actor.shuffle, micro, actor.optim, f"{ACTOR}.optim")


def _read_critic(config: PPOConfig) -> RoleRequest:
    """Nulls follow the actor; a key that does so is named as the actor's."""
    critic, actor = config.critic, _read_actor(config)
    own_mini = critic.ppo_mini_batch_size is not None
    own_switch = critic.use_dynamic_bsz is not None
    micro = MicroRequest(
        purpose="the critic's update",
        rows=critic.ppo_micro_batch_size_per_gpu,
        rows_key="critic.ppo_micro_batch_size_per_gpu",
        dynamic=bool(critic.use_dynamic_bsz) if own_switch else actor.micro.dynamic,
        max_tokens=critic.ppo_max_token_len_per_gpu,
        tokens_key="critic.ppo_max_token_len_per_gpu",
        switch_key="critic.use_dynamic_bsz" if own_switch else actor.micro.switch_key,
    )
    return RoleRequest(
        name="critic",
        mini=critic.ppo_mini_batch_size or actor.mini,
        mini_key="critic.ppo_mini_batch_size" if own_mini else actor.mini_key,
        epochs=critic.ppo_epochs or actor.epochs,
        shuffle=actor.shuffle if critic.shuffle is None else critic.shuffle,
        micro=micro,
        optim=critic.optim,
        optim_key="critic.optim",
    )


def _read_log_prob(config: PPOConfig, prefix: str) -> MicroRequest:
    """Log-probabilities of the actor (`rollout.log_prob_*`) or of the reference (`ref.log_prob_*`); nulls follow the actor."""
    actor = _read_actor(config).micro
    section = config.actor_rollout_ref.rollout if prefix == ROLLOUT else config.actor_rollout_ref.ref
    own_switch, own_tokens = section.log_prob_use_dynamic_bsz is not None, section.log_prob_max_token_len_per_gpu is not None
    return MicroRequest(
        purpose="the old log-probabilities" if prefix == ROLLOUT else "the reference's log-probabilities",
        rows=section.log_prob_micro_batch_size_per_gpu,
        rows_key=f"{prefix}.log_prob_micro_batch_size_per_gpu",
        dynamic=bool(section.log_prob_use_dynamic_bsz) if own_switch else actor.dynamic,
        max_tokens=section.log_prob_max_token_len_per_gpu or actor.max_tokens,
        tokens_key=f"{prefix}.log_prob_max_token_len_per_gpu" if own_tokens else actor.tokens_key,
        switch_key=f"{prefix}.log_prob_use_dynamic_bsz" if own_switch else actor.switch_key,
    )


def _read_values(config: PPOConfig) -> MicroRequest:
    """Values without an update; nulls follow the critic's update."""
    critic, update = config.critic, _read_critic(config).micro
    own_rows, own_tokens = critic.forward_micro_batch_size_per_gpu is not None, critic.forward_max_token_len_per_gpu is not None
    return MicroRequest(
        purpose="the values",
        rows=critic.forward_micro_batch_size_per_gpu or update.rows,
        rows_key="critic.forward_micro_batch_size_per_gpu" if own_rows else update.rows_key,
        dynamic=update.dynamic,
        max_tokens=critic.forward_max_token_len_per_gpu or update.max_tokens,
        tokens_key="critic.forward_max_token_len_per_gpu" if own_tokens else update.tokens_key,
        switch_key=update.switch_key,
    )
