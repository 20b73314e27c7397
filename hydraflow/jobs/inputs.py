"""Opens a job's inputs before anything starts: models, tokenizers, prompts.

In: a configuration, and `Faults` that collects the errors. Out: what could be opened; None for a broken part,
which hides errors of other parts only where they depend on it. Left out on purpose: reward functions and the
machine (`ppo.py`, `session.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from functools import partial
from operator import itemgetter
from typing import TYPE_CHECKING, Any, TypeVar

from hydraflow.algorithms.distillation.config import TOPK
from hydraflow.batch_plan.resolve import BatchPlan
from hydraflow.batch_plan.roles import (
    needs_critic,
    own_reference,
    reads_critic_files,
    reads_policy_files,
    replay_problems,
)
from hydraflow.batch_plan.topology import SECTIONS
from hydraflow.checkup.model_files import dist_checkpoint_problems
from hydraflow.data.config import ExamplesConfig, PromptConfig
from hydraflow.data.conversations import ConversationDataset
from hydraflow.data.files import FileRecord
from hydraflow.data.pairs import PairDataset
from hydraflow.data.prompts import PromptDataset, read_prompts
from hydraflow.engine.config import EngineConfig, engine_config
from hydraflow.engine.fsdp.lora import require_targets
from hydraflow.engine.fsdp.ulysses import KEY, require_shareable
from hydraflow.engine.megatron.architecture import Architecture
from hydraflow.errors import ConfigError, Faults, Problem
from hydraflow.generation.config import SamplingConfig, every_stop_string
from hydraflow.generation.stopping import streaming_tokenizer
from hydraflow.jobs.own_code import check_modules
from hydraflow.models.config import ModelConfig, ModelSourceConfig
from hydraflow.models.fit import require_model, require_weights
from hydraflow.models.loading import (
    SCORE,
    context_of,
    lacks_tensor,
    load_config,
    load_generation_config,
    load_tokenizer,
    require_path,
)
from hydraflow.models.rounded import DTYPE_KEY, require_rounded_layers
from hydraflow.models.routers import HFRouters
from hydraflow.schema import PPOConfig
from hydraflow.trainer.ppo import teacher_of
from hydraflow.trainer.roles import TEACHERS, critic_model, reward_model, teacher_model
from hydraflow.workers.reward_model import REWARD_MODEL
from hydraflow.workers.teacher import vocabulary_of

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedTokenizerBase

Rows = TypeVar("Rows")
LOSS = "distillation.distillation_loss"
BYTES_PER_TARGET = 12
"""Bytes of one teacher log-probability and its token id in a step's columns."""
WHOLE_VOCABULARY_BYTES = 2 * 2**30
"""Limit of these columns per process if they cover the whole vocabulary. Computing the divergence briefly
takes several times as much."""
POLICY, CRITIC, ROLLOUT = "actor_rollout_ref.model", "critic.model", "actor_rollout_ref.rollout"


@dataclass(frozen=True)
class RunPrompts:
    """A run's prompts; None: not needed."""

    train: PromptDataset | None
    val: PromptDataset | None
    tokenizer: PreTrainedTokenizerBase

    def first_rows(self) -> list[FileRecord]:
        """The first three rows, unprocessed."""
        dataset = self.train or self.val
        return dataset.records[:3] if dataset else []

    def data_sources(self) -> list[str]:
        """Data sources over all rows."""
        datasets = [dataset for dataset in (self.train, self.val) if dataset]
        return sorted({source for dataset in datasets for source in dataset.data_sources()})


def open_model(
    model: ModelSourceConfig, faults: Faults, *, head: str, field: str, weights: bool = True
) -> PreTrainedConfig | None:
    """The model's configuration, checked against the weight files as far as possible without loading them.
    `weights`: whether the run reads them."""
    if not faults.passes(lambda: check_modules(model, field)):
        return None
    config = faults.result(lambda: load_config(model, field=field))
    if config is None or not faults.passes(lambda: require_model(model, config, head=head, field=field)):
        return None
    if weights:
        faults.passes(lambda: require_weights(model, config, head=head, field=field))
    faults.passes(lambda: load_generation_config(model, field=field))
    return config


def open_trained_model(
    model: ModelConfig, faults: Faults, *, head: str, field: str, weights: bool = True
) -> PreTrainedConfig | None:
    """Like `open_model`, for a model that may get LoRA adapters."""
    config = open_model(model, faults, head=head, field=field, weights=weights)
    if config is not None and model.lora_rank > 0:
        faults.passes(lambda: require_targets(model, config, head=head, field=field))
    return config


