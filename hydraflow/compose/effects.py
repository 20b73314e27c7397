"""Finds keys that have no effect under the chosen options, so that users do not expect one.

In: a composed configuration and the keys that the user set. Out: one problem for each key that will not be
read, with the reason and what would give it an effect. `launch` prints them, or rejects them with
`strict=true`. A condition on the key's own section is declared beside its field (`options.py`); `RULES` has
those across sections. Left out on purpose: keys that exist only in verl (`verl.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, fields
from functools import partial
from typing import Any

from hydraflow.algorithms.config import POLICY_LOSSES, estimator_of
from hydraflow.batch_plan.layout import Devices
from hydraflow.batch_plan.mapping import parse
from hydraflow.batch_plan.roles import fills_by_tokens, needs_critic, needs_reference
from hydraflow.batch_plan.settings import value_at
from hydraflow.batch_plan.topology import ACTOR, REF, ROLLOUT
from hydraflow.compose.patterns import fits
from hydraflow.engine.config import engine_config
from hydraflow.errors import Problem, shown
from hydraflow.generation.config import GENERATION_ENGINES, engine_dtype
from hydraflow.options import option_of, why_idle
from hydraflow.rewards.config import FUNCTIONS
from hydraflow.schema import GenerateConfig, PPOConfig, SupervisedConfig, entry_for
from hydraflow.system.allocation import allocation
from hydraflow.workers.config import ActorConfig


@dataclass(frozen=True)
class NoEffectRule:
    """Keys that have no effect if a condition on the whole configuration holds."""

    pattern: str
    """In a pattern `{a,b}` matches either, `*` one name, `**` any number of names."""
    when: Callable[[Any], bool]
    why: str
    remedy: str = ""
    """Overrides that would give them an effect; empty: there are none."""


POLICY = "actor_rollout_ref.model"
BY_TOKENS = "use_dynamic_bsz=true fills micro-batches by tokens"
BY_ROWS = "micro-batches have a fixed number of rows"
VALIDATION = "{test_freq,val_before_train,log_val_generations,validation_data_dir}"
NO_VALIDATION = "there is no validation without data.val_files"


def _validates(config: PPOConfig) -> bool:
    return config.recipe.name != "none" or bool(config.data.val_files)


def _while(switch: str, pattern: str, what: str) -> NoEffectRule:
    """Keys without effect while `switch` is true; `what` completes the reason, as in "switch=true what"."""
    return NoEffectRule(
        pattern, lambda c: bool(value_at(c, switch)), f"{switch}=true {what}", f"{switch}=false"
    )


def _unless(key: str, value: str, pattern: str) -> NoEffectRule:
    """Keys without effect unless another key has this value."""
    return NoEffectRule(
        pattern, lambda c: value_at(c, key) != value, f"{key} is not {value}", f"{key}={value}"
    )


def _micro_batch_rules(
    role: str, section: str, *, rows: tuple[str, ...], tokens: str, switch: str
) -> tuple[NoEffectRule, NoEffectRule]:
    """The micro-batches of a role are filled either by rows or by tokens."""

    def counts_rows(config: PPOConfig) -> bool:
        given = any(value_at(config, f"{section}.{name}") is not None for name in rows)
        return given and not fills_by_tokens(config, role)

    by_rows, by_tokens = f"{section}.{switch}=false", f"{section}.{switch}=true"
    pattern = f"{section}.{{{','.join(rows)}}}"
    return (
        NoEffectRule(pattern, lambda c: fills_by_tokens(c, role), BY_TOKENS, by_rows),
        NoEffectRule(f"{section}.{tokens}", counts_rows, BY_ROWS, by_tokens),
    )


_ROLES = (
    NoEffectRule(
        "reward.reward_kwargs.**",
        lambda c: estimator_of(c.algorithm.adv_estimator).several_rewards,
        "algorithm.adv_estimator compares several rewards in place of the score",
    ),
    NoEffectRule("critic.**", lambda c: not needs_critic(c), "no critic runs", "critic.enable=true"),
    NoEffectRule(
        f"{REF}.**",
        lambda c: not needs_reference(c),
        "no reference runs",
        f"{ACTOR}.use_kl_loss=true or algorithm.use_kl_in_reward=true",
    ),
    NoEffectRule(
        f"{REF}.{{fsdp_config.**,megatron.**,device_mapping}}",
        lambda c: c.actor_rollout_ref.model.lora_rank > 0,
        f"with {POLICY}.lora_rank above 0 the reference is the actor with its adapters off",
        f"{POLICY}.lora_rank=0",
    ),
    NoEffectRule(
        f"{POLICY}.lora.merge",
        lambda c: c.actor_rollout_ref.model.lora_rank == 0,
        f"{POLICY}.lora_rank=0: no adapters",
        f"{POLICY}.lora_rank=8",
    ),
    NoEffectRule(
        f"{REF}.megatron.{{use_distributed_optimizer,override_ddp_config,grad_offload,optimizer_offload,"
        "moe_router_load_balancing_type,moe_aux_loss_coeff,moe_router_bias_update_rate}",
        lambda c: True,
        "the reference is not trained",
    ),
    _unless(f"{ACTOR}.strategy", "megatron", f"{REF}.megatron.**"),
    NoEffectRule(
        "trainer.keep_groups",
        lambda c: c.actor_rollout_ref.rollout.n == 1,
        f"{ROLLOUT}.n=1: a group is a row",
        f"{ROLLOUT}.n=8",
    ),
    NoEffectRule(
        "trainer.keep_groups",
        lambda c: not c.actor_rollout_ref.model.use_remove_padding,
        f"{POLICY}.use_remove_padding=false computes every row whole",
        f"{POLICY}.use_remove_padding=true",
    ),
    NoEffectRule(
        f"{REF}.fsdp_config.**",
        lambda c: c.actor_rollout_ref.actor.strategy == "megatron",
        f"{ACTOR}.strategy=megatron",
        f"{ACTOR}.strategy=fsdp2",
    ),
)


def _rollout_is_with_a_model(config: PPOConfig) -> bool:
    policy, critic = config.actor_rollout_ref, config.critic
    mappings = [policy.actor.device_mapping, policy.ref.device_mapping, critic.device_mapping]
    return any(_rollout_is_with(config, mapping) for mapping in mappings)


def _rollout_is_with(config: PPOConfig, mapping: object) -> bool:
    """Whether the rollout shares its processes with a role that has this mapping."""
    rollout = config.actor_rollout_ref.rollout
    same_devices = not rollout.nnodes and _devices(rollout.device_mapping) in (None, _devices(mapping))
    engine = GENERATION_ENGINES.get(rollout.name)
    shares = engine is not None and not engine.own_process
    return config.trainer.debug.local or (config.trainer.fuse_roles and same_devices and shares)


def _reads_back(config: PPOConfig) -> bool:
    engine = GENERATION_ENGINES.get(config.actor_rollout_ref.rollout.name)
    return engine is None or engine.reads_back


def _devices(mapping: object) -> Devices | None:
    try:
        return None if mapping is None else parse(mapping)[0]
    except ValueError:  # the plan reports it
        return None


def _replica_is_divided(size: str, config: PPOConfig) -> bool:
    return bool(getattr(config.actor_rollout_ref.rollout, size) > 1)


_PLACES = (
    NoEffectRule(
        f"{ROLLOUT}.{{update_weights_bucket_megabytes,verify_weights_every}}",
        lambda c: _rollout_is_with(c, c.actor_rollout_ref.actor.device_mapping),
        "the rollout reads the actor's weights within one process",
        "trainer.fuse_roles=false",
    ),
    *(
        _unless(f"{ROLLOUT}.name", name, f"{ROLLOUT}.engine_kwargs.{name}")
        for name, engine in GENERATION_ENGINES.items()
        if "engine_kwargs" in engine.reads
    ),
    NoEffectRule(
        f"{ROLLOUT}.verify_weights_every",
        lambda c: not _reads_back(c),
        "this engine's weights cannot be read back",
        f"{ROLLOUT}.name=vllm",
    ),
    NoEffectRule(
        f"{ROLLOUT}.max_retries",
        lambda c: _rollout_is_with_a_model(c) and not c.trainer.debug.rollout_only,
        "the rollout shares its processes with another role, so the death of a process ends the run",
        "trainer.fuse_roles=false",
    ),
    *(
        NoEffectRule(
            f"{ROLLOUT}.max_retries",
            partial(_replica_is_divided, size),
            "the death of one process of a replica on several devices ends the run",
            f"{ROLLOUT}.{size}=1",
        )
        for size in ("tensor_model_parallel_size", "pipeline_model_parallel_size")
    ),
    _while("trainer.debug.local", "trainer.fuse_roles", "runs all roles in one process"),
)


def _computes_like_the_engine(config: PPOConfig) -> bool:
    """Whether engine and trainer compute the same probabilities. False for dtype `auto`, which depends on the
    device."""
    rollout, actor = config.actor_rollout_ref.rollout, config.actor_rollout_ref.actor
    trainer = engine_config(actor.strategy, actor)
    dtypes = {engine_dtype(rollout.dtype, trainer.compute_dtype), trainer.compute_dtype}
    dtypes |= {trainer.product_dtype, trainer.model_dtype}
    replays = config.trainer.debug.load_rollouts is not None
    engine = GENERATION_ENGINES.get(rollout.name)
    same = engine is not None and engine.computes_as_trainer
    return same and dtypes in ({"fp32"}, {"fp64"}) and not replays


_READ_BY_LOSSES = {name for loss in POLICY_LOSSES.values() for name in loss.all_reads}
_LOSS_KEYS = sorted(
    {
        name
        for field in fields(ActorConfig)
        if field.name in _READ_BY_LOSSES
        for name in (field.name, option_of(field).follows)
        if name
    }
)
"""The actor's keys that a policy loss may read, and those that they follow."""
_CORRECTION = (
    NoEffectRule(
        "algorithm.rollout_correction.{rollout_is,rollout_is_*,rollout_rs,rollout_rs_threshold}",
        lambda c: _computes_like_the_engine(c) and not c.algorithm.rollout_correction.bypass_mode,
        f"{ROLLOUT}.name=native computes in the trainer's dtype, so every ratio is 1",
        f"{ROLLOUT}.name=vllm",
    ),
    NoEffectRule(
        f"{ACTOR}.{{{','.join(_LOSS_KEYS)},policy_loss.*}}",
        lambda c: (
            c.algorithm.rollout_correction.bypass_mode
            and c.algorithm.rollout_correction.loss_type == "reinforce"
        ),
        "algorithm.rollout_correction.loss_type=reinforce is the policy loss",
        "algorithm.rollout_correction.loss_type=ppo_clip",
    ),
)
_BATCHES = (
    *_micro_batch_rules(
        "critic",
        "critic",
        rows=("ppo_micro_batch_size_per_gpu", "forward_micro_batch_size_per_gpu"),
        tokens="forward_max_token_len_per_gpu",
        switch="use_dynamic_bsz",
    ),
    *(
        rule
        for role in ("rollout", "ref")
        for rule in _micro_batch_rules(
            role,
            f"actor_rollout_ref.{role}",
            rows=("log_prob_micro_batch_size_per_gpu",),
            tokens="log_prob_max_token_len_per_gpu",
            switch="log_prob_use_dynamic_bsz",
        )
    ),
    NoEffectRule(
        "data.gen_batch_size",
        lambda c: not c.algorithm.filter_groups.enable,
        "only algorithm.filter_groups samples in batches of this size",
        "algorithm.filter_groups.enable=true",
    ),
)
_VALIDATION = (
    NoEffectRule(
        f"{{{ROLLOUT}.val_kwargs.*,trainer.{VALIDATION}}}",
        lambda c: not _validates(c),
        NO_VALIDATION,
        "data.val_files=...",
    ),
    NoEffectRule("data.{val_batch_size,val_max_samples}", lambda c: not _validates(c), NO_VALIDATION),
)
_PARTS = (
    _while(
        "trainer.debug.rollout_only",
        "{actor_rollout_ref.actor.{optim.**,megatron.{use_dist_checkpointing,dist_checkpointing_path}},"
        "critic.**,trainer.{save_freq,save_final_model,critic_warmup}}",
        "trains nothing",
    ),
    _while("trainer.debug.train_only", f"trainer.{VALIDATION}", "does not validate"),
    _while(
        "trainer.debug.train_only",
        "reward.{num_workers,timeout,max_memory,failure_score,functions,max_concurrent,"
        "custom_reward_function.*,reward_manager.*,sandbox.*,judge.*}",
        "takes the scores of trainer.debug.load_rollouts",
    ),
    NoEffectRule(
        "reward.judge.*",
        lambda c: not _rewards_read(c, "judge"),
        "only the function judge reads it",
        "reward.functions=[{name: judge}]",
    ),
    NoEffectRule(
        "reward.sandbox.*",
        lambda c: not _rewards_read(c, "sandbox"),
        "only functions that run programs read it",
        "reward.functions=[{name: code}]",
    ),
    NoEffectRule(
        "reward.{num_workers,timeout,max_memory,max_concurrent}",
        lambda c: c.debug or c.trainer.debug.local,
        "a debugged run scores in the calling process, without limits",
        "debug=false trainer.debug.local=false",
    ),
)
_RUN = (
    NoEffectRule(
        "ray_init.num_cpus",
        # in a Slurm job hydraflow.slurm passes it to the Ray that it starts
        lambda c: c.ray_init.address != "local" and allocation() is None,
        "a running cluster has its own number of CPUs",
        "ray_init.address=local",
    ),
    NoEffectRule(
        "ray_init.{address,num_cpus}",
        lambda c: c.trainer.debug.local,
        "trainer.debug.local=true runs without Ray",
    ),
    _while("trainer.debug.local", "log.console", "has one process, which logs to the console"),
    NoEffectRule(
        "trainer.{rpc_timeout,start_timeout}",
        lambda c: c.debug or c.trainer.debug.local,
        "a debugged run has no deadlines",
        "debug=false trainer.debug.local=false",
    ),
)


