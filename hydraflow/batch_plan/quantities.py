"""The plan for people, top down: machines, the run, the step, each role's optimizer step, each pass's
micro-batch, sampling.

In: what was asked for and the plan's parts. Out: `Quantity` lines with unit, formula and provenance. A new
number is a line here.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

from hydraflow.batch_plan.handles import KEYS
from hydraflow.batch_plan.layout import Layout
from hydraflow.batch_plan.parts import MicroPlan, MicroRequest, Quantity, RolePlan
from hydraflow.batch_plan.request import Request, RoleRequest
from hydraflow.batch_plan.settings import DEFAULT
from hydraflow.batch_plan.topology import ROLLOUT, Topology

if TYPE_CHECKING:
    from hydraflow.batch_plan.resolve import BatchPlan

DERIVED = "derived"


def quantities(request: Request, topology: Topology, plan: BatchPlan) -> Iterator[Quantity]:
    """Every line of the plan's table."""
    yield from _machines(request, topology, plan)
    yield from _run(request)
    yield from _step(request)
    for role in request.roles:
        role_plan = plan.actor if role.name == "actor" else plan.critic
        assert role_plan is not None
        yield from _role(request, role, role_plan)
    for micro, micro_plan in _forward_passes(request, plan):
        yield from _micro(request, micro, micro_plan)
    yield from _rollout(request, plan)
    yield from _filter(request, plan)
    yield from _asynchronous(request, plan)
    yield from _validation(request, plan)


def _forward_passes(request: Request, plan: BatchPlan) -> Iterator[tuple[MicroRequest, MicroPlan]]:
    pairs = [
        (request.old_log_prob, plan.old_log_prob),
        (request.ref, plan.ref),
        (request.values, plan.values),
        (request.reward_model, plan.reward_model),
    ]
    for micro, micro_plan in pairs:
        if micro and micro_plan:
            yield micro, micro_plan


def _given(request: Request, name: str) -> str:
    """Provenance of one of the step's numbers."""
    return DERIVED if name in request.numbers.derived else request.settings.origin(KEYS[name])


def _from(request: Request, name: str) -> str:
    """The formula of a number that followed from another key."""
    source = request.numbers.derived.get(name)
    if source is None:
        return ""
    value = request.numbers.handles.get(source, request.q if source == KEYS["Q"] else None)
    return f"follows from {source}={value}" if value is not None else f"follows from {source}"


# --- machines --------------------------------------------------


def _machines(request: Request, topology: Topology, plan: BatchPlan) -> Iterator[Quantity]:
    origin = request.settings.origin
    keys = {"trainer": (topology.nodes_key, topology.per_node_key)}
    keys["rollout"] = (f"{ROLLOUT}.nnodes", f"{ROLLOUT}.n_gpus_per_node")
    keys["reward_model"] = ("reward.reward_model.nnodes", "reward.reward_model.n_gpus_per_node")
    for pool in plan.cluster.pools:
        nodes, per_node = keys[pool.name]
        yield Quantity(f"{pool.name}: machines", "machines", pool.nodes, "", origin(nodes))
        yield Quantity(
            f"{pool.name}: devices per machine", "devices", pool.devices_per_node, "", origin(per_node)
        )
    pools = " + ".join(f"{pool.nodes}·{pool.devices_per_node}" for pool in plan.cluster.pools)
    yield Quantity("devices", "devices", len(plan.cluster.devices), pools, DERIVED)
    yield Quantity(
        "placement",
        "",
        plan.placement,
        ", ".join(f"{r} {one.devices}" for r, one in plan.layouts.items()),
        DERIVED,
    )
    for role in plan.layouts.values():
        yield from layout_quantities(role)


