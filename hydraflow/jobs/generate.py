"""Prompts in, Parquet with responses out: no training, no scoring."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import pyarrow
import pyarrow.parquet

from hydraflow.batch_plan.generate import GeneratePlan, resolve_generate_plan
from hydraflow.compose.debugging import applied
from hydraflow.data.files import FileRecord
from hydraflow.data.loader import PromptLoader
from hydraflow.data.prompts import PromptDataset
from hydraflow.dispatch.observability import Observability
from hydraflow.dispatch.timeline import TIMELINE
from hydraflow.dispatch.worker import RoleSpec
from hydraflow.errors import ConfigError, EnvironmentFault, Faults, after_the_start
from hydraflow.jobs.inputs import (
    Reader,
    open_model,
    open_prompts,
    open_tokenizer,
    require_context,
    require_stops,
)
from hydraflow.jobs.output import output_file, require_output
from hydraflow.protocol.ragged import rows
from hydraflow.schema import GenerateConfig
from hydraflow.system.logging_setup import set_up_logging
from hydraflow.system.paths import PARQUET_ENDING, require_writable
from hydraflow.trainer.machine import (
    TRAIN,
    Machine,
    open_runtime,
    require_room,
    resolve_machine,
    training_pool,
)
from hydraflow.trainer.source import Lockstep, Sampler
from hydraflow.trainer.weight_links import load_model_directory
from hydraflow.workers.rollout import RolloutSpec, RolloutWorker, SamplingSpec

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

logger = logging.getLogger(__name__)

RESPONSES = "responses"
"""The column that is added."""
ENDING = ".parquet"


def run_generate(config: GenerateConfig) -> None:
    """Writes the input's rows with a column `responses`, a list of `rollout.n` texts."""
    set_up_logging()
    config = applied(config)
    inputs = _checked(config)
    assert config.output.path is not None, "`compose/rules.py` requires it"
    with output_file(config.output.path, ending=ENDING) as unfinished:
        _write(inputs.table, unfinished)  # fail before the sampling, not after it
        n, decode = inputs.plan.samples_per_prompt, inputs.tokenizer.batch_decode
        responses = [decode(of_prompt, skip_special_tokens=True) for of_prompt in _sample_all(config, inputs)]
        column = pyarrow.array(responses, pyarrow.list_(pyarrow.string()))
        _write(inputs.table.append_column(RESPONSES, column), unfinished)
    print(f"{len(responses)} prompts, {n} {'response' if n == 1 else 'responses'} each: {config.output.path}")


@dataclass(frozen=True)
class GenerateInputs:
    """What sampling needs, opened and checked."""

    machine: Machine
    tokenizer: PreTrainedTokenizerBase
    prompts: PromptDataset
    plan: GeneratePlan
    table: pyarrow.Table
    """The input's rows."""


def _checked(config: GenerateConfig) -> GenerateInputs:
    """Opens all inputs and makes the plan. Raises one ConfigError that lists everything missing or
    inconsistent."""
    faults, data, output = Faults(), config.data, str(config.output.path)
    faults.passes(lambda: require_writable(config.ray_init.timeline_file, TIMELINE))
    faults.passes(lambda: require_output(output, ending=ENDING))
    machine = faults.result(lambda: resolve_machine(config.trainer))
    if machine is not None:
        faults.passes(lambda: require_room(config.trainer, config.ray_init, [training_pool(machine)]))
    described = open_model(config.model, faults, head="policy", field="model")
    tokenizer = open_tokenizer(config.model, described, faults, field="model")
    require_stops(tokenizer, config.rollout, faults, section="rollout")
    prompts = open_prompts(data, data.path, tokenizer, faults, key="data.path", max_samples=data.max_samples)
    reader = Reader("the model", described, [prompts])
    faults.passes(lambda: require_context([reader], data.max_response_length))
    table = faults.result(lambda: input_table(prompts.records)) if prompts is not None else None
    plan = None
    if machine is not None:
        rows, per_node = len(prompts) if prompts is not None else None, machine.processes_per_node
        plan = faults.result(lambda: resolve_generate_plan(config, prompts=rows, devices_per_node=per_node))
    faults.require_none()
    assert machine and tokenizer and prompts and plan and table is not None, (
        "whatever could not be opened is a fault"
    )
    return GenerateInputs(machine, tokenizer, prompts, plan, table)


