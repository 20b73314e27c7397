"""The batch plan of reinforcement learning: every batch-size number of a run, resolved and checked before
anything starts.

In: the configuration, where its values come from, how many prompts there are. Out: one `BatchPlan`, or one
`ConfigError` with every broken rule and remedies that work together.

Letters: Q prompts per step, n trajectories per prompt, S = Q·n; M prompts per optimizer step, G = M·n; W
devices of a role, mp devices that one row needs, dp = W/mp data ranks, g = G/dp; m rows per data rank in one
forward, a = g/m; L tokens per device; E passes; K = (Q/M)·E optimizer steps per step; P, R longest prompt and
response.

The way: `topology.py` reads machines and devices, `device_rules.py` judges them; `handles.py` settles the
step's numbers, `request.py` reads the rest, `rules.py` judges it; `repair.py` finds remedies; `quantities.py`
explains. No step of it is longer for a larger cluster or more prompts. Left out on purpose: which rows go
where (`trainer/mini_batches.py`), how tables look (`batch_plan/table.py`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial

from hydraflow.batch_plan import repair, targets
from hydraflow.batch_plan.device_rules import judge_devices
from hydraflow.batch_plan.handles import NO_MINI_BATCH
from hydraflow.batch_plan.layout import ShapeNumbers, placement_of
from hydraflow.batch_plan.parts import MicroPlan, MicroRequest, RolePlan, no_sizes, warmup_steps
from hydraflow.batch_plan.plans import AgentPlan, AsyncPlan, FilterPlan, RolloutPlan, ValidationPlan
from hydraflow.batch_plan.plans import BatchPlan as BatchPlan
from hydraflow.batch_plan.quantities import quantities
from hydraflow.batch_plan.repair import BATCH, MICRO, Cure, Violation
from hydraflow.batch_plan.request import Request, RoleRequest, read, sizes
from hydraflow.batch_plan.rules import judge_batches
from hydraflow.batch_plan.settings import Settings, value_at
from hydraflow.batch_plan.topology import Topology, read_topology
from hydraflow.batch_plan.topology import sizes as device_sizes
from hydraflow.errors import ConfigError, Problem
from hydraflow.schema import PPOConfig


@dataclass(frozen=True)
class Facts:
    """What the configuration does not say."""

    prompts: int | None
    devices_per_node: int
    shapes: Mapping[str, ShapeNumbers]
    """By role."""


@dataclass(frozen=True)
class Verdict:
    """What is asked for, and what is wrong with it."""

    topology: Topology
    request: Request
    violations: list[Violation]


def resolve_plan(
    config: PPOConfig,
    *,
    prompts: int | None,
    devices_per_node: int = 2,
    origins: Mapping[str, str] | None = None,
    shape: ShapeNumbers | None = None,
    critic_shape: ShapeNumbers | None = None,
) -> BatchPlan:
    """The plan of a run over `prompts` training prompts (None: not known yet).

    `devices_per_node`: devices of a machine where neither `cluster` nor `trainer` says it. `origins`: key ->
    default, a file or command line; a default yields to what was given. `shape`: what the policy's model, and
    `critic_shape` the critic's, can be divided into (None: not judged). Raises ConfigError with all broken
    rules and remedies.

    >>> config = PPOConfig()
    >>> config.data.train_batch_size, config.actor_rollout_ref.actor.ppo_mini_batch_size = 8, 4
    >>> config.algorithm.adv_estimator = "grpo"
    >>> plan = resolve_plan(config, prompts=100)
    >>> plan.actor.rows_per_rank, plan.actor.optimizer_steps_per_step, plan.total_steps
    (2, 2, 12)
    """
    settings = Settings(config, PPOConfig(), origins or {})
    shapes = dict.fromkeys(("actor", "ref", "rollout"), shape) | {"critic": critic_shape or shape}
    facts = Facts(prompts, devices_per_node, {role: one for role, one in shapes.items() if one is not None})
    verdict = judge(settings, facts)
    if verdict.violations:
        raise ConfigError(_problems(settings, facts, verdict))
    plan = _plan(verdict.request, verdict.topology)
    return replace(plan, quantities=tuple(quantities(verdict.request, verdict.topology, plan)))


def judge(settings: Settings[PPOConfig], facts: Facts) -> Verdict:
    """What is asked for, with every rule that it breaks."""
    config = settings.config
    small = no_sizes([*sizes(config), *device_sizes(config)], partial(value_at, settings.defaults))
    if small:
        settings = settings.changed(
            {violation.field: _legal_size(settings, violation.field) for violation in small}
        )
    topology = read_topology(settings, facts.devices_per_node)
    devices = judge_devices(topology, facts.shapes)
    request, relations = read(settings, devices.layouts, facts.prompts)
    relations = [
        replace(one, cures=partial(_with_other_steps, one, request)) if one.stage == BATCH else one
        for one in relations
    ]
    broken = judge_batches(request)
    if any(one.stage == BATCH for one in broken):  # another rule reports the same numbers
        relations = [one for one in relations if one.rule != NO_MINI_BATCH]
    elif any(one.rule == NO_MINI_BATCH for one in relations):
        broken = [one for one in broken if one.stage != MICRO]
    found = [*devices.violations, *relations, *broken]
    keys = {violation.field for violation in small}
    return Verdict(
        topology, request, [*small, *(violation for violation in found if violation.field not in keys)]
    )


def _with_other_steps(violation: Violation, request: Request) -> Iterator[Cure]:
    """Cures of a contradiction: its own, other steps, and steps without any handle."""
    yield from violation.cures()
    dropped: Cure = dict.fromkeys(request.numbers.handles, None)
    yield dropped
    for cure in targets.cures(request):
        yield cure
        yield {**cure, **dropped}


def _legal_size(settings: Settings[PPOConfig], key: str) -> object:
    """A size to judge the rest with, in place of one that is no size."""
    default = value_at(settings.defaults, key)
    return default if default is None or (isinstance(default, int) and default >= 1) else 1


def _problems(settings: Settings[PPOConfig], facts: Facts, verdict: Verdict) -> list[Problem]:
    def judged(values: Mapping[str, object]) -> list[Violation]:
        return judge(settings.changed(values), facts).violations if values else verdict.violations

    return repair.problems(judged, partial(_in_force, settings, verdict))


def _in_force(settings: Settings[PPOConfig], verdict: Verdict, key: str) -> object:
    """The value of a key, or what is used where it says nothing."""
    value = value_at(settings.config, key)
    if value is None and key == "trainer.n_gpus_per_node":
        return verdict.topology.pools["trainer"].devices_per_node
    return value


# --- the plan --------------------------------------------------


def _plan(request: Request, topology: Topology) -> BatchPlan:
    layouts, s = dict(request.layouts), request.q * request.n

    def forward(micro: MicroRequest | None, role: str) -> MicroPlan | None:
        if micro is None:
            return None
        layout = layouts.get(role, layouts["actor"])
        return micro.plan(
            rows_per_rank=-(-s // layout.data_ranks), row_tokens=request.longest_row, exact=False
        )

    old_log_prob = forward(request.old_log_prob, "actor")
    assert old_log_prob is not None
    return BatchPlan(
        prompts_per_step=request.q,
        samples_per_prompt=request.n,
        trajectories_per_step=s,
        rollout_ranks=layouts["rollout"].data_ranks,
        actor=_role_plan(request, request.actor),
        critic=_role_plan(request, request.critic) if request.critic else None,
        old_log_prob=old_log_prob,
        ref=forward(request.ref, "ref"),
        values=forward(request.values, "critic"),
        reward_model=forward(request.reward_model, "reward_model"),
        rollout=_rollout_plan(request),
        agent=AgentPlan(request.workers, -(-s // request.workers)),
        validation=ValidationPlan(request.val_prompts, request.val_n),
        filter=_filter_plan(request),
        asynchronous=_async_plan(request),
        cluster=topology.cluster,
        layouts=layouts,
        placement=placement_of(layouts),
        steps_per_epoch=request.steps_per_epoch,
        total_steps=request.total_steps,
        quantities=(),
        notes=(*request.numbers.notes, *_left_over(request)),
    )


def _left_over(request: Request) -> Iterator[str]:
    """Prompts that no step of an epoch takes."""
    if request.prompts is not None and (left := request.prompts % request.q):
        yield (
            f"{left} of {request.prompts} training prompts fill no step of {request.q}: an epoch leaves"
            " them out"
        )


def _role_plan(request: Request, role: RoleRequest) -> RolePlan:
    assert role.ranks is not None
    trajectories = role.mini * request.n
    rows, steps = trajectories // role.ranks, request.q // role.mini * role.epochs
    micro = role.micro.plan(rows_per_rank=rows, row_tokens=request.longest_row, exact=True)
    warmup = warmup_steps(role.optim, request.total_steps)
    return RolePlan(
        data_ranks=role.ranks,
        mini_batch_prompts=role.mini,
        mini_batch_trajectories=trajectories,
        rows_per_rank=rows,
        epochs=role.epochs,
        shuffle=role.shuffle,
        micro=micro,
        optimizer_steps_per_step=steps,
        accumulation_steps=rows // micro.rows if micro.rows else None,
        warmup_steps=warmup,
        decay_steps=max(0, request.total_steps - warmup),
        total_optimizer_steps=request.total_steps * steps,
    )


def _rollout_plan(request: Request) -> RolloutPlan:
    layout, rollout = request.layouts["rollout"], request.rollout
    each = -(-request.prompts_per_call * request.n // layout.data_ranks)
    return RolloutPlan(
        replicas=layout.replicas,
        engines=layout.data_ranks,
        concurrent_sequences=layout.data_ranks * rollout.max_num_seqs,
        prompts_per_call=request.prompts_per_call,
        trajectories_per_engine=each,
        waves=-(-each // rollout.max_num_seqs),
        max_model_len=rollout.max_model_len or request.longest_row,
        max_num_batched_tokens=rollout.max_num_batched_tokens,
    )


def _filter_plan(request: Request) -> FilterPlan | None:
    if request.filter is None:
        return None
    size = request.filter.prompts_per_call
    return FilterPlan(size, -(-request.q // size) * size, request.filter.most_calls * size or None)


def _async_plan(request: Request) -> AsyncPlan | None:
    if request.asynchronous is None:
        return None
    one = request.asynchronous
    flying = int(request.q * (1 + one.staleness))
    return AsyncPlan(
        rounds_per_sync=one.rounds,
        mini_batches_per_round=one.batches,
        prompts_per_round=one.batches * request.actor.mini,
        prompts_in_flight=flying,
        trajectories_in_flight=flying * request.n,
        stale_trajectories=(flying - request.q) * request.n,
    )