def layout_quantities(layout: Layout) -> Iterator[Quantity]:
    """The lines that show how a role lies on its devices."""
    role, count = layout.role, len(layout.devices)
    yield Quantity(f"{role}: devices W", "devices", count, str(layout.devices), DERIVED)
    factors = [
        ("tp", layout.tensor),
        ("pp", layout.pipeline),
        ("cp" if layout.engine == "megatron" else "sp", layout.context),
    ]
    used = [(name, size) for name, size in factors if size > 1]
    names, sizes = "·".join(name for name, _ in used), "·".join(str(size) for _, size in used)
    formula = f"W/({names}) = {count}/({sizes})" if used else f"W = {count}"
    yield Quantity(f"{role}: data ranks dp", "data ranks", layout.data_ranks, formula, DERIVED)
    if layout.engine == "megatron" and layout.expert > 1:
        ranks = count // (layout.expert_tensor * layout.expert * layout.pipeline)
        formula = f"W/(etp·ep·pp) = {count}/({layout.expert_tensor}·{layout.expert}·{layout.pipeline})"
        yield Quantity(f"{role}: data ranks of the experts", "data ranks", ranks, formula, DERIVED)
    if layout.engine == "fsdp2" and layout.shard < count:
        formula = f"W/fsdp_size = {count}/{layout.shard}"
        yield Quantity(f"{role}: copies of the model", "copies", count // layout.shard, formula, DERIVED)


# --- the run and the step --------------------------------------------------


def _run(request: Request) -> Iterator[Quantity]:
    per_epoch, origin = request.steps_per_epoch, request.settings.origin
    if request.prompts is not None:
        yield Quantity("training prompts", "prompts", request.prompts, "counted in the files", DERIVED)
        formula = f"⌊prompts/Q⌋ = ⌊{request.prompts}/{request.q}⌋"
        formula += ", at most: dropped groups cost prompts" if request.filter else ""
        yield Quantity("steps per epoch", "steps", per_epoch, formula, DERIVED)
    if request.asked_steps is not None:
        yield Quantity(
            "training steps", "steps", request.asked_steps, "", origin("trainer.total_training_steps")
        )
    elif request.total_steps:
        formula = f"steps per epoch · epochs = {per_epoch}·{request.epochs}"
        yield Quantity("training steps", "steps", request.total_steps, formula, DERIVED)


def _step(request: Request) -> Iterator[Quantity]:
    s = request.q * request.n
    yield Quantity("prompts per step Q", "prompts", request.q, _from(request, "Q"), _given(request, "Q"))
    yield Quantity(
        "trajectories per prompt n", "trajectories", request.n, _from(request, "n"), _given(request, "n")
    )
    yield Quantity("trajectories per step S", "trajectories", s, f"Q·n = {request.q}·{request.n}", DERIVED)
    formula = f"prompt + response = {request.longest_prompt} + {request.longest_response}"
    yield Quantity("longest row", "tokens", request.longest_row, formula, DERIVED)


def _role(request: Request, role: RoleRequest, plan: RolePlan) -> Iterator[Quantity]:
    mini, n, dp, steps, name = role.mini, request.n, plan.data_ranks, plan.optimizer_steps_per_step, role.name
    own = name != "actor" and role.mini_key.startswith("critic")
    given = request.settings.origin(role.mini_key) if own else _given(request, "M")
    yield Quantity(
        f"{name}: prompts per optimizer step M", "prompts", mini, "" if own else _from(request, "M"), given
    )
    trajectories = plan.mini_batch_trajectories
    yield Quantity(
        f"{name}: trajectories per optimizer step G",
        "trajectories",
        trajectories,
        f"M·n = {mini}·{n}",
        DERIVED,
    )
    yield Quantity(
        f"{name}: rows per data rank g",
        "trajectories",
        plan.rows_per_rank,
        f"G/dp = {trajectories}/{dp}",
        DERIVED,
    )
    yield from _micro(request, role.micro, plan.micro)
    if plan.accumulation_steps is not None:
        formula = f"g/m = {plan.rows_per_rank}/{plan.micro.rows}"
        yield Quantity(
            f"{name}: accumulation steps a", "micro-batches", plan.accumulation_steps, formula, DERIVED
        )
    formula = f"(Q/M)·E = ({request.q}/{mini})·{role.epochs}"
    yield Quantity(f"{name}: optimizer steps per step K", "optimizer steps", steps, formula, DERIVED)
    yield from _schedule(request, role, plan)


def _schedule(request: Request, role: RoleRequest, plan: RolePlan) -> Iterator[Quantity]:
    name, steps, total = role.name, plan.optimizer_steps_per_step, request.total_steps
    if total:
        formula = f"training steps · K = {total}·{steps}"
        if plan.first_step > 1:
            formula = f"(training steps - critic_warmup + 1)·K = ({total} - {plan.first_step} + 1)·{steps}"
            formula += ", at least 0" if plan.first_step > total + 1 else ""
        yield Quantity(
            f"{name}: optimizer steps", "optimizer steps", plan.total_optimizer_steps, formula, DERIVED
        )
    if plan.warmup_steps:
        by_ratio = role.optim.lr_warmup_steps < 0
        key = f"{role.optim_key}.lr_warmup_steps"
        formula = f"⌊{role.optim.lr_warmup_steps_ratio}·{total}⌋; " if by_ratio else ""
        formula += f"{plan.warmup_steps}·K = {plan.warmup_steps * steps} optimizer steps"
        origin = DERIVED if by_ratio else request.settings.origin(key)
        yield Quantity(f"{name}: warm-up", "training steps", plan.warmup_steps, formula, origin)
    if plan.decay_steps and role.optim.lr_scheduler_type != "constant":
        formula = f"{total} - {plan.warmup_steps}; times K = {plan.decay_steps * steps} optimizer steps"
        yield Quantity(
            f"{name}: {role.optim.lr_scheduler_type} decay",
            "training steps",
            plan.decay_steps,
            formula,
            DERIVED,
        )


def _micro(request: Request, micro: MicroRequest, plan: MicroPlan) -> Iterator[Quantity]:
    yield from micro_quantities(micro, plan, request.settings.origin(micro.deciding_key), request.longest_row)


def micro_quantities(
    micro: MicroRequest, plan: MicroPlan, origin: str, row_tokens: int
) -> Iterator[Quantity]:
    """The lines that show a micro-batch; `origin` is that of the key that decided."""
    name = f"micro-batch of {micro.purpose}"
    if plan.max_tokens is not None:
        if micro.sharers == 1:
            yield Quantity(name, "tokens per device", micro.max_tokens, "", origin)
            return
        yield Quantity(f"{name}: tokens per device L", "tokens per device", micro.max_tokens, "", origin)
        formula = f"L x devices that share a row = {micro.max_tokens}·{micro.sharers}"
        yield Quantity(name, "tokens per data rank", plan.max_tokens, formula, DERIVED)
        return
    assert plan.rows is not None
    if micro.rows is None:
        fitting = f"⌊{micro.budget}/{row_tokens}⌋"
        most = plan.rows == micro.budget // row_tokens
        formula = (
            f"rows that {micro.budget} tokens hold = {fitting}"
            if most
            else f"of the {fitting} that fit, as many as come out even"
        )
        yield Quantity(name, "rows per data rank", plan.rows, formula, DERIVED)
        return
    by_handle = micro.rows_key.startswith("batch.")
    yield Quantity(
        name,
        "rows per data rank",
        plan.rows,
        f"g/a, {micro.rows_key}" if by_handle else "",
        DERIVED if by_handle else origin,
    )


# --- sampling --------------------------------------------------


def _rollout(request: Request, plan: BatchPlan) -> Iterator[Quantity]:
    rollout, layout, origin = plan.rollout, plan.layouts["rollout"], request.settings.origin
    sizes = [("tp", layout.tensor), ("pp", layout.pipeline), ("dp", layout.replica_data)]
    used: Mapping[str, int] = {name: size for name, size in sizes if size > 1}
    formula = (
        f"W/({'·'.join(used)}) = {len(layout.devices)}/({'·'.join(map(str, used.values()))})"
        if used
        else f"W = {rollout.replicas}"
    )
    yield Quantity("rollout: replicas", "engines", rollout.replicas, formula, DERIVED)
    per_engine = request.rollout.max_num_seqs
    yield Quantity(
        "rollout: sequences per engine", "sequences", per_engine, "", origin(f"{ROLLOUT}.max_num_seqs")
    )
    formula = f"{rollout.engines} engines · {per_engine}"
    yield Quantity(
        "rollout: concurrent sequences", "sequences", rollout.concurrent_sequences, formula, DERIVED
    )
    formula = f"⌈{rollout.prompts_per_call}·{request.n}/{rollout.engines}⌉"
    yield Quantity(
        "rollout: trajectories per engine", "trajectories", rollout.trajectories_per_engine, formula, DERIVED
    )
    formula = f"⌈{rollout.trajectories_per_engine}/{per_engine}⌉"
    yield Quantity("rollout: waves", "fillings of an engine", rollout.waves, formula, DERIVED)
    if request.rollout.engine == "vllm":
        own = request.rollout.max_model_len is not None
        given = origin(f"{ROLLOUT}.max_model_len") if own else DERIVED
        yield Quantity(
            "rollout: longest row", "tokens", rollout.max_model_len, "" if own else "prompt + response", given
        )
        tokens = rollout.max_num_batched_tokens
        yield Quantity(
            "rollout: tokens per forward", "tokens", tokens, "", origin(f"{ROLLOUT}.max_num_batched_tokens")
        )
    workers, given = plan.agent.workers, origin(f"{ROLLOUT}.agent.num_workers")
    if request.rollout.engine == "native" and given == DEFAULT:
        return  # no agents lead its conversations: nobody asked for these numbers
    yield Quantity("agent workers", "processes", workers, "", given)
    formula = f"⌈S/workers⌉ = ⌈{request.q * request.n}/{workers}⌉"
    yield Quantity(
        "agent workers: trajectories each",
        "trajectories",
        plan.agent.trajectories_per_worker,
        formula,
        DERIVED,
    )


def _filter(request: Request, plan: BatchPlan) -> Iterator[Quantity]:
    if plan.filter is None or request.filter is None:
        return
    size, key, calls = plan.filter.prompts_per_call, request.filter.call_key, request.filter.most_calls
    own = key == "data.gen_batch_size"
    yield Quantity(
        "filter: prompts per call",
        "prompts",
        size,
        "" if own else "Q",
        request.settings.origin(key) if own else DERIVED,
    )
    formula = f"⌈Q/{size}⌉·{size} = ⌈{request.q}/{size}⌉·{size}"
    yield Quantity(
        "filter: prompts per step, at least", "prompts", plan.filter.least_prompts, formula, DERIVED
    )
    most = plan.filter.most_prompts
    formula = "no limit on calls" if most is None else f"{calls} calls · {size}"
    yield Quantity(
        "filter: prompts per step, at most", "prompts", "no limit" if most is None else most, formula, DERIVED
    )


def _asynchronous(request: Request, plan: BatchPlan) -> Iterator[Quantity]:
    if plan.asynchronous is None or request.asynchronous is None:
        return
    one, share = plan.asynchronous, request.asynchronous.staleness
    yield Quantity(
        "async: rounds per weight update P",
        "rounds",
        one.rounds_per_sync,
        _from(request, "P"),
        _given(request, "P"),
    )
    batches = one.mini_batches_per_round
    yield Quantity(
        "async: mini-batches per round R", "mini-batches", batches, _from(request, "R"), _given(request, "R")
    )
    formula = f"R·M = {batches}·{request.actor.mini}"
    yield Quantity("async: prompts per round", "prompts", one.prompts_per_round, formula, DERIVED)
    yield Quantity(
        "async: staleness", "share", share, "", request.settings.origin("async_training.staleness_threshold")
    )
    formula = (
        f"⌊(1 + staleness)·P·R·M⌋ = ⌊(1 + {share})·{one.rounds_per_sync}·{batches}·{request.actor.mini}⌋"
    )
    yield Quantity("async: prompts in flight, at most", "prompts", one.prompts_in_flight, formula, DERIVED)
    formula = f"{one.prompts_in_flight}·{request.n}"
    yield Quantity(
        "async: trajectories in flight, at most", "trajectories", one.trajectories_in_flight, formula, DERIVED
    )
    formula = f"({one.prompts_in_flight} - {request.q})·{request.n}"
    yield Quantity(
        "async: stale trajectories, at most", "trajectories", one.stale_trajectories, formula, DERIVED
    )


def _validation(request: Request, plan: BatchPlan) -> Iterator[Quantity]:
    size, n, origin = (
        plan.validation.prompts_per_call,
        plan.validation.samples_per_prompt,
        request.settings.origin,
    )
    yield Quantity("validation batch", "prompts per call", size or "all", "", origin("data.val_batch_size"))
    yield Quantity("validation responses", "responses per prompt", n, "", origin(f"{ROLLOUT}.val_kwargs.n"))
    if size:
        yield Quantity("validation trajectories", "trajectories per call", size * n, f"{size}·{n}", DERIVED)
