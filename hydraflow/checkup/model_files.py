"""A model directory, file by file: configuration, weights listed in the index, tokenizer, lengths.

In: the models that the configuration names, and checkpoints that roles start from. Out: findings. Only the
headers of weight files are read, so that a missing, truncated or never downloaded shard is found within
milliseconds instead of after minutes of loading.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from hydraflow.batch_plan.roles import (
    PATH,
    dist_checkpoints,
    megatron_sections,
    missing_checkpoints,
    reads_critic_files,
    reads_policy_files,
)
from hydraflow.batch_plan.stages import require_layers
from hydraflow.checkup.context import CRITIC, MODEL, CheckContext
from hydraflow.checkup.finding import CheckSkipped, Finding, note, of_problem, ok, problem, warning
from hydraflow.device import resolve_dtype
from hydraflow.engine.fsdp.lora import require_targets
from hydraflow.engine.megatron import core_arguments, ddp_config
from hydraflow.engine.megatron.architecture import Architecture
from hydraflow.engine.megatron.stored_weights import open_weights
from hydraflow.errors import ConfigError, Faults, Problem
from hydraflow.memory.report import size_text
from hydraflow.models.cache import cached_snapshot, hub_fault, is_offline
from hydraflow.models.config import ModelConfig
from hydraflow.models.fit import DOWNLOAD_AGAIN, require_weights
from hydraflow.models.loading import Context, context_of, load_config
from hydraflow.models.weight_files import SHOWN, stored_types, weight_faults, weight_files
from hydraflow.schema import PPOConfig
from hydraflow.system.paths import expanded, is_hub_name, model_problems
from hydraflow.trainer.roles import critic_model

if TYPE_CHECKING:
    from transformers import PreTrainedConfig


def check_model(context: CheckContext) -> Iterator[Finding]:
    """The policy's directory, and the critic's if it has its own."""
    policy = context.config.actor_rollout_ref.model
    if not policy.path:
        raise CheckSkipped(context.nothing_yet())
    yield from _check_directory(policy, MODEL, weights=reads_policy_files(context.config))
    if context.config.critic.model.path and context.plan.critic is not None:
        weights = reads_critic_files(context.config)
        yield from _check_directory(context.config.critic.model, CRITIC, weights=weights)
    yield from map(of_problem, missing_checkpoints(context.config))


def _check_directory(model: ModelConfig, field: str, *, weights: bool) -> Iterator[Finding]:
    assert model.path is not None
    if wrong := model_problems(model.path, f"{field}.path"):
        yield from map(of_problem, wrong)
        return
    hub = is_hub_name(model.path)
    directory = cached_snapshot(model.path) if hub else expanded(model.path)
    if directory is None:
        yield to_download(f"{field}.path={model.path} is not on this machine", model.path, fault=hub_fault())
        return
    if not weights:
        yield ok(f"{directory}: only configuration and tokenizer are read")
        return
    faults = weight_faults(directory)
    for fault in faults[:SHOWN]:
        evidence = f"{field}.path: {fault}"
        missing = to_download(evidence, model.path, fault=hub_fault()) if hub else None
        yield missing or problem(evidence, DOWNLOAD_AGAIN)
    if not faults:
        files = weight_files(directory)
        size = size_text(sum(file.stat().st_size for file in files))
        yield ok(f"{directory}: {len(files)} weight files, {size}, {', '.join(stored_types(files))}")


def to_download(evidence: str, name: str, *, fault: str | None) -> Finding:
    """A model on the hub that is not in the cache: the run downloads it at its start, unless there is a
    `fault`."""
    if fault is None:
        return note(f"{evidence}; it will be downloaded at the start", f"hf download {name}")
    first = "unset HF_HUB_OFFLINE; " if is_offline() else ""
    remedy = f"{first}hf download {name} where the hub can be reached, or the path of a folder with the model"
    return problem(f"{evidence}, and {fault}", remedy)


def check_weights(context: CheckContext) -> Iterator[Finding]:
    """Names and shapes of the weights are those of the model that config.json describes."""
    config = context.config
    policy, critic = config.actor_rollout_ref.model, config.critic.model
    context.own_model()  # raises CheckSkipped if there is none yet
    on_hub = is_hub_name(str(policy.path))
    if on_hub and not dist_checkpoints(config):
        raise CheckSkipped("the weights are the hub's own")
    if reads_policy_files(config) and not on_hub:
        require_weights(policy, context.model_config, head="policy", field=MODEL)
    if policy.lora_rank > 0:
        require_targets(policy, context.model_config, head="policy", field=MODEL)
    reported = missing_checkpoints(config)
    found = dist_checkpoint_problems(config, context.model_config)
    if problems := [one for one in found if one not in reported]:
        raise ConfigError(problems)
    if critic.path and reads_critic_files(config):
        require_weights(critic, load_config(critic, field=CRITIC), head="value", field=CRITIC)
    yield ok("names and shapes are those of config.json")


def dist_checkpoint_problems(config: PPOConfig, policy: PreTrainedConfig) -> list[Problem]:
    """Problems of Megatron-Core checkpoints that do not hold the models of the roles that start from them.
    Reads indices, and weights only where an output matrix must equal the embeddings. Models that the engine
    does not build are reported elsewhere."""
    faults, own = Faults(), critic_model(config)
    for section, path in dist_checkpoints(config).items():
        is_critic = section == "critic"
        field, model = (CRITIC, own) if is_critic else (MODEL, config.actor_rollout_ref.model)
        described = Faults().result(partial(load_config, own, field=CRITIC)) if is_critic else policy
        shape = described and Faults().result(
            partial(Architecture.of, described, field=field, path=model.path)
        )
        if shape:
            where = {"key": f"{section}.{PATH}", "model": field, "model_path": str(model.path)}
            head = "value" if is_critic else "policy"
            faults.passes(partial(open_weights, path, shape, head=head, **where))
    return faults.problems


def check_model_fits(context: CheckContext) -> Iterator[Finding]:
    """Tokenizer and model agree on the vocabulary: a token beyond the model's table would end the run with an
    index error. Rows fit the model's positions."""
    data, config = context.config.data, context.model_config
    known, rows = len(context.tokenizer), config.get_text_config().vocab_size
    seen = f"the tokenizer has {known} tokens, the model {rows}"
    if known > rows:
        evidence = f"{seen}: the ids of the last {known - rows} would be out of range"
        yield problem(evidence, f"{MODEL}.tokenizer_path=<the model's own tokenizer>")
    else:
        yield ok(seen)
    if (most := context_of(config)) is not None:
        yield judge_context(data.max_prompt_length, data.max_response_length, most)