def _rewards_read(config: PPOConfig, section: str) -> bool:
    """Whether one of the built-in functions that score reads this section of `reward`."""
    reward = config.reward
    if reward.functions:
        built_in = (one for one in reward.functions if isinstance(one, dict) and "path" not in one)
        named = {str(one.get("name")) for one in built_in}
    else:
        named = set() if reward.custom_reward_function.path else {"data_source"}
    return any(section in FUNCTIONS[name].reads for name in FUNCTIONS.keys() & named)


RULES: dict[type, tuple[NoEffectRule, ...]] = {
    PPOConfig: (
        *_ROLES,
        *_PLACES,
        *_CORRECTION,
        *_BATCHES,
        *_VALIDATION,
        *_PARTS,
        *_RUN,
        _while("trainer.val_only", "trainer.rollout_data_dir", "trains nothing"),
        NoEffectRule(
            "trainer.rollout_data_dir",
            lambda c: c.trainer.debug.load_rollouts is not None,
            "trainer.debug.load_rollouts has the responses of an earlier run",
            "trainer.debug.load_rollouts=null",
        ),
    ),
    GenerateConfig: tuple(rule for rule in _RUN if not rule.pattern.startswith("log.")),
    SupervisedConfig: (
        NoEffectRule(
            "{trainer.test_freq,data.val_max_samples}",
            lambda c: not c.data.val_files,
            NO_VALIDATION,
            "data.val_files=...",
        ),
        *_RUN,
    ),
}
"""Schema -> rules; for each key, the first rule that applies is reported."""

