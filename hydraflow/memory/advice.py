"""Suggests settings to change if a run does not fit: each change is tried on the estimate and ranked by its
saving.

In: a report that does not fit, and the inputs it was made from. Out: `Advice` in the order in which to follow
it, each on top of the ones before, until the run fits or nothing helps any more.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

from hydraflow.batch_plan.handles import HANDLES
from hydraflow.batch_plan.parts import MicroPlan, RolePlan
from hydraflow.batch_plan.plans import BatchPlan
from hydraflow.batch_plan.settings import value_at, with_value
from hydraflow.errors import shown
from hydraflow.memory.report import Advice, MemoryReport
from hydraflow.memory.roles import ALONE, EstimateInputs
from hydraflow.models.decoding_sizes import LEAST_ROWS

LEAST_SHARE = 0.005
"""Changes that save a smaller share of the excess are not listed."""
_MOST = 8
"""Largest number of changes that are suggested."""
POLICY = "actor_rollout_ref"
MICRO_KEYS = {
    name: (f"{prefix}micro_batch_size_per_gpu", f"{prefix}max_token_len_per_gpu")
    for name, prefix in (
        ("actor", f"{POLICY}.actor.ppo_"),
        ("old_log_prob", f"{POLICY}.rollout.log_prob_"),
        ("ref", f"{POLICY}.ref.log_prob_"),
        ("critic", "critic.ppo_"),
        ("values", "critic.forward_"),
    )
}
"""The plan's field of each pass -> the keys of its micro-batch's rows and tokens."""


@dataclass(frozen=True)
class Change:
    """One override and its cost for the run: from 1 (hardly anything) to 5 (another kind of training)."""

    key: str
    value: Any
    harm: int
    effect: str

    @property
    def override(self) -> str:
        return f"{self.key}={shown(self.value)}"


Measure = Callable[[EstimateInputs], MemoryReport]


def advise(inputs: EstimateInputs, report: MemoryReport, measure: Measure) -> list[Advice]:
    """Changes in order, the largest saving for the least harm first. A change that a later one makes
    ineffective is left out."""
    left_out: set[str] = set()
    while True:
        found = list(_advise(inputs, report, measure, left_out))
        overrides = {advice.override for advice in found}
        replaced = {one for one in overrides if _with_policy(one) in overrides}
        if not replaced:
            return found
        left_out |= replaced


def _with_policy(override: str) -> str | None:
    """The override that includes this one's effect."""
    section, _, name = override.rpartition(".")
    weaker = section.endswith(".fsdp_config") and name in ("param_offload=true", "optimizer_offload=true")
    return f"{section}.offload_policy=true" if weaker else None


def _advise(
    inputs: EstimateInputs, report: MemoryReport, measure: Measure, left_out: set[str]
) -> Iterator[Advice]:
    for _ in range(_MOST):
        where, excess = report.missing
        if excess <= 0:
            return
        saving = []
        for change in changes(inputs):
            changed = None if change.override in left_out else _apply(inputs, change)
            if changed is not None:
                after = measure(changed)
                saving.append((change, changed, after, excess - after.missing[1]))
        saving = [one for one in saving if one[3] >= LEAST_SHARE * excess]
        if not saving:
            return
        # each further degree of harm must save four times as much; savings beyond the excess do not count
        change, inputs, report, saved = max(saving, key=lambda one: min(one[3], excess) / 4 ** one[0].harm)
        yield Advice(change.override, saved, change.effect, where)


def changes(inputs: EstimateInputs) -> Iterator[Change]:
    """All changes that the configuration still allows."""
    for role, prefix in (("actor", f"{POLICY}.actor"), ("ref", f"{POLICY}.ref"), ("critic", "critic")):
        layout = inputs.plan.layouts.get(role)
        if layout is not None and layout.engine == "fsdp2":
            yield from _fsdp_changes(inputs, role, f"{prefix}.fsdp_config")
        elif layout is not None and layout.engine == "megatron":
            yield from _megatron_changes(f"{prefix}.megatron")
    yield from _batch_changes(inputs)
    yield from _model_changes(inputs)
    yield from _rollout_changes(inputs)


def _fsdp_changes(inputs: EstimateInputs, role: str, prefix: str) -> Iterator[Change]:
    chunk = value_at(inputs.config, f"{prefix}.head_chunk_tokens")
    assert isinstance(chunk, int)
    reference = role == "ref"
    rows: list[tuple[str, Any, int, str]] = [
        ("wrap_policy.min_num_params", 0, 1, "one more collective per layer"),
        ("reshard_after_forward", True, 1, "layers are gathered again for the backward pass"),
    ]
    for size in halves(chunk, least=128):
        rows.append(("head_chunk_tokens", size, 1, "the head computes fewer tokens at a time"))
    slower = "weights are copied from host memory at every use: slower passes"
    rows += [
        ("fsdp_size", -1, 2, "one copy of the model over all devices: more traffic between machines"),
        ("param_offload", True, 1 if reference else 2, "weights move to the device and back for every call"),
        ("offload_policy", True, 1, slower)
        if reference
        else ("offload_policy", True, 3, f"{slower}, and AdamW runs on the CPU"),
    ]
    if not reference:
        moves = "moments move to the device and back at every optimizer step"
        rows.append(("optimizer_offload", True, 2, moves))
    lost = "weights and moments in 16 bits: small updates are lost"
    rows.append(("model_dtype", "bf16", 2 if reference else 5, lost))
    for key, *change in rows:
        yield Change(f"{prefix}.{key}", *change)