def check_megatron_model(context: CheckContext) -> Iterator[Finding]:
    """Models that Megatron-Core trains are supported and divide by the parallel sizes; overrides do not touch
    what the model or the engine determines, and give every stage layers. Reports the mistakes of all roles at
    once."""
    config, policy = context.config, context.config.actor_rollout_ref
    if not (sections := list(megatron_sections(config))):
        raise CheckSkipped("no role trains with it")
    faults = Faults()
    for section, settings in sections:
        field, model = (CRITIC, config.critic.model) if section == "critic" else (MODEL, policy.model)
        faults.passes(partial(ddp_config.require_free, settings, section=section))
        own = field == CRITIC and model.path
        found = load_config(model, field=CRITIC) if own else context.model_config
        path = model.path or policy.model.path
        shape = faults.result(partial(Architecture.of, found, field=field, path=path))
        if shape is None:
            continue
        dtype = resolve_dtype(settings.compute_dtype, context.device_type)
        faults.passes(partial(shape.require_divisible, settings, section=section))
        faults.passes(partial(core_arguments.require_free, shape, settings, dtype, section=section))
        faults.passes(partial(require_layers, shape.layers, settings, section=section))
    if policy.actor.strategy == "megatron" and config.distillation.enabled:
        for source, path in config.distillation.teachers.items():
            faults.add(list(_problems_of_teacher(config, f"distillation.teachers.{source}", str(path))))
    faults.require_none()
    yield ok(", ".join(f"{section}: supported and divisible" for section, _ in sections))


def _problems_of_teacher(config: PPOConfig, key: str, path: str) -> Iterator[Problem]:
    """Problems of a teacher, which has the actor's parallel sizes. `jobs/inputs.py` reports a directory that
    cannot be read."""
    described = Faults().result(partial(load_config, ModelConfig(path=path), field=key))
    if described is None:
        return
    policy, section, faults = config.actor_rollout_ref, "actor_rollout_ref.actor", Faults()
    overrides = policy.ref.megatron.override_transformer_config
    settings = replace(policy.actor.megatron, override_transformer_config=overrides)
    shape = faults.result(partial(Architecture.of, described, field=key, path=path))
    if shape is not None:
        faults.passes(partial(shape.require_divisible, settings, section=section))
        faults.passes(partial(require_layers, shape.layers, settings, section=section))
    for one in faults.problems:
        is_own = one.field == f"{key}.path"
        yield replace(one, field=key) if is_own else replace(one, rule=f"{one.rule} ({key}={path})")


def judge_context(prompt: int, response: int, context: Context) -> Finding:
    """Limits of prompt and response, in tokens, against the model's context."""
    if response >= context.tokens:
        evidence = f"data.max_response_length={response} leaves no room for a prompt in {context.limit}"
        return problem(evidence, f"data.max_response_length={context.tokens // 2}")
    if prompt + response > context.tokens:
        evidence = f"a row of {prompt} + {response} tokens would pass {context.limit}"
        shorter = f"data.max_response_length={max(1, context.tokens - prompt)}"
        return warning(evidence, f"data.max_prompt_length={context.tokens - response} or {shorter}")
    return ok(f"rows of {prompt} + {response} tokens in {context.limit}")
