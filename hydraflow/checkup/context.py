"""What the checks look at: the configuration and everything that follows from it, opened once, on first
use.

In: a configuration, and what the caller has opened already. Out: plan, machine, model, tokenizer, sample
rows. What cannot be opened is reported by the first check that asks (`ConfigError`); later ones are skipped
(`CheckSkipped`). Left out on purpose: judging; each topic's file does that.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, cast

from hydraflow.batch_plan.resolve import BatchPlan, resolve_plan
from hydraflow.checkup import sampling
from hydraflow.checkup.finding import CheckSkipped
from hydraflow.data.arithmetic import prompt_rows, split_problems
from hydraflow.data.files import FileRecord, as_paths
from hydraflow.device import CPU_PROCESSES, gpu_count, resolve_device
from hydraflow.errors import ConfigError, Problem
from hydraflow.memory.shape import ModelShape, read_shape
from hydraflow.models.cache import cached_snapshot
from hydraflow.models.config import ModelConfig
from hydraflow.models.loading import load_config, load_tokenizer
from hydraflow.recipes import arithmetic
from hydraflow.schema import PPOConfig
from hydraflow.system.paths import is_hub_name
from hydraflow.trainer.config import ClusterConfig
from hydraflow.trainer.machine import Machine, resolve_machine

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedTokenizerBase

T = TypeVar("T")
MODEL, CRITIC = "actor_rollout_ref.model", "critic.model"
FILE_KEYS = ("data.train_files", "data.val_files")
RECIPE_MAKES = "recipe={} makes its own when it first runs"


class CheckContext:
    """One configuration on this machine. `everything`: also check what the configuration does not need
    (`--all`).

    `asked` is the configuration as it was given; `config` names the files that a recipe has made so far, and
    has no `cluster.*`, because this machine is checked. `opened` holds what the caller already has, by the
    names of the properties here: plan, machine, tokenizer, first_rows; None: not available, which the caller
    reports.
    """

    def __init__(
        self,
        config: PPOConfig,
        *,
        origins: Mapping[str, str] | None = None,
        notes: Sequence[str] = (),
        unsupported: Sequence[Problem] = (),
        everything: bool = False,
        opened: Mapping[str, Any] | None = None,
    ):
        self.asked = config
        self.config = replace(arithmetic.with_made_assets(config), cluster=ClusterConfig())
        self.origins = origins
        self.notes, self.unsupported = tuple(notes), tuple(unsupported)
        self.everything = everything
        self._opened = {name: found for name, found in (opened or {}).items() if found is not None}
        self._broken = set(opened or ()) - set(self._opened)

    @property
    def device_type(self) -> str:
        """cpu or cuda."""
        return resolve_device(self.config.trainer.device)

    @property
    def machine(self) -> Machine:
        """Processes and threads on this machine."""
        return self._once("machine", lambda: resolve_machine(self.config.trainer))

    @property
    def plan(self) -> BatchPlan:
        """The batch plan of this configuration."""
        return self._once("plan", self._resolve)

    @property
    def shape(self) -> ModelShape:
        """The shape of the policy's model."""
        return self._once("shape", lambda: _shape(self.own_model(), MODEL))

    @property
    def critic_shape(self) -> ModelShape | None:
        """The shape of a critic that starts from its own model; None: the policy's."""
        if not self.config.critic.model.path:
            return None
        return self._once("critic_shape", lambda: _shape(self.config.critic.model, CRITIC))

    @property
    def model_config(self) -> PreTrainedConfig:
        """The policy's config.json with the user's overrides."""
        return self._once("model_config", lambda: load_config(self.own_model(), field=MODEL))

    @property
    def tokenizer(self) -> PreTrainedTokenizerBase:
        """The policy's tokenizer, with or without a chat template."""
        if not self.config.actor_rollout_ref.model.tokenizer_path:
            _ = self.model_config  # reports a broken config.json, which would break the tokenizer, too
        return self._once("tokenizer", lambda: load_tokenizer(self.own_model(), field=MODEL, chat=False))

    @property
    def first_rows(self) -> list[FileRecord]:
        """Three rows of the run's data, or of the data that a recipe will make when it first runs."""
        key = self.main_key
        return self._once("first_rows", lambda: self.sample(key, 3) if key else _recipe_rows(self.config))

    @property
    def main_key(self) -> str | None:
        """The key of the files that the run reads first; None: there are none, or a recipe will make them."""
        data = self.config.data
        if self.config.trainer.val_only and data.val_files:
            return FILE_KEYS[1]
        return FILE_KEYS[0] if data.train_files else None

    def own_model(self) -> ModelConfig:
        """The policy's model, its hub name replaced by its path in the cache. CheckSkipped if it is not
        on this machine yet."""
        model = self.config.actor_rollout_ref.model
        if not model.path:
            raise CheckSkipped(self.nothing_yet())
        if not is_hub_name(model.path):
            return model
        snapshot = cached_snapshot(model.path)
        if snapshot is None:
            raise CheckSkipped(f"{model.path} is not on this machine yet")
        return replace(model, path=str(snapshot))

    def files(self, key: str) -> list[Path]:
        """The files under a key of `FILE_KEYS`; empty when it names none. ConfigError for missing ones."""
        named = {FILE_KEYS[0]: self.config.data.train_files, FILE_KEYS[1]: self.config.data.val_files}[key]
        return self._once(key, lambda: as_paths(named, key)) if named else []

    def sample(self, key: str, count: int) -> list[FileRecord]:
        """About `count` rows, spread over the files under `key`."""
        files = self.files(key)
        each = -(-count // max(1, len(files)))
        read = partial(sampling.sample, key=key, count=each)
        rows = [record for path in files for record in self._once(f"{path} {each}", partial(read, path))]
        return rows[:count]

    def nothing_yet(self) -> str:
        """Why there is no model or data to check."""
        name = self.config.recipe.name
        return RECIPE_MAKES.format(name) if name != "none" else "none is configured"

    def _resolve(self) -> BatchPlan:
        devices = CPU_PROCESSES if self.device_type == "cpu" else gpu_count()
        prompts = self._prompts()
        return resolve_plan(self.config, prompts=prompts, devices_per_node=devices, origins=self.origins)

    def _prompts(self) -> int | None:
        """Number of training prompts; None: not known. Another check reports what is wrong with the files."""
        files, limit = self.config.data.train_files, self.config.data.train_max_samples
        if not files:
            return None
        try:
            rows = sum(sampling.look_at(path, FILE_KEYS[0]).rows for path in as_paths(files, FILE_KEYS[0]))
        except ConfigError:
            return None
        return rows if limit < 0 else min(rows, limit)

    def _once(self, name: str, make: Callable[[], T]) -> T:
        """The result of `make`, called once. If it failed, later requests raise CheckSkipped, because the
        error has been reported."""
        if name in self._broken:
            raise CheckSkipped(f"needs {name.partition(' ')[0]}, which is not available: see above")
        if name not in self._opened:
            try:
                self._opened[name] = make()
            except ConfigError:
                self._broken.add(name)
                raise
        return cast(T, self._opened[name])


def _shape(model: ModelConfig, field: str) -> ModelShape:
    """The model's shape. CheckSkipped if it is unknown: estimates need it, training does not."""
    try:
        shape = read_shape(model, field=field)
    except ConfigError as error:
        raise CheckSkipped(f"{error.problems[0].field}: {error.problems[0].rule}") from error
    if shape is None:
        raise CheckSkipped(f"the sizes of {field}.path are not on this machine")
    return shape


def _recipe_rows(config: PPOConfig) -> list[FileRecord]:
    recipe = config.recipe
    if recipe.name == "none":
        raise CheckSkipped("no data file is configured")
    pairs = split_problems(recipe.train_problems, recipe.val_problems, config.trainer.seed)[0][:3]
    rows, source = enumerate(prompt_rows(pairs, "train")), Path(f"recipe={recipe.name}")
    return [FileRecord(values, source, row) for row, values in rows]