def open_tokenizer(
    model: ModelSourceConfig, config: PreTrainedConfig | None, faults: Faults, *, field: str
) -> PreTrainedTokenizerBase | None:
    """The tokenizer; skipped if the model's directory is already known to be broken."""
    if config is None and not model.tokenizer_path:
        return None
    return faults.result(lambda: load_tokenizer(model, field=field))


def require_stops(
    tokenizer: PreTrainedTokenizerBase | None, rollout: SamplingConfig, faults: Faults, *, section: str
) -> None:
    """Checks that the tokenizer supports the stop strings. `section`: configuration path of `rollout`."""
    if tokenizer is not None and every_stop_string(rollout):
        faults.passes(lambda: streaming_tokenizer(tokenizer, rollout, section=section))


def open_rows(
    kind: Callable[..., Rows],
    read: Callable[..., object],
    data: PromptConfig | ExamplesConfig,
    files: Any,
    tokenizer: PreTrainedTokenizerBase | None,
    faults: Faults,
    *,
    key: str,
    max_samples: int,
) -> Rows | None:
    """Opens a data set as a `kind`; without a tokenizer, `read` only checks the files."""
    if tokenizer is None:
        faults.passes(lambda: read(data, files, key=key, max_samples=max_samples))
        return None
    return faults.result(lambda: kind(data, files, tokenizer, key=key, max_samples=max_samples))


open_prompts = partial(open_rows, PromptDataset, read_prompts)


@dataclass(frozen=True)
class Reader:
    """A model and the prompts that it reads."""

    name: str
    """In error messages."""
    config: PreTrainedConfig | None
    """None: it could not be opened."""
    datasets: Sequence[PromptDataset | None]
    reads: Callable[[str | None], bool] = lambda source: True
    """Whether it reads prompts of a data source."""

    @property
    def longest(self) -> int:
        """Tokens of its longest prompt; 0 without any."""
        by_source = [item for data in self.datasets if data is not None for item in data.longest.items()]
        return max((tokens for source, tokens in by_source if self.reads(source)), default=0)


def require_context(readers: Sequence[Reader], max_response_length: int) -> None:
    """Raises ConfigError when the longest prompt leaves too little of a model's context."""
    known = []
    for reader in readers:
        if reader.config is None or not reader.longest:
            continue
        if context := context_of(reader.config, reader.name):
            known.append((context.tokens - reader.longest, reader.longest, context))
    room, longest, context = min(known, key=itemgetter(0), default=(max_response_length, 0, None))
    if context is None or max_response_length <= room:
        return
    remedy = f"data.max_response_length={room}"
    if room <= 0:
        remedy = f"data.max_prompt_length={context.tokens // 2} data.filter_overlong_prompts=true"
    rule = f"the longest prompt has {longest} tokens; together that is more than {context.limit}"
    raise ConfigError.one("data.max_response_length", max_response_length, rule, remedy)


def require_rows_fit(
    rows: ConversationDataset | PairDataset, data: ExamplesConfig, config: PreTrainedConfig, *, key: str
) -> None:
    """Raises ConfigError when the longest row exceeds the model's context. `key`: of the rows' files."""
    context = context_of(config)
    if context is None or rows.longest <= context.tokens:
        return
    remedy = f"data.max_length={context.tokens}"
    if data.truncation == "error":
        remedy += " data.truncation=right"
    rule = f"the longest row of {key} has {rows.longest} tokens, more than {context.limit}"
    raise ConfigError.one("data.max_length", data.max_length, rule, remedy)


def require_shareable_rows(config: PPOConfig, plan: BatchPlan, faults: Faults) -> None:
    """Checks that models with sequence or context parallelism support it."""
    policy, critic = (config.actor_rollout_ref.model, POLICY), (critic_model(config), CRITIC)
    for role, (model, field) in (("actor", policy), ("ref", policy), ("critic", critic)):
        size = plan.layouts[role].context if role in plan.layouts else 1
        if size == 1 or (role == "ref" and size == plan.layouts["actor"].context):
            continue
        described, key = faults.result(partial(load_config, model, field=field)), f"{SECTIONS[role]}.{KEY}"
        if described is None:
            continue
        faults.passes(partial(require_shareable, described, model, size, field=field, key=key))


