"""The batch plan of reinforcement learning: every batch-size number of a run, resolved and checked before
anything starts.

In: the configuration, where its values come from, how many prompts there are. Out: one `BatchPlan`, or one
`ConfigError` with every broken rule and remedies that work together.

Letters: Q prompts per step, n trajectories per prompt, S = Q·n; M prompts per optimizer step, G = M·n; W
devices of a role, mp devices that one row needs, dp = W/mp data ranks, g = G/dp; m rows per data rank in one
forward, a = g/m; L tokens per device; E passes; K = (Q/M)·E optimizer steps per step. A step of
asynchronous training is P rounds of R mini-batches.

`topology.py` reads machines and devices, `device_rules.py` checks them; `handles.py` solves for the step's
numbers, `request.py` reads the rest, `rules.py` checks it; `repair.py` finds remedies among the rules' fixes
and the steps of `targets.py`; `quantities.py` explains. None of it takes longer for a larger cluster.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import partial

from hydraflow.batch_plan import repair, targets
from hydraflow.batch_plan.device_rules import judge_devices
from hydraflow.batch_plan.handles import NO_MINI_BATCH
from hydraflow.batch_plan.layout import ShapeNumbers, placement_of
from hydraflow.batch_plan.parts import MOST, MicroPlan, MicroRequest, RolePlan, RoleRequest, no_sizes
from hydraflow.batch_plan.plans import AgentPlan, RolloutPlan
from hydraflow.batch_plan.plans import BatchPlan as BatchPlan
from hydraflow.batch_plan.quantities import quantities
from hydraflow.batch_plan.repair import BATCH, MICRO, Fix, Violation
from hydraflow.batch_plan.request import Request, read
from hydraflow.batch_plan.rules import judge_batches
from hydraflow.batch_plan.settings import Settings, value_at
from hydraflow.batch_plan.topology import PER_NODE, Topology, read_topology
from hydraflow.errors import ConfigError
from hydraflow.generation.config import batched_tokens
from hydraflow.schema import PPOConfig


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

    `devices_per_node`: devices of a machine if neither `cluster` nor `trainer` sets it. `origins`: key ->
    default, a file or command line; a default yields to what was given. `shape`, `critic_shape`: sizes of the
    policy's and the critic's model that parallel sizes must divide (None: not checked). Raises ConfigError
    with all broken rules and remedies.

    >>> config = PPOConfig()
    >>> config.data.train_batch_size, config.actor_rollout_ref.actor.ppo_mini_batch_size = 8, 4
    >>> config.algorithm.adv_estimator = "grpo"
    >>> plan = resolve_plan(config, prompts=100)
    >>> plan.actor.rows_per_rank, plan.actor.optimizer_steps_per_step, plan.total_steps
    (2, 2, 12)
    """
    settings = Settings(config, PPOConfig(), origins or {})
    shapes = dict.fromkeys(("actor", "ref", "rollout"), shape) | {"critic": critic_shape or shape}
    topology, request, broken = judge(settings, prompts, devices_per_node, shapes)

    def broken_with(values: Mapping[str, object]) -> list[Violation]:
        return judge(settings.changed(values), prompts, devices_per_node, shapes)[2] if values else broken

    def in_force(key: str) -> object:
        value = value_at(config, key)
        if value is None and key == PER_NODE:
            return topology.pools["trainer"].devices_per_node
        return value

    if broken:
        raise ConfigError(repair.problems(broken_with, in_force))
    plan = _plan(request, topology)
    return replace(plan, quantities=tuple(quantities(request, topology, plan)))


