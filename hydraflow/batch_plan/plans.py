"""The reinforcement-learning plan, and its parts besides the trained roles: small classes that the running
code, the tables and the memory estimate read.
"""

from __future__ import annotations

from dataclasses import dataclass

from hydraflow.batch_plan.layout import Cluster, Layout
from hydraflow.batch_plan.parts import MicroPlan, Plan, Quantity, RolePlan


@dataclass(frozen=True)
class ValidationPlan:
    """Sampling of the held-out prompts."""

    prompts_per_call: int | None
    """Prompts in one call; None: all at once."""
    samples_per_prompt: int
    """Responses per prompt."""


@dataclass(frozen=True)
class RolloutPlan:
    """Sampling of a step's responses: engines, calls and limits."""

    replicas: int
    """Groups of devices that sample independently; each holds the model once per data-parallel rank."""
    engines: int
    """Data-parallel ranks of all replicas: each holds the model once and decodes its own sequences."""
    concurrent_sequences: int
    """Sequences that are decoded at the same time, over all engines."""
    prompts_per_call: int
    """Prompts that are sampled in one call."""
    trajectories_per_engine: int
    """Largest number of trajectories that an engine gets in one call."""
    waves: int
    """Smallest number of times that an engine fills all of its sequences in one call."""
    max_model_len: int
    """Tokens of the longest row that an engine prepares for."""
    max_num_batched_tokens: int
    """Tokens that one engine processes in one forward."""


@dataclass(frozen=True)
class AgentPlan:
    """How agent workers share conversations with tools."""

    workers: int
    trajectories_per_worker: int
    """Largest number of trajectories of a step that one worker runs."""


@dataclass(frozen=True)
class FilterPlan:
    """How many prompts dynamic sampling takes for one step."""

    prompts_per_call: int
    """Prompts that are sampled at a time."""
    least_prompts: int
    """Prompts of a step in which every group is kept, in whole calls."""
    most_prompts: int | None
    """Prompts after which a step gives up; None: never."""


@dataclass(frozen=True)
class AsyncPlan:
    """How far sampling may run ahead of training."""

    rounds_per_sync: int
    """P: rounds of training between two weight updates of the rollout."""
    mini_batches_per_round: int
    """R: mini-batches that are gathered before a round starts."""
    prompts_per_round: int
    """R·M."""
    prompts_in_flight: int
    """⌊(1 + staleness)·P·R·M⌋: prompts that may be sampled between two weight updates, those from older
    weights included."""
    trajectories_in_flight: int
    """The same in trajectories."""
    stale_trajectories: int
    """How many of these may come from older weights."""


@dataclass(frozen=True)
class BatchPlan(Plan):
    """Every number that the running code takes from the batch-size keys."""

    prompts_per_step: int
    samples_per_prompt: int
    trajectories_per_step: int
    rollout_devices: int
    """Devices that sample."""
    actor: RolePlan
    critic: RolePlan | None
    old_log_prob: MicroPlan
    ref: MicroPlan | None
    values: MicroPlan | None
    reward_model: MicroPlan | None
    rollout: RolloutPlan
    agent: AgentPlan
    validation: ValidationPlan
    filter: FilterPlan | None
    """None: every sampled prompt is trained on."""
    asynchronous: AsyncPlan | None
    """None: sampling and training take turns."""
    cluster: Cluster
    layouts: dict[str, Layout]
    """By role: actor, critic, ref, rollout, reward_model; those that run and have weights of their own."""
    placement: str
    """colocated, disaggregated, overlapping or partial."""
    steps_per_epoch: int
    """Whole batches in one pass over the prompts; 0: the number of prompts is not known."""
    total_steps: int
    """Training steps of the run; 0: not known."""
    quantities: tuple[Quantity, ...]
    """The same numbers for the table: unit, formula, origin."""
    notes: tuple[str, ...]
    """Notes to print: numbers that yielded to others, prompts that no step uses."""