def require_rounded(
    model: ModelConfig, engine: EngineConfig, faults: Faults, *, head: str, field: str, section: str = ""
) -> None:
    """Checks that a model has layers whose products can be rounded, if its engine does that. `section`: of
    the engine's role, with a dot; empty in supervised training."""
    if engine.product_dtype == engine.compute_dtype:
        return
    described = Faults().result(partial(load_config, model, field=field))
    empty = described and Faults().result(partial(require_model, model, described, head=head, field=field))
    if empty:  # what else is wrong with the model is reported elsewhere
        faults.passes(partial(require_rounded_layers, empty, key=f"{section}{DTYPE_KEY}"))


def require_rounded_roles(config: PPOConfig, faults: Faults) -> None:
    """`require_rounded` of every role."""
    policy, critic = config.actor_rollout_ref, config.critic
    strategy, sections = policy.actor.strategy, [("actor", policy.actor), ("ref", policy.ref)]
    for role, section in sections if own_reference(config) else sections[:1]:
        engine, prefix = engine_config(strategy, section), f"{SECTIONS[role]}."
        require_rounded(policy.model, engine, faults, head="policy", field=POLICY, section=prefix)
    if needs_critic(config):
        engine, model = engine_config(critic.strategy, critic), critic_model(config)
        require_rounded(model, engine, faults, head="value", field=CRITIC, section=f"{SECTIONS['critic']}.")


def open_inputs(config: PPOConfig, faults: Faults) -> RunPrompts | None:
    """Opens models, tokenizer and prompts of main_ppo. None: the prompts or the tokenizer cannot be used."""
    data, model = config.data, config.actor_rollout_ref.model
    from_files = reads_policy_files(config)
    described = open_trained_model(model, faults, head="policy", field=POLICY, weights=from_files)
    critic = _open_critic(config, faults) if needs_critic(config) else None
    if described is not None:
        _require_routers(config, described, faults)
        faults.add(dist_checkpoint_problems(config, described))
    tokenizer = open_tokenizer(model, described, faults, field=POLICY)
    scorer = _open_reward_model(config, tokenizer, faults) if config.reward.reward_model.enable else None
    teachers = _open_teachers(config, described, tokenizer, faults) if config.distillation.enabled else {}
    require_stops(tokenizer, config.actor_rollout_ref.rollout, faults, section=ROLLOUT)
    train = val = None
    if not config.trainer.val_only:
        most, key = data.train_max_samples, "data.train_files"
        train = open_prompts(data, data.train_files, tokenizer, faults, key=key, max_samples=most)
    if data.val_files:
        most, key = data.val_max_samples, "data.val_files"
        val = open_prompts(data, data.val_files, tokenizer, faults, key=key, max_samples=most)
    readers = [
        Reader("the model", described, [train, val]),
        Reader("the critic", critic, [train]),
        Reader("the reward model", scorer, [train, val]),
        *(
            Reader(f"teacher {name}", teacher, [train], partial(_is_teacher_of, name, teachers))
            for name, teacher in teachers.items()
        ),
    ]
    faults.passes(lambda: require_context(readers, data.max_response_length))
    datasets = [dataset for dataset in (train, val) if dataset is not None]
    if tokenizer is None or len(datasets) < (not config.trainer.val_only) + bool(data.val_files):
        return None
    return RunPrompts(train, val, tokenizer)


def _require_routers(config: PPOConfig, described: PreTrainedConfig, faults: Faults) -> None:
    """Checks that router replay has routers that the actor's engine can replay. The worker checks models with
    their own code; models that Megatron-Core cannot train are reported elsewhere."""
    actor, model = config.actor_rollout_ref.actor, config.actor_rollout_ref.model
    if actor.router_replay.mode == "disabled":
        return
    if actor.strategy == "megatron":
        shape = Faults().result(partial(Architecture.of, described, field=POLICY, path=model.path))
        has_routers = shape is None or shape.mixture is not None
    else:
        empty = Faults().result(partial(require_model, model, described, head="policy", field=POLICY))
        has_routers = empty is None or HFRouters(empty.hf).experts > 0
    faults.add(replay_problems(actor, has_routers=has_routers))


def _open_critic(config: PPOConfig, faults: Faults) -> PreTrainedConfig | None:
    """Opens the critic. Its directory defaults to the policy's, whose errors are not reported twice."""
    known = {(str(problem.value), problem.rule) for problem in faults.problems}
    critics = Faults()
    from_files = reads_critic_files(config)
    described = open_trained_model(
        critic_model(config), critics, head="value", field=CRITIC, weights=from_files
    )
    faults.add([problem for problem in critics.problems if (str(problem.value), problem.rule) not in known])
    return described


