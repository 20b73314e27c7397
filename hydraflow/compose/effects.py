"""Keys that have no effect under the options chosen, so that nobody waits for what a setting will never do.

In: a composed configuration and the keys that its user set. Out: one problem for each that nothing will read,
with the reason and what would make it count. `launch` says them aloud, or refuses them with `strict=true`. A
new rule is a line of `RULES`. Left out on purpose: keys that are verl's alone (`verl.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from hydraflow.batch_plan.roles import needs_critic, needs_reference
from hydraflow.compose.patterns import fits
from hydraflow.engine.config import OptimConfig
from hydraflow.errors import Problem, shown
from hydraflow.models.config import ModelConfig
from hydraflow.schema import GenerateConfig, PPOConfig, SFTConfig
from hydraflow.system.allocation import allocation


@dataclass(frozen=True)
class Idle:
    """Keys that may have no effect."""

    pattern: str
    """`{a,b}` stands for either, `*` for one name, `**` for any."""
    when: Callable[[Any], bool]
    """Whether they have none under a configuration."""
    why: str
    cure: str = ""
    """Overrides with which they would have one."""


POLICY, ACTOR, REF, ROLLOUT = (
    "actor_rollout_ref.model",
    "actor_rollout_ref.actor",
    "actor_rollout_ref.ref",
    "actor_rollout_ref.rollout",
)


def _validates(config: PPOConfig) -> bool:
    return config.recipe.name != "none" or bool(config.data.val_files)


def _critic_is_dynamic(config: PPOConfig) -> bool:
    own = config.critic.use_dynamic_bsz
    return config.actor_rollout_ref.actor.use_dynamic_bsz if own is None else own


def _is_dynamic(config: PPOConfig, role: str) -> bool:
    """Whether a forward that recomputes log-probabilities is filled by tokens."""
    policy = config.actor_rollout_ref
    own = policy.ref.log_prob_use_dynamic_bsz if role == "ref" else policy.rollout.log_prob_use_dynamic_bsz
    return policy.actor.use_dynamic_bsz if own is None else own


def _estimator(config: PPOConfig) -> str:
    return config.algorithm.adv_estimator


def _static(rows: Callable[[Any], object], dynamic: Callable[[Any], bool]) -> Callable[[Any], bool]:
    """Whether a token budget is unused: micro-batches have a given number of rows."""
    return lambda config: rows(config) is not None and not dynamic(config)


def _optimizer(prefix: str, of: Callable[[Any], OptimConfig]) -> tuple[Idle, ...]:
    return (
        Idle(
            f"{prefix}.lr_warmup_steps_ratio",
            lambda c: of(c).lr_warmup_steps >= 0,
            f"{prefix}.lr_warmup_steps is given",
            f"{prefix}.lr_warmup_steps=-1",
        ),
        Idle(
            f"{prefix}.min_lr_ratio",
            lambda c: of(c).lr_scheduler_type == "constant",
            f"{prefix}.lr_scheduler_type=constant never lowers the rate",
            f"{prefix}.lr_scheduler_type=cosine",
        ),
    )


def _adapters(prefix: str, of: Callable[[Any], ModelConfig]) -> Idle:
    return Idle(
        f"{prefix}.{{lora_alpha,target_modules}}",
        lambda c: of(c).lora_rank == 0,
        f"{prefix}.lora_rank=0: no adapters",
        f"{prefix}.lora_rank=8",
    )


def _engine(prefix: str, owner: str, of: Callable[[Any], str]) -> tuple[Idle, ...]:
    """The settings of the engine that was not chosen."""
    return (
        Idle(
            f"{prefix}.megatron.**",
            lambda c: of(c) != "megatron",
            f"{owner}.strategy is not megatron",
            f"{owner}.strategy=megatron",
        ),
        Idle(
            f"{prefix}.fsdp_config.**",
            lambda c: of(c) == "megatron",
            f"{owner}.strategy=megatron",
            f"{owner}.strategy=fsdp2",
        ),
    )


def _actor_engine(config: PPOConfig) -> str:
    return config.actor_rollout_ref.actor.strategy


_ROLES = (
    Idle("critic.**", lambda c: not needs_critic(c), "no critic runs", "critic.enable=true"),
    Idle(
        f"{REF}.**",
        lambda c: not needs_reference(c),
        "no reference runs",
        f"{ACTOR}.use_kl_loss=true or algorithm.use_kl_in_reward=true",
    ),
    Idle(
        f"{REF}.{{fsdp_config.**,megatron.**,device_mapping}}",
        lambda c: c.actor_rollout_ref.model.lora_rank > 0,
        f"with {POLICY}.lora_rank above 0 the reference is the actor with its adapters off",
        f"{POLICY}.lora_rank=0",
    ),
    *_engine(ACTOR, ACTOR, _actor_engine),
    *_engine(REF, ACTOR, _actor_engine),
    *_engine("critic", "critic", lambda c: c.critic.strategy),
    _adapters(POLICY, lambda c: c.actor_rollout_ref.model),
    _adapters("critic.model", lambda c: c.critic.model),
    *_optimizer(f"{ACTOR}.optim", lambda c: c.actor_rollout_ref.actor.optim),
    *_optimizer("critic.optim", lambda c: c.critic.optim),
)
_BATCHES = (
    Idle(
        f"{ACTOR}.ppo_micro_batch_size_per_gpu",
        lambda c: c.actor_rollout_ref.actor.use_dynamic_bsz,
        f"{ACTOR}.use_dynamic_bsz=true fills micro-batches by tokens",
        f"{ACTOR}.use_dynamic_bsz=false",
    ),
    Idle(
        "critic.{ppo_micro_batch_size_per_gpu,forward_micro_batch_size_per_gpu}",
        _critic_is_dynamic,
        "use_dynamic_bsz=true fills micro-batches by tokens",
        "critic.use_dynamic_bsz=false",
    ),
    Idle(
        f"{ROLLOUT}.log_prob_micro_batch_size_per_gpu",
        lambda c: _is_dynamic(c, "rollout"),
        "use_dynamic_bsz=true fills micro-batches by tokens",
        f"{ROLLOUT}.log_prob_use_dynamic_bsz=false",
    ),
    Idle(
        f"{REF}.log_prob_micro_batch_size_per_gpu",
        lambda c: _is_dynamic(c, "ref"),
        "use_dynamic_bsz=true fills micro-batches by tokens",
        f"{REF}.log_prob_use_dynamic_bsz=false",
    ),
    Idle(
        f"{ROLLOUT}.log_prob_max_token_len_per_gpu",
        _static(
            lambda c: c.actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu,
            lambda c: _is_dynamic(c, "rollout"),
        ),
        "micro-batches have a given number of rows",
        f"{ROLLOUT}.log_prob_use_dynamic_bsz=true",
    ),
    Idle(
        f"{REF}.log_prob_max_token_len_per_gpu",
        _static(
            lambda c: c.actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu,
            lambda c: _is_dynamic(c, "ref"),
        ),
        "micro-batches have a given number of rows",
        f"{REF}.log_prob_use_dynamic_bsz=true",
    ),
    Idle(
        "critic.forward_max_token_len_per_gpu",
        _static(
            lambda c: c.critic.forward_micro_batch_size_per_gpu or c.critic.ppo_micro_batch_size_per_gpu,
            _critic_is_dynamic,
        ),
        "micro-batches have a given number of rows",
        "critic.use_dynamic_bsz=true",
    ),
)
_MATHEMATICS = (
    Idle(
        "algorithm.lam",
        lambda c: _estimator(c) != "gae",
        "only algorithm.adv_estimator=gae reads it",
        "algorithm.adv_estimator=gae",
    ),
    Idle(
        "algorithm.gamma",
        lambda c: _estimator(c) not in ("gae", "reinforce_plus_plus"),
        "only algorithm.adv_estimator=gae and reinforce_plus_plus discount",
        "algorithm.adv_estimator=gae",
    ),
    Idle(
        "algorithm.norm_adv_by_std_in_grpo",
        lambda c: _estimator(c) != "grpo",
        "only algorithm.adv_estimator=grpo reads it",
        "algorithm.adv_estimator=grpo",
    ),
    Idle(
        "algorithm.{kl_penalty,kl_ctrl.*}",
        lambda c: not c.algorithm.use_kl_in_reward,
        "algorithm.use_kl_in_reward=false",
        "algorithm.use_kl_in_reward=true",
    ),
    Idle(
        "algorithm.kl_ctrl.{horizon,target_kl}",
        lambda c: c.algorithm.kl_ctrl.type == "fixed",
        "algorithm.kl_ctrl.type=fixed keeps the coefficient",
        "algorithm.kl_ctrl.type=adaptive",
    ),
    Idle(
        "algorithm.filter_groups.{metric,max_num_gen_batches}",
        lambda c: not c.algorithm.filter_groups.enable,
        "algorithm.filter_groups.enable=false",
        "algorithm.filter_groups.enable=true",
    ),
    Idle(
        "data.gen_batch_size",
        lambda c: not c.algorithm.filter_groups.enable,
        "only algorithm.filter_groups samples in batches of its own",
        "algorithm.filter_groups.enable=true",
    ),
    Idle(
        f"{ACTOR}.{{kl_loss_coef,kl_loss_type}}",
        lambda c: not c.actor_rollout_ref.actor.use_kl_loss,
        f"{ACTOR}.use_kl_loss=false",
        f"{ACTOR}.use_kl_loss=true",
    ),
    Idle(
        f"{ACTOR}.loss_scale_factor",
        lambda c: c.actor_rollout_ref.actor.loss_agg_mode != "seq-mean-token-sum-norm",
        "only loss_agg_mode=seq-mean-token-sum-norm divides by it",
        f"{ACTOR}.loss_agg_mode=seq-mean-token-sum-norm",
    ),
    Idle(
        f"{ACTOR}.clip_ratio",
        lambda c: (
            None not in (c.actor_rollout_ref.actor.clip_ratio_low, c.actor_rollout_ref.actor.clip_ratio_high)
        ),
        "clip_ratio_low and clip_ratio_high are both given",
        f"{ACTOR}.clip_ratio_low=null",
    ),
    Idle(
        f"{ACTOR}.{{clip_ratio,clip_ratio_low,clip_ratio_high,clip_ratio_c}}",
        lambda c: c.actor_rollout_ref.actor.policy_loss.loss_mode != "vanilla",
        "only policy_loss.loss_mode=vanilla clips this way",
        f"{ACTOR}.policy_loss.loss_mode=vanilla",
    ),
)
_GENERATION = (
    Idle(
        f"{ROLLOUT}.{{engine_kwargs.vllm,gpu_memory_utilization,max_num_batched_tokens,max_model_len}}",
        lambda c: c.actor_rollout_ref.rollout.name == "native",
        f"{ROLLOUT}.name=native; vllm reads it",
        f"{ROLLOUT}.name=vllm",
    ),
    Idle(
        f"{ROLLOUT}.update_weights_bucket_megabytes",
        lambda c: c.actor_rollout_ref.rollout.name == "native" and _actor_engine(c) != "megatron",
        f"{ROLLOUT}.name=native takes weights tensor by tensor",
        f"{ROLLOUT}.name=vllm",
    ),
    Idle(
        f"{ROLLOUT}.n_gpus_per_node",
        lambda c: c.actor_rollout_ref.rollout.nnodes == 0,
        f"{ROLLOUT}.nnodes=0: the rollout shares the trainer's devices",
        f"{ROLLOUT}.nnodes=1",
    ),
    Idle(
        f"{ROLLOUT}.val_kwargs.{{temperature,top_k,top_p}}",
        lambda c: not c.actor_rollout_ref.rollout.val_kwargs.do_sample,
        f"{ROLLOUT}.val_kwargs.do_sample=false takes the most probable token",
        f"{ROLLOUT}.val_kwargs.do_sample=true",
    ),
    Idle(
        f"{{{ROLLOUT}.val_kwargs.*,trainer.test_freq,trainer.val_before_train,trainer.log_val_generations,trainer.validation_data_dir}}",
        lambda c: not _validates(c),
        "there is no validation without data.val_files",
        "data.val_files=...",
    ),
    Idle(
        "data.{val_batch_size,val_max_samples}",
        lambda c: not _validates(c),
        "there is no validation without data.val_files",
    ),
    Idle(
        "reward.reward_model.*",
        lambda c: not c.reward.reward_model.enable,
        "reward.reward_model.enable=false",
        "reward.reward_model.enable=true",
    ),
    Idle(
        "reward.reward_model.{nnodes,n_gpus_per_node}",
        lambda c: not c.reward.reward_model.enable_resource_pool,
        "reward.reward_model.enable_resource_pool=false: it shares the trainer's devices",
        "reward.reward_model.enable_resource_pool=true",
    ),
    Idle(
        "reward.custom_reward_function.{name,reward_kwargs}",
        lambda c: c.reward.custom_reward_function.path is None,
        "reward.custom_reward_function.path is not given",
        "reward.custom_reward_function.path=...",
    ),
)
_FILTERED = Idle(
    "data.truncation",
    lambda c: c.data.filter_overlong_prompts,
    "data.filter_overlong_prompts=true leaves longer prompts out",
    "data.filter_overlong_prompts=false",
)
_PARTS = (
    Idle(
        "{actor_rollout_ref.actor.optim.**,critic.**,trainer.{save_freq,save_final_model,critic_warmup}}",
        lambda c: c.trainer.debug.rollout_only,
        "trainer.debug.rollout_only=true trains nothing",
        "trainer.debug.rollout_only=false",
    ),
    Idle(
        "trainer.{test_freq,val_before_train,log_val_generations,validation_data_dir}",
        lambda c: c.trainer.debug.train_only,
        "trainer.debug.train_only=true does not validate",
        "trainer.debug.train_only=false",
    ),
    Idle(
        "reward.{num_workers,timeout,max_memory,failure_score,custom_reward_function.*}",
        lambda c: c.trainer.debug.train_only,
        "trainer.debug.train_only=true takes the scores of trainer.debug.load_rollouts",
        "trainer.debug.train_only=false",
    ),
    Idle(
        "reward.{timeout,max_memory}",
        lambda c: c.reward.num_workers == 0,
        "rows that are scored in the process that asks have no limits",
        "reward.num_workers=1",
    ),
    Idle(
        "reward.{num_workers,timeout,max_memory}",
        lambda c: c.debug or c.trainer.debug.local,
        "a run that is debugged scores in the process that asks, without limits",
        "debug=false trainer.debug.local=false",
    ),
)
_RUN = (
    Idle("recipe.*", lambda c: c.recipe.name == "none", "recipe=none makes nothing", "recipe=arithmetic"),
    Idle(
        "trainer.total_epochs",
        lambda c: c.trainer.total_training_steps is not None,
        "trainer.total_training_steps is given",
        "trainer.total_training_steps=null",
    ),
    Idle(
        "trainer.resume_from_path",
        lambda c: c.trainer.resume_mode != "resume_path",
        "trainer.resume_mode is not resume_path",
        "trainer.resume_mode=resume_path",
    ),
    Idle(
        "trainer.restart_backoff",
        lambda c: c.trainer.max_restarts == 0,
        "trainer.max_restarts=0",
        "trainer.max_restarts=3",
    ),
    Idle(
        "trainer.wandb_proxy",
        lambda c: "wandb" not in c.trainer.logger,
        "trainer.logger has no wandb",
        "trainer.logger=[console,wandb]",
    ),
    Idle(
        "ray_init.num_cpus",
        # in a Slurm job it is what hydraflow.slurm starts Ray with
        lambda c: c.ray_init.address != "local" and allocation() is None,
        "the running cluster counts its own",
        "ray_init.address=local",
    ),
    Idle(
        "ray_init.{address,num_cpus}",
        lambda c: c.trainer.debug.local,
        "trainer.debug.local=true does without Ray",
    ),
    Idle(
        "log.console",
        lambda c: c.trainer.debug.local,
        "trainer.debug.local=true has one process, whose lines are on the console",
        "trainer.debug.local=false",
    ),
    Idle(
        "trainer.{rpc_timeout,start_timeout}",
        lambda c: c.debug or c.trainer.debug.local,
        "nothing has a deadline while it is debugged",
        "debug=false trainer.debug.local=false",
    ),
    Idle(
        "global_profiler.{steps,save_path,ranks}",
        lambda c: c.global_profiler.tool is None,
        "global_profiler.tool=null",
        "global_profiler.tool=torch",
    ),
)
RULES: dict[type, tuple[Idle, ...]] = {
    PPOConfig: (
        *_ROLES,
        *_BATCHES,
        *_MATHEMATICS,
        *_GENERATION,
        *_PARTS,
        _FILTERED,
        *_RUN,
        Idle(
            "trainer.rollout_data_dir",
            lambda c: c.trainer.val_only,
            "trainer.val_only=true trains nothing",
            "trainer.val_only=false",
        ),
        Idle(
            "trainer.rollout_data_dir",
            lambda c: c.trainer.debug.load_rollouts is not None,
            "trainer.debug.load_rollouts has the responses of an earlier run",
            "trainer.debug.load_rollouts=null",
        ),
    ),
    SFTConfig: (
        Idle(
            "data.micro_batch_size_per_gpu",
            lambda c: c.data.use_dynamic_bsz,
            "data.use_dynamic_bsz=true fills micro-batches by tokens",
            "data.use_dynamic_bsz=false",
        ),
        Idle(
            "data.max_token_len_per_gpu",
            _static(lambda c: c.data.micro_batch_size_per_gpu, lambda c: c.data.use_dynamic_bsz),
            "micro-batches have a given number of rows",
            "data.use_dynamic_bsz=true",
        ),
        _adapters("model", lambda c: c.model),
        *_optimizer("optim", lambda c: c.optim),
        Idle(
            "trainer.test_freq",
            lambda c: not c.data.val_files,
            "there is no validation without data.val_files",
            "data.val_files=...",
        ),
        *(rule for rule in _RUN if not rule.pattern.startswith("recipe")),
    ),
    GenerateConfig: (
        _FILTERED,
        Idle(
            "rollout.{top_k,top_p}",
            lambda c: c.rollout.temperature == 0,
            "rollout.temperature=0 takes the most probable token",
            "rollout.temperature=1.0",
        ),
    ),
}
"""Schema -> rules; of several that hold for a key the first is told. `recipe.name` itself is never without
effect."""

PLANNED_ONLY = (
    Idle(
        "cluster.*",
        lambda c: True,
        "it describes machines for python -m hydraflow.plan; a run takes those of trainer.*",
    ),
    Idle(
        f"{ROLLOUT}.agent.*",
        lambda c: True,
        "no agents run yet; python -m hydraflow.plan shows what each of them would get",
    ),
)
"""Keys that a plan shows and a run has no use for."""
_DECIDES = {"recipe.name", "critic.enable", "reward.reward_model.enable", "critic.strategy"}
"""Switches that stand in a section of which they decide whether it counts."""


def idle_keys(config: object, given: Iterable[tuple[str, Any]], *, planning: bool) -> Iterator[Problem]:
    """One problem for each given key, of (key, value), that has no effect; `planning`: nothing is going to
    run.

    >>> config = PPOConfig()
    >>> print(*idle_keys(config, [("actor_rollout_ref.actor.kl_loss_coef", 0.1)], planning=True))
    actor_rollout_ref.actor.kl_loss_coef=0.1: has no effect: actor_rollout_ref.actor.use_kl_loss=false
          -> leave out actor_rollout_ref.actor.kl_loss_coef or actor_rollout_ref.actor.use_kl_loss=true
    """
    rules = [
        rule
        for rule in (*RULES.get(type(config), ()), *(() if planning else PLANNED_ONLY))
        if rule.when(config)
    ]
    for key, value in given:
        rule = next((rule for rule in rules if _covers(rule, key)), None)
        if rule is not None:
            remedy = f"leave out {key}" + (f" or {rule.cure}" if rule.cure else "")
            yield Problem(key, shown(value), f"has no effect: {rule.why}", remedy)


def _covers(rule: Idle, key: str) -> bool:
    return key not in _DECIDES and fits(rule.pattern, key)