def judge(
    settings: Settings[PPOConfig],
    prompts: int | None,
    devices_per_node: int,
    shapes: Mapping[str, ShapeNumbers | None],
) -> tuple[Topology, Request, list[Violation]]:
    """The topology, the request, and every rule that they break; `shapes`: by role."""
    small = no_sizes(settings)
    legal: dict[str, object] = {}
    for one in small:  # the other rules are judged with a legal size in its place
        default = value_at(settings.defaults, one.field)
        legal[one.field] = 1 if isinstance(default, int) and default < 1 else default
    settings = settings.changed(legal)
    topology = read_topology(settings, min(devices_per_node, MOST))  # it may be what `small` refuses
    found, layouts = judge_devices(topology, shapes)
    request, relations = read(settings, layouts, prompts)
    broken = judge_batches(request)
    if any(one.stage == BATCH for one in broken):  # another rule reports the same numbers
        relations = [one for one in relations if one.rule != NO_MINI_BATCH]
    elif any(one.rule == NO_MINI_BATCH for one in relations):
        broken = [one for one in broken if one.stage != MICRO]
    for one in relations:
        steps = partial(_with_other_steps, one, request)
        found.append(replace(one, fixes=steps) if one.stage == BATCH else one)
    found += broken
    return topology, request, [*small, *(one for one in found if one.field not in legal)]


def _with_other_steps(violation: Violation, request: Request) -> Iterator[Fix]:
    """Fixes of a contradiction: its own, and other values of the number of steps."""
    yield from violation.candidates()
    dropped: Fix = dict.fromkeys(request.numbers.handles, None)
    yield dropped
    for fix in targets.fixes(request):
        yield fix
        yield {**fix, **dropped}


def _plan(request: Request, topology: Topology) -> BatchPlan:
    layouts, s = dict(request.layouts), request.q * request.n

    def trained(role: RoleRequest) -> RolePlan:
        tokens, total = request.longest_row, request.total_steps
        return role.plan(q=request.q, n=request.n, row_tokens=tokens, total_steps=total)

    def forward(micro: MicroRequest | None, role: str) -> MicroPlan | None:
        rows = -(-s // layouts.get(role, layouts["actor"]).data_ranks)
        tokens = request.longest_row
        return micro.plan(rows_per_rank=rows, row_tokens=tokens, exact=False) if micro else None

    old_log_prob = forward(request.old_log_prob, "actor")
    assert old_log_prob is not None
    profiler, notes = request.settings.config.global_profiler, list(request.numbers.notes)
    most_ranks = max(len(layout.devices) for layout in layouts.values())
    if request.prompts is not None and (left := request.prompts % request.q):
        text = f"{left} of {request.prompts} training prompts do not fill a step of {request.q}"
        notes.append(f"{text}: each epoch leaves that many out")
    return BatchPlan(
        prompts_per_step=request.q,
        samples_per_prompt=request.n,
        trajectories_per_step=s,
        rollout_devices=len(layouts["rollout"].devices),
        actor=trained(request.actor),
        critic=trained(request.critic) if request.critic else None,
        old_log_prob=old_log_prob,
        ref=forward(request.ref, "ref"),
        values=forward(request.values, "critic"),
        reward_model=forward(request.reward_model, "reward_model"),
        rollout=_rollout_plan(request),
        agent=AgentPlan(request.workers, -(-s // request.workers)),
        validation=request.validation,
        filter=request.filter,
        asynchronous=request.asynchronous,
        cluster=topology.cluster,
        layouts=layouts,
        placement=placement_of(layouts),
        steps_per_epoch=request.steps_per_epoch,
        total_steps=request.total_steps,
        quantities=(),
        notes=(*notes, *_idle_actor(request), *profiler.never_profiled(request.total_steps, most_ranks)),
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
        max_num_batched_tokens=batched_tokens(rollout, request.longest_row, request.device_type),
    )


def _idle_actor(request: Request) -> Iterator[str]:
    """A critic's warm-up that takes the whole run."""
    warmup, total = request.actor.first_step, request.total_steps
    if total and warmup > 1 and warmup >= total:
        learns = "never learns" if warmup > total else "learns only in the last step"
        why = f"the actor {learns}, because the run has {total} training steps"
        smaller = f"a smaller one trains it, such as trainer.critic_warmup={total // 10}"
        yield f"trainer.critic_warmup={warmup}: {why}; {smaller}"