def _megatron_changes(prefix: str) -> Iterator[Change]:
    yield Change(f"{prefix}.use_distributed_optimizer", True, 1, "optimizer state is divided over data ranks")
    yield Change(f"{prefix}.sequence_parallel", True, 1, "activations between matrices are divided too")
    yield Change(f"{prefix}.grad_offload", True, 1, "gradient buffers are allocated for each update")
    weights = "weights move to the device and back for every call"
    yield Change(f"{prefix}.param_offload", True, 1 if prefix.endswith(".ref.megatron") else 2, weights)
    state = "optimizer state moves to the device and back at every optimizer step"
    yield Change(f"{prefix}.optimizer_offload", True, 2, state)


def _batch_changes(inputs: EstimateInputs) -> Iterator[Change]:
    """Smaller micro-batches of each pass; the plan's numbers change with them."""
    effect = "smaller forward passes: more of them"
    for name, (rows_key, tokens_key) in MICRO_KEYS.items():
        one = getattr(inputs.plan, name)
        micro: MicroPlan | None = one.micro if isinstance(one, RolePlan) else one
        if micro is None:
            continue
        if micro.rows is None:
            sharers = _sharers(inputs.plan, name)  # the key counts tokens per device
            for size in halves((micro.max_tokens or 0) // sharers, least=-(-inputs.longest_row // sharers)):
                yield Change(tokens_key, size, 1, effect)
            continue
        if name == "actor" and value_at(inputs.config, HANDLES["a"]) is not None:
            continue  # with a given number of micro-batches, a smaller one makes a smaller optimizer step
        for size in range(micro.rows // 2, 0, -1):
            if micro.rows % size == 0:
                yield Change(rows_key, size, 1, effect)


def _sharers(plan: BatchPlan, name: str) -> int:
    """Devices that share the tokens of a row in a pass of `MICRO_KEYS`."""
    role = {"old_log_prob": "actor", "values": "critic"}.get(name, name)
    return plan.layouts[role].context if role in plan.layouts else 1


def halves(number: int, *, least: int) -> Iterator[int]:
    """Half of it, a quarter and so on, down to `least`.

    >>> list(halves(1000, least=200))
    [500, 250]
    """
    while (number := number // 2) >= least:
        yield number


def _model_changes(inputs: EstimateInputs) -> Iterator[Change]:
    recomputed = "activations are recomputed: about a third more time"
    for prefix in (f"{POLICY}.model", "critic.model"):
        yield Change(f"{prefix}.use_remove_padding", True, 1, "rows are packed")
        yield Change(f"{prefix}.enable_gradient_checkpointing", True, 2, recomputed)
    if inputs.config.actor_rollout_ref.model.lora_rank == 0:
        yield Change(f"{POLICY}.model.lora_rank", 32, 5, "trains adapters instead of all weights")


def _rollout_changes(inputs: EstimateInputs) -> Iterator[Change]:
    rollout, prefix = inputs.config.actor_rollout_ref.rollout, f"{POLICY}.rollout"
    if rollout.name not in ALONE:
        running = min(rollout.max_num_seqs, inputs.plan.rollout.trajectories_per_engine)
        for size in halves(running, least=LEAST_ROWS):
            yield Change(f"{prefix}.max_num_seqs", size, 2, "fewer sequences at a time: slower sampling")
        yield Change(f"{prefix}.dtype", "bf16", 3, "sampled with less precision than trained")
        return
    key, share = f"{prefix}.gpu_memory_utilization", rollout.gpu_memory_utilization
    if share > 0.3:
        yield Change(key, round(share - 0.1, 2), 2, "less key-value cache: fewer sequences at a time")
    if share < 0.8:
        yield Change(key, round(share + 0.1, 2), 1, "room for a key-value cache beside the weights")


def _apply(inputs: EstimateInputs, change: Change) -> EstimateInputs | None:
    """The inputs with the change applied; None: the key has that value already."""
    if value_at(inputs.config, change.key) == change.value:
        return None
    config = with_value(inputs.config, change.key, change.value)
    return replace(inputs, config=config, plan=_replan(inputs.plan, change))


def _replan(plan: BatchPlan, change: Change) -> BatchPlan:
    """The plan with the change's micro-batch, or with a role's model sharded over all of its devices. A
    smaller micro-batch breaks no rule that the larger one kept."""
    for name, (rows_key, tokens_key) in MICRO_KEYS.items():
        if change.key in (rows_key, tokens_key):
            one = getattr(plan, name)
            per_rank = change.value if change.key == rows_key else change.value * _sharers(plan, name)
            micro = MicroPlan(per_rank, None) if change.key == rows_key else MicroPlan(None, per_rank)
            field: dict[str, Any] = {name: replace(one, micro=micro) if isinstance(one, RolePlan) else micro}
            return replace(plan, **field)
    if not change.key.endswith(".fsdp_config.fsdp_size"):
        return plan
    role = change.key.split(".")[-3]
    whole = replace(plan.layouts[role], shard=len(plan.layouts[role].devices))
    return replace(plan, layouts={**plan.layouts, role: whole})
