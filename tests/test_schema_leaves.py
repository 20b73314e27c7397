"""No dead options: every key of every command is read by something that this command gets to."""

from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from typing import get_type_hints

import config_reads
import pytest

from hydraflow import schema
from hydraflow.algorithms.config import (
    ESTIMATORS,
    POLICY_LOSSES,
    PREFERENCE_LOSSES,
    AlgorithmConfig,
    PolicyLossConfig,
    PreferenceConfig,
)
from hydraflow.algorithms.distillation.config import DIVERGENCES, DistillationLossConfig
from hydraflow.engine.config import TRAIN_ENGINES, FSDPConfig, OptimConfig
from hydraflow.generation.config import GENERATION_ENGINES
from hydraflow.models.config import ModelConfig, ModelSourceConfig
from hydraflow.options import option_of
from hydraflow.trainer.config import ClusterConfig, TrainerConfig
from hydraflow.workers.config import ActorConfig

RUNS = {
    schema.PPOConfig: "hydraflow.main_ppo.run",
    schema.SFTConfig: "hydraflow.main_sft.run",
    schema.DPOConfig: "hydraflow.main_sft.run",
    schema.RMConfig: "hydraflow.main_sft.run",
    schema.GenerateConfig: "hydraflow.main_generate.run",
    schema.EvalConfig: "hydraflow.main_eval.run",
}
"""Configuration -> what the command does with it."""

LAUNCH = "hydraflow.compose.launch.launch"
"""What every command does before."""
REFUSES = "hydraflow.compose.judges.judge"
"""What names the keys that can be planned and not run yet."""
PLANNERS = ("hydraflow.plan.main", "hydraflow.doctor.run")
"""Commands that take the configuration of main_ppo and run nothing."""
PLANNED = "cluster."
"""Keys that only those read; a run says so."""
READ_BY_PLANNED_ENGINES = {
    name
    for engines in (TRAIN_ENGINES, GENERATION_ENGINES)
    for engine in engines.values()
    if engine.planned
    for name in engine.reads
}
"""Sections and keys of engines that a run refuses."""


def leaves(kind: type, prefix: str = "") -> Iterator[tuple[str, type, str]]:
    """(key, class, field) of every field that is not a dataclass itself."""
    types = get_type_hints(kind)
    for field in fields(kind):
        if is_dataclass(section := types[field.name]):
            yield from leaves(section, f"{prefix}{field.name}.")
        else:
            yield f"{prefix}{field.name}", kind, field.name


ALL_LEAVES = [(config, *leaf) for config in RUNS for leaf in leaves(config)]


READ_BY_NAME = {
    schema.PPOConfig: {
        (kind, field.name)
        for kind in (ActorConfig, PolicyLossConfig)
        for field in fields(kind)
        for loss in POLICY_LOSSES.values()
        if field.name in loss.all_reads
        or any(
            option_of(other).follows == field.name for other in fields(kind) if other.name in loss.all_reads
        )
    }
    | {(AlgorithmConfig, name) for estimator in ESTIMATORS.values() for name in estimator.reads}
    | {(DistillationLossConfig, name) for loss in DIVERGENCES.values() for name in loss.reads},
    schema.DPOConfig: {
        (PreferenceConfig, name) for loss in PREFERENCE_LOSSES.values() for name in loss.reads
    },
}
"""Configuration -> what `Implementation.bound` hands to the chosen functions of its command."""


def is_read(run: str, kind: type, field: str) -> bool:
    """Whether `run` gets to code that reads the field from this class or, knowing less, from one of its
    bases, and makes more of it than an estimate."""
    if any(run == RUNS[config] and (kind, field) in bound for config, bound in READ_BY_NAME.items()):
        return True
    ignored = (*config_reads.LOOKERS, *config_reads.ESTIMATES)
    reads = config_reads.reads_below(run, ignored) | config_reads.reads_below(LAUNCH, ignored)
    return not reads.isdisjoint(owned(kind, field))


def owned(kind: type, field: str) -> list[tuple[str, str]]:
    """The field as one of the class and of each of its bases."""
    return [(f"{base.__module__}.{base.__qualname__}", field) for base in kind.__mro__]


def is_planned(key: str, kind: type, field: str) -> bool:
    """Whether plan or doctor reads the field, and a run that is given it says what it cannot do with it."""
    planned = [(one.name, rule) for one in fields(kind) for rule in option_of(one).planned]
    if any(f"{{{field}}}" in rule.what for _, rule in planned):
        return True
    refused = (
        any(name == field for name, _ in planned)
        or is_read(REFUSES, kind, field)
        or key.startswith(PLANNED)
        or not READ_BY_PLANNED_ENGINES.isdisjoint(key.split("."))
    )
    reads = set().union(*(config_reads.reads_below(planner) for planner in PLANNERS))
    return refused and not reads.isdisjoint(owned(kind, field))


def test_every_leaf_is_read() -> None:
    unread = [
        f"{RUNS[config]} gets to nothing that reads {key}: remove it, or do what it says"
        for config, key, kind, field in ALL_LEAVES
        if not (config is schema.PPOConfig and is_planned(key, kind, field))
        and not is_read(RUNS[config], kind, field)
    ]
    assert unread == []


def test_every_command_is_looked_at() -> None:
    assert {
        kind
        for name, kind in vars(schema).items()
        if name.endswith("Config") and (kind.__doc__ or "").startswith("python -m")
    } == set(RUNS)
    keys = {(config, key) for config, key, _, _ in ALL_LEAVES}
    assert (schema.PPOConfig, "actor_rollout_ref.actor.optim.lr") in keys
    assert (schema.PPOConfig, "trainer.seed") in keys  # declared two classes up
    assert not any(key.endswith("optim") for _, key in keys)


@pytest.mark.parametrize(
    "field",
    sorted(
        {field.name for field in fields(ModelConfig)} - {field.name for field in fields(ModelSourceConfig)}
    ),
)
def test_an_option_that_only_another_command_reads_is_seen(field: str) -> None:
    assert is_read(RUNS[schema.PPOConfig], ModelConfig, field)
    assert not is_read(RUNS[schema.GenerateConfig], ModelConfig, field)


@pytest.mark.parametrize(
    ("kind", "field"),
    [
        (TrainerConfig, "total_steps"),  # the plan has one
        (OptimConfig, "seed"),  # the trainer's section has one
        (ModelConfig, "name"),  # many have one
    ],
)
def test_a_field_is_not_read_because_another_class_has_one_of_that_name(kind: type, field: str) -> None:
    assert not is_read(RUNS[schema.PPOConfig], kind, field)


@pytest.mark.parametrize(
    ("kind", "field"), [(ClusterConfig, "device_memory_gib"), (ClusterConfig, "host_memory_gib")]
)
def test_an_estimate_alone_makes_nothing_of_an_option(kind: type, field: str) -> None:
    assert not is_read(RUNS[schema.PPOConfig], kind, field)
    assert is_read(RUNS[schema.PPOConfig], FSDPConfig, "param_offload")
    assert is_read(RUNS[schema.PPOConfig], FSDPConfig, "offload_policy")