def input_table(records: Sequence[FileRecord]) -> pyarrow.Table:
    """The columns of the rows, except `responses`. Raises ConfigError for one that Parquet cannot hold.

    Rows of JSONL files may have different columns; missing values are null. Columns of Parquet files keep
    their types if all files agree on them.
    """
    names = dict.fromkeys(name for record in records for name in record.values if name != RESPONSES)
    columns = {name: [record.values.get(name) for record in records] for name in names}
    types = _types(records)
    return pyarrow.table({name: _column(name, values, types.get(name)) for name, values in columns.items()})


def _types(records: Sequence[FileRecord]) -> dict[str, pyarrow.DataType]:
    """Types of columns, from the files; empty if one of them is not Parquet."""
    files = dict.fromkeys(record.file for record in records)
    if any(file.suffix != PARQUET_ENDING for file in files):
        return {}
    found: dict[str, list[pyarrow.DataType]] = {}
    for file in files:
        for field in pyarrow.parquet.read_schema(file):
            found.setdefault(field.name, []).append(field.type)
    return {name: types[0] for name, types in found.items() if all(one == types[0] for one in types)}


def _column(name: str, values: list, kind: pyarrow.DataType | None) -> pyarrow.Array:
    try:
        name.encode()
        if kind is not None:
            return pyarrow.array(values, kind)
        if all(value is None or value == {} for value in values):
            return pyarrow.nulls(len(values))  # Parquet has no structures without fields
        return pyarrow.array(values)
    except UnicodeEncodeError as error:
        rule = f"column {name} has text that is not Unicode: {error}"
        remedy = "text.encode('utf-8', 'replace').decode() before it is written"
        raise ConfigError.one("data.path", None, rule, remedy) from error
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


def _sample_all(config: GenerateConfig, inputs: GenerateInputs) -> list[list[list[int]]]:
    """For each prompt the token ids of its responses."""
    spec = RolloutSpec(
        config.model,
        config.rollout,
        max_prompt=config.data.max_prompt_length,
        max_tokens=config.data.max_response_length,
        seed=config.trainer.seed,
        section="rollout",
        start_seconds=config.trainer.start_timeout,
    )
    pool, observability = training_pool(inputs.machine), Observability(debug=config.debug)
    runtime = open_runtime(config.trainer, config.ray_init, inputs.machine, [pool], observability)
    try:
        with after_the_start():
            role = runtime.group(TRAIN, {"rollout": RoleSpec(RolloutWorker, (spec,))}).role("rollout")
            runtime.await_ready()
        load_model_directory(role, config.rollout.max_retries)
        plan, prompts = inputs.plan, inputs.prompts
        how = SamplingSpec.of_training(config.rollout, plan.samples_per_prompt)
        loader = PromptLoader(prompts, plan.prompts_per_call, shuffle=False, seed=0, drop_last=False)
        source = Lockstep(loader, Sampler(role, None, how), visit=0)
        found: list[list[list[int]]] = [[] for _ in range(len(prompts))]
        for call in range(1, len(loader) + 1):
            taken = runtime.fetch(source.take(call).rows, ["responses", "group"])
            first = (call - 1) * plan.prompts_per_call
            for group, response in zip(
                taken.get("group").tolist(), rows(taken.get("responses")), strict=True
            ):
                found[first + group].append(response.tolist())
            if len(loader) > 1:
                logger.info("%d of %d prompts", min(call * plan.prompts_per_call, len(prompts)), len(prompts))
        return found
    finally:
        runtime.stop()
