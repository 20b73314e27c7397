"""Prompts in, Parquet with responses out: no training, no scoring."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from pathlib import Path

import pyarrow
import pyarrow.parquet

from hydraflow.batch_plan.generate import GeneratePlan, resolve_generate_plan
from hydraflow.data.files import Record
from hydraflow.data.prompts import PromptDataset
from hydraflow.debugging import applied
from hydraflow.dispatch.group import RoleGroup
from hydraflow.dispatch.runtime import Runtime
from hydraflow.dispatch.watch import Watch, require_writable
from hydraflow.dispatch.worker import RoleSpec
from hydraflow.errors import ConfigError, EnvironmentFault
from hydraflow.jobs.context import require_context
from hydraflow.jobs.output import output_file
from hydraflow.logging_setup import set_up_logging
from hydraflow.models.loading import load_config, load_tokenizer
from hydraflow.protocol.ragged import rows
from hydraflow.schema import GenerateConfig
from hydraflow.trainer.machine import TRAIN, Machine, open_runtime, resolve_machine, training_pool
from hydraflow.trainer.rollouts import sample
from hydraflow.workers.rollout import RolloutSpec, RolloutWorker, SampleOrder

logger = logging.getLogger(__name__)

RESPONSES = "responses"
"""The column that is added."""


def run_generate(config: GenerateConfig) -> None:
    """Writes the input's rows with a column `responses`, a list of `rollout.n` texts."""
    set_up_logging()
    require_writable(config.ray_init.timeline_file)
    config = applied(config)
    assert config.output.path is not None, "checks.py demands it"
    with output_file(config.output.path, ending=".parquet") as unfinished:
        machine = resolve_machine(config.trainer)
        model = load_config(config.model, field="model")
        tokenizer = load_tokenizer(config.model, field="model")
        data = config.data
        dataset = PromptDataset(data, data.path, tokenizer, key="data.path", max_samples=data.max_samples)
        require_context(dataset, data.max_response_length, model)
        plan = resolve_generate_plan(config, prompts=len(dataset), devices_per_node=machine.processes_per_node)
        table = input_table(dataset.records)
        _write(table, unfinished)  # what cannot be written is better found before the sampling than after it
        texts = tokenizer.batch_decode(_sample_all(config, plan, machine, dataset), skip_special_tokens=True)
        n = plan.samples_per_prompt
        responses = [texts[start : start + n] for start in range(0, len(texts), n)]
        _write(table.append_column(RESPONSES, pyarrow.array(responses, pyarrow.list_(pyarrow.string()))), unfinished)
    print(f"{len(responses)} prompts, {n} {'response' if n == 1 else 'responses'} each: {config.output.path}")


def input_table(records: Sequence[Record]) -> pyarrow.Table:
    """The rows' columns but for `responses`. Raises ConfigError for a column that Parquet cannot hold.

    Rows of JSONL files may differ in their columns; what a row lacks is null.
    """
    names = [name for name in dict.fromkeys(name for record in records for name in record.values) if name != RESPONSES]
    return pyarrow.table({name: _column(name, [record.values.get(name) for record in records]) for name in names})


def _column(name: str, values: list) -> pyarrow.Array:
    if all(value is None or value == {} for value in values):
        return pyarrow.nulls(len(values))  # Parquet has no structures without fields
    try:
        return pyarrow.array(values)
    except (pyarrow.ArrowException, OverflowError) as error:
        rule = f"column {name} cannot be written as Parquet: {error}"
        raise ConfigError.one("data.path", None, rule, "give its values one type in all rows") from error


def _write(table: pyarrow.Table, path: Path) -> None:
    try:
        pyarrow.parquet.write_table(table, path)
    except pyarrow.ArrowNotImplementedError as error:
        raise ConfigError.one("data.path", None, f"its rows cannot be written as Parquet: {error}") from error
    except OSError as error:
        raise EnvironmentFault(f"the responses cannot be written: {error}") from error


def _sample_all(config: GenerateConfig, plan: GeneratePlan, machine: Machine, dataset: PromptDataset) -> list[list[int]]:
    """Token ids of `rollout.n` responses for each prompt, prompt-major."""
    spec = RolloutSpec(config.model, config.rollout, max_tokens=config.data.max_response_length, seed=config.trainer.seed)
    runtime = open_runtime(config.trainer, config.ray_init, machine, [training_pool(machine)], Watch(debug=config.debug))
    try:
        role = runtime.group(TRAIN, {"rollout": RoleSpec(RolloutWorker, (spec,))}).role("rollout")
        runtime.await_ready()
        role.call(RolloutWorker.load_weights)
        return [ids for call in calls(len(dataset), plan.prompts_per_call) for ids in _sample(config, plan, runtime, role, dataset, call)]
    finally:
        runtime.stop()


def _sample(
    config: GenerateConfig, plan: GeneratePlan, runtime: Runtime, role: RoleGroup, dataset: PromptDataset, call: range
) -> list[list[int]]:
    rollout = config.rollout
    order = SampleOrder(0, plan.samples_per_prompt, rollout.temperature, rollout.top_k, rollout.top_p)
    sampled = sample(role, dataset.batch(call), order).get()
    responses = rows(runtime.fetch(sampled.select(["responses"])).get("responses"))
    if len(call) < len(dataset):
        logger.info("%d of %d prompts", call.stop, len(dataset))
    return [response.tolist() for response in responses]


def calls(prompts: int, per_call: int) -> Iterator[range]:
    """Numbers of the prompts that are sampled together.

    >>> list(calls(5, 2))
    [range(0, 2), range(2, 4), range(4, 5)]
    """
    for start in range(0, prompts, per_call):
        yield range(start, min(start + per_call, prompts))
