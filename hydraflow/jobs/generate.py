"""Prompts in, Parquet with responses out: no training, no scoring."""

from __future__ import annotations

from pathlib import Path

import pyarrow
import pyarrow.parquet

from hydraflow.data.prompts import PromptDataset
from hydraflow.dispatch.worker import RoleSpec
from hydraflow.errors import ConfigError
from hydraflow.models.loading import load_config, load_tokenizer
from hydraflow.protocol.ragged import rows
from hydraflow.schema import GenerateConfig
from hydraflow.trainer.machine import TRAIN, Machine, open_runtime, resolve_machine, training_pool
from hydraflow.trainer.ppo import sample
from hydraflow.workers.rollout import RolloutSpec, RolloutWorker, SampleOrder


def run_generate(config: GenerateConfig) -> None:
    """Writes the input's rows with a column `responses`, a list of `rollout.n` texts."""
    target = writable(config.output.path)
    machine = resolve_machine(config.trainer)
    load_config(config.model, field="model")
    tokenizer = load_tokenizer(config.model, field="model")
    dataset = PromptDataset(config.data, config.data.path, tokenizer, key="data.path", max_samples=config.data.max_samples, scored=False)
    responses = [row.tolist() for row in _sample_all(config, machine, dataset)]
    texts = tokenizer.batch_decode(responses, skip_special_tokens=True)
    n = config.rollout.n
    table = [{**record.values, "responses": texts[i * n : (i + 1) * n]} for i, record in enumerate(dataset.records)]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(table), target)
    print(f"{len(table)} prompts, {n} responses each: {target}")


def _sample_all(config: GenerateConfig, machine: Machine, dataset: PromptDataset) -> list:
    rollout = config.rollout
    spec = RolloutSpec(config.model, rollout, max_tokens=config.data.max_response_length, seed=config.trainer.seed)
    runtime = open_runtime(config.trainer, config.ray_init, machine, [training_pool(machine)])
    try:
        group = runtime.group(TRAIN, {"rollout": RoleSpec(RolloutWorker, (spec,))})
        runtime.await_ready()
        role = group.role("rollout")
        role.call(RolloutWorker.load_weights)
        order = SampleOrder(0, rollout.n, rollout.temperature, rollout.top_k, rollout.top_p)
        sampled = sample(role, dataset.batch(range(len(dataset))), order)
        return rows(runtime.fetch(sampled.select(["responses"])).get("responses"))
    finally:
        runtime.stop()


def writable(path: str | None) -> Path:
    """The file to write to. Raises ConfigError when none is named or it cannot be written."""
    if not path:
        raise ConfigError.one("output.path", None, "no file is named for the responses", "output.path=responses.parquet")
    target = Path(path).expanduser()
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with target.open("ab"):
            pass
    except OSError as error:
        raise ConfigError.one("output.path", path, f"cannot be written ({error.strerror})", "output.path=<a file you may write>") from error
    return target