PLANNED_ONLY = {
    "cluster.*": "it describes machines for python -m hydraflow.plan; a run reads trainer.*",
    f"{ROLLOUT}.agent.*": "agents are not implemented yet; python -m hydraflow.plan shows what each gets",
}
"""Keys that only the planner reads -> why a run does not."""
_NEVER_IDLE = {"critic.enable", "critic.strategy"}
"""Keys of the critic that RULES never report: its switch, and the strategy, which `model_engine` sets along
with the actor's."""


def without_effect(config: object, key: str) -> tuple[str, str] | None:
    """Why a key has no effect, and the remedy, by the rules across sections and those beside its field; None
    if it has an effect."""
    for rule in entry_for(RULES, type(config)) or ():
        if key not in _NEVER_IDLE and fits(rule.pattern, key) and rule.when(config):
            return rule.why, rule.remedy
    return why_idle(config, key)


def keys_without_effect(
    config: object, given: Iterable[tuple[str, Any]], *, planning: bool
) -> Iterator[Problem]:
    """One problem for each of the given (key, value) pairs that has no effect. `planning`: nothing will run.

    >>> config = PPOConfig()
    >>> print(*keys_without_effect(config, [("actor_rollout_ref.actor.kl_loss_coef", 0.1)], planning=True))
    actor_rollout_ref.actor.kl_loss_coef=0.1: has no effect: actor_rollout_ref.actor.use_kl_loss=false
          -> leave out actor_rollout_ref.actor.kl_loss_coef or actor_rollout_ref.actor.use_kl_loss=true
    """
    for key, value in given:
        found = without_effect(config, key)
        if found is None and not planning:
            found = next(((why, "") for pattern, why in PLANNED_ONLY.items() if fits(pattern, key)), None)
        if found is not None:
            why, suggestion = found
            remedy = f"leave out {key}" + (f" or {suggestion}" if suggestion else "")
            yield Problem(key, shown(value), f"has no effect: {why}", remedy)