def _open_reward_model(
    config: PPOConfig, tokenizer: PreTrainedTokenizerBase | None, faults: Faults
) -> PreTrainedConfig | None:
    """Opens the reward model: it needs a trained value head and the policy's tokenizer."""
    model, key = reward_model(config), f"{REWARD_MODEL}_path"
    described, found = _open_companion(model, tokenizer, head="value", field=REWARD_MODEL)
    is_fine = described is not None and not found.problems
    if is_fine and lacks_tensor(require_path(model, REWARD_MODEL), SCORE):
        rule = f"has no {SCORE}: its scores would come from an untrained head"
        found.add([Problem(key, model.path, rule, "train one with python -m hydraflow.main_rm")])
    _rename(found, REWARD_MODEL, key, faults)
    return described


def _open_teachers(
    config: PPOConfig,
    policy: PreTrainedConfig | None,
    tokenizer: PreTrainedTokenizerBase | None,
    faults: Faults,
) -> dict[str, PreTrainedConfig | None]:
    """Opens the teachers, by data source. A teacher reads the policy's tokens, including those that pad the
    policy's vocabulary beyond the tokenizer's."""
    opened = {}
    for source in config.distillation.teachers:
        key = f"{TEACHERS}.{source}"
        model = teacher_model(config, source)
        described, found = _open_companion(model, tokenizer, head="policy", field=key)
        if described is not None and policy is not None:
            given, sampled = vocabulary_of(described), vocabulary_of(policy)
            if given < sampled:
                rule = f"has {given} tokens, and the policy may sample one of {sampled}"
                found.add([Problem(f"{key}.path", model.path, rule, "a teacher with at least as many")])
        _rename(found, key, key, faults)
        opened[source] = described
    return opened


def _is_teacher_of(name: str, teachers: Collection[str], source: str | None) -> bool:
    return source is not None and teacher_of(source, teachers) == name


def require_teachers(config: PPOConfig, plan: BatchPlan, prompts: RunPrompts) -> None:
    """Raises ConfigError for data sources without a teacher, and for log-probabilities of a whole vocabulary
    that would take too much memory."""
    teachers = config.distillation.teachers
    if prompts.train is None or not config.distillation.enabled:
        return
    loss = config.distillation.distillation_loss
    if loss.over_vocabulary and loss.most_tokens is None:
        vocabulary = vocabulary_of(load_config(config.actor_rollout_ref.model, field=POLICY))
        rows = -(-plan.trajectories_per_step // plan.layouts["actor"].data_ranks)
        needed = rows * config.data.max_response_length * vocabulary * BYTES_PER_TARGET
        if needed > WHOLE_VOCABULARY_BYTES:
            of = f"{rows} trajectories of up to {config.data.max_response_length} tokens in each process"
            rule = f"holds {vocabulary} log-probabilities for each token, {needed / 2**30:.1f} GiB for {of}"
            remedy = f"{LOSS}.loss_mode={loss.loss_mode}{TOPK}"
            limit = f"; at most {WHOLE_VOCABULARY_BYTES // 2**30} GiB are allowed"
            raise ConfigError.one(f"{LOSS}.loss_mode", loss.loss_mode, rule + limit, remedy)
    alone = [source for source in prompts.train.data_sources() if teacher_of(source, teachers) is None]
    if alone:
        rule = f"there is no teacher for data source {', '.join(sorted(alone))}"
        raise ConfigError.one(TEACHERS, ", ".join(teachers), rule, f"+{TEACHERS}.default=path")


def _open_companion(
    model: ModelConfig, tokenizer: PreTrainedTokenizerBase | None, *, head: str, field: str
) -> tuple[PreTrainedConfig | None, Faults]:
    """Opens a frozen model that reads the policy's tokens; its faults name `field` and `.path`."""
    found = Faults()
    described = open_model(model, found, head=head, field=field)
    theirs = open_tokenizer(model, described, found, field=field) if described is not None else None
    if theirs and tokenizer and theirs.get_vocab() != tokenizer.get_vocab():
        rule = "its tokenizer differs from the policy's, whose tokens it would read"
        found.add([Problem(f"{field}.path", model.path, rule, "a model of the policy's family")])
    return described, found


def _rename(found: Faults, field: str, key: str, faults: Faults) -> None:
    """Adds the faults in `found`, under `key` instead of the path of the model section `field`."""
    for one in found.problems:
        named, remedy = (text.replace(f"{field}.path", key) for text in (one.field, one.remedy))
        faults.add([replace(one, field=named, remedy=remedy)])
