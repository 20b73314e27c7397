"""The lines of the plan's table, top down: machines, run, step, each role's optimizer step, each pass's
micro-batch, sampling.

In: the request and the plan's parts. Out: `Quantity` lines with unit, formula and provenance. A new number
gets a line here.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from hydraflow.batch_plan.handles import KEYS
from hydraflow.batch_plan.layout import Layout
from hydraflow.batch_plan.parts import (
    DERIVED,
    KEEP_GROUPS,
    MicroPlan,
    MicroRequest,
    Quantity,
    RolePlan,
    RoleRequest,
)
from hydraflow.batch_plan.plans import BatchPlan
from hydraflow.batch_plan.request import CRITIC_MINI, GEN_BATCH, PER_ROUND, ROUNDS, Request
from hydraflow.batch_plan.settings import DEFAULT, Settings
from hydraflow.batch_plan.topology import ROLLOUT, Topology
from hydraflow.generation.config import GENERATION_ENGINES
from hydraflow.schema import PPOConfig, SupervisedConfig


def quantities(request: Request, topology: Topology, plan: BatchPlan) -> Iterator[Quantity]:
    """Every line of the plan's table."""
    yield from _machines(request, topology, plan)
    yield from _run(request)
    yield from _step(request)
    yield from _role(request, request.actor, plan.actor)
    if request.critic and plan.critic:
        yield from _role(request, request.critic, plan.critic)
    for name in ("old_log_prob", "ref", "values", "reward_model"):
        micro, micro_plan = getattr(request, name), getattr(plan, name)
        if micro and micro_plan:
            yield from micro_quantities(request.settings, micro, micro_plan, request.longest_row)
    yield from _rollout(request, plan)
    yield from _filter(request)
    yield from _asynchronous(request)
    yield from _validation(request)


def _origin(request: Request, name: str) -> tuple[str, str]:
    """Formula and provenance of one of the step's numbers: it was given, or followed from another key."""
    source = request.numbers.derived.get(name)
    if source is None:
        return "", request.settings.origin(KEYS[name])
    value = request.numbers.handles.get(source, request.q if source == KEYS["Q"] else None)
    return f"follows from {source}" + ("" if value is None else f"={value}"), DERIVED


def _machines(request: Request, topology: Topology, plan: BatchPlan) -> Iterator[Quantity]:
    for pool in plan.cluster.pools:
        nodes, per_node = map(request.settings.origin, topology.keys_of(pool))
        yield Quantity(f"{pool.name}: machines", "machines", pool.nodes, "", nodes)
        yield Quantity(f"{pool.name}: devices per machine", "devices", pool.devices_per_node, "", per_node)
    pools = " + ".join(f"{pool.nodes}·{pool.devices_per_node}" for pool in plan.cluster.pools)
    yield Quantity("devices", "devices", len(plan.cluster.devices), pools)
    roles = ", ".join(f"{role} {layout.devices}" for role, layout in plan.layouts.items())
    yield Quantity("placement", "", plan.placement, roles)
    for layout in plan.layouts.values():
        yield from layout_quantities(layout)


def _quotient(count: int, sizes: Mapping[str, int]) -> str:
    """W devices divided by these sizes, in letters and in numbers; sizes of 1 are left out."""
    used = {name: size for name, size in sizes.items() if size > 1}
    if not used:
        return f"W = {count}"
    return f"W/({'·'.join(used)}) = {count}/({'·'.join(map(str, used.values()))})"


def layout_quantities(layout: Layout) -> Iterator[Quantity]:
    """The lines that show how a role is divided among its devices."""
    role, count = layout.role, len(layout.devices)
    yield Quantity(f"{role}: devices W", "devices", count, str(layout.devices))
    context = "cp" if layout.engine == "megatron" else "sp"
    sizes = {"tp": layout.tensor, "pp": layout.pipeline, context: layout.context}
    yield Quantity(f"{role}: data ranks dp", "data ranks", layout.data_ranks, _quotient(count, sizes))
    if layout.engine == "megatron" and layout.expert > 1:
        ranks = count // (layout.expert_tensor * layout.expert * layout.pipeline)
        formula = f"W/(etp·ep·pp) = {count}/({layout.expert_tensor}·{layout.expert}·{layout.pipeline})"
        yield Quantity(f"{role}: data ranks of the experts", "data ranks", ranks, formula)
    if layout.engine == "fsdp2" and layout.shard < count:
        formula = f"W/fsdp_size = {count}/{layout.shard}"
        yield Quantity(f"{role}: copies of the model", "copies", count // layout.shard, formula)


def run_quantities(
    settings: Settings[PPOConfig] | Settings[SupervisedConfig], per_epoch: int | None, formula: str
) -> Iterator[Quantity]:
    """The lines that show how many steps a run takes; `formula`: of the steps per epoch."""
    config: PPOConfig | SupervisedConfig = settings.config
    asked, epochs = config.trainer.total_training_steps, config.trainer.total_epochs
    if per_epoch is not None:
        yield Quantity("steps per epoch", "steps", per_epoch, formula)
    if asked is not None:
        yield Quantity("training steps", "steps", asked, "", settings.origin("trainer.total_training_steps"))
    elif per_epoch:
        formula = f"steps per epoch · epochs = {per_epoch}·{epochs}"
        yield Quantity("training steps", "steps", per_epoch * epochs, formula)


def _run(request: Request) -> Iterator[Quantity]:
    if request.prompts is not None:
        yield Quantity("training prompts", "prompts", request.prompts, "counted in the files")
    formula = f"⌊prompts/Q⌋ = ⌊{request.prompts}/{request.q}⌋"
    formula += ", at most: dropped groups cost prompts" if request.filter else ""
    per_epoch = None if request.prompts is None else request.steps_per_epoch
    yield from run_quantities(request.settings, per_epoch, formula)


def _step(request: Request) -> Iterator[Quantity]:
    q, n = request.q, request.n
    yield Quantity("prompts per step Q", "prompts", q, *_origin(request, "Q"))
    yield Quantity("trajectories per prompt n", "trajectories", n, *_origin(request, "n"))
    yield Quantity("trajectories per step S", "trajectories", q * n, f"Q·n = {q}·{n}")
    formula = f"prompt + response = {request.longest_prompt} + {request.longest_response}"
    yield Quantity("longest row", "tokens", request.longest_row, formula)
    if (together := request.actor.micro.together) > 1:
        origin = request.settings.origin(KEEP_GROUPS)
        yield Quantity("kept together", "trajectories", together, "n responses to a prompt", origin)


def _role(request: Request, role: RoleRequest, plan: RolePlan) -> Iterator[Quantity]:
    mini, n, dp, steps, name = role.mini, request.n, plan.data_ranks, plan.optimizer_steps_per_step, role.name
    own = role.mini_key == CRITIC_MINI
    given = ("", request.settings.origin(role.mini_key)) if own else _origin(request, "M")
    yield Quantity(f"{name}: prompts per optimizer step M", "prompts", mini, *given)
    rows, each = plan.mini_batch_trajectories, plan.rows_per_rank
    yield Quantity(f"{name}: trajectories per optimizer step G", "trajectories", rows, f"M·n = {mini}·{n}")
    yield Quantity(f"{name}: rows per data rank g", "trajectories", each, f"G/dp = {rows}/{dp}")
    yield from micro_quantities(request.settings, role.micro, plan.micro, request.longest_row)
    if plan.accumulation_steps is not None:
        formula = f"g/m = {each}/{plan.micro.rows}"
        yield Quantity(f"{name}: accumulation steps a", "micro-batches", plan.accumulation_steps, formula)
    formula = f"(Q/M)·E = ({request.q}/{mini})·{role.epochs}"
    yield Quantity(f"{name}: optimizer steps per step K", "optimizer steps", steps, formula)
    yield from _schedule(request, role, plan)


def _schedule(request: Request, role: RoleRequest, plan: RolePlan) -> Iterator[Quantity]:
    name, steps, total = role.name, plan.optimizer_steps_per_step, request.total_steps
    warmup, decay = plan.warmup_steps, plan.decay_steps
    if total:
        formula = f"training steps · K = {total}·{steps}"
        if plan.first_step > 1:
            formula = f"(training steps - critic_warmup + 1)·K = ({total} - {plan.first_step} + 1)·{steps}"
            formula += ", at least 0" if plan.first_step > total + 1 else ""
        yield Quantity(f"{name}: optimizer steps", "optimizer steps", plan.total_optimizer_steps, formula)
    if warmup:
        by_ratio = role.optim.lr_warmup_steps < 0
        formula = f"⌊{role.optim.lr_warmup_steps_ratio}·{total}⌋; " if by_ratio else ""
        formula += f"{warmup}·K = {warmup * steps} optimizer steps"
        origin = DERIVED if by_ratio else request.settings.origin(f"{role.optim_key}.lr_warmup_steps")
        yield Quantity(f"{name}: warm-up", "training steps", warmup, formula, origin)
    if decay and role.optim.lr_scheduler_type != "constant":
        formula = f"{total} - {warmup}; times K = {decay * steps} optimizer steps"
        yield Quantity(f"{name}: {role.optim.lr_scheduler_type} decay", "training steps", decay, formula)


def micro_quantities(
    settings: Settings[Any], micro: MicroRequest, plan: MicroPlan, row_tokens: int
) -> Iterator[Quantity]:
    """The lines that show a micro-batch."""
    name, origin = f"micro-batch of {micro.purpose}", settings.origin(micro.deciding_key)
    if plan.max_tokens is not None and micro.sharers == 1:
        yield Quantity(name, "tokens per device", micro.max_tokens, "", origin)
    elif plan.max_tokens is not None:
        yield Quantity(f"{name}: tokens per device L", "tokens per device", micro.max_tokens, "", origin)
        formula = f"L x devices that share a row = {micro.max_tokens}·{micro.sharers}"
        yield Quantity(name, "tokens per data rank", plan.max_tokens, formula)
    elif micro.rows is None:
        assert plan.rows is not None
        fitting = f"⌊{micro.budget}/{row_tokens}⌋"
        formula = f"of the {fitting} that fit, as many as divide evenly"
        if micro.together > 1:
            formula = f"of the {fitting} that fit, whole groups of {micro.together}"
        if plan.rows == micro.budget // row_tokens:
            formula = f"rows that {micro.budget} tokens hold = {fitting}"
        yield Quantity(name, "rows per data rank", plan.rows, formula)
    elif micro.rows_key.startswith("batch."):
        yield Quantity(name, "rows per data rank", micro.rows, f"g/a, {micro.rows_key}")
    else:
        yield Quantity(name, "rows per data rank", micro.rows, "", origin)


def _rollout(request: Request, plan: BatchPlan) -> Iterator[Quantity]:
    rollout, layout, asked = plan.rollout, plan.layouts["rollout"], request.rollout
    count, origin = len(layout.devices), request.settings.origin
    sizes = {"tp": layout.tensor, "pp": layout.pipeline, "dp": layout.replica_data}
    yield Quantity("rollout: replicas", "engines", rollout.replicas, _quotient(count, sizes))
    given = origin(f"{ROLLOUT}.max_num_seqs")
    yield Quantity("rollout: sequences per engine", "sequences", asked.max_num_seqs, "", given)
    formula = f"{rollout.engines} engines · {asked.max_num_seqs}"
    yield Quantity("rollout: concurrent sequences", "sequences", rollout.concurrent_sequences, formula)
    each = rollout.trajectories_per_engine
    formula = f"⌈{rollout.prompts_per_call}·{request.n}/{rollout.engines}⌉"
    yield Quantity("rollout: trajectories per engine", "trajectories", each, formula)
    engine = GENERATION_ENGINES.get(asked.name)  # another name is refused elsewhere
    formula, reads = f"⌈{each}/{asked.max_num_seqs}⌉", engine.reads if engine else ()
    yield Quantity("rollout: waves", "waves per engine", rollout.waves, formula)
    if "max_model_len" in reads:
        own = asked.max_model_len is not None
        formula, given = ("", origin(f"{ROLLOUT}.max_model_len")) if own else ("prompt + response", DERIVED)
        yield Quantity("rollout: longest row", "tokens", rollout.max_model_len, formula, given)
    if "max_num_batched_tokens" in reads:
        given = origin(f"{ROLLOUT}.max_num_batched_tokens")
        yield Quantity("rollout: tokens per forward", "tokens", rollout.max_num_batched_tokens, "", given)
    workers, given = plan.agent.workers, origin(f"{ROLLOUT}.agent.num_workers")
    if given == DEFAULT and (engine is None or not engine.own_process):
        return  # no agent workers run, so nothing uses these numbers
    yield Quantity("agent workers", "processes", workers, "", given)
    formula = f"⌈S/workers⌉ = ⌈{request.q * request.n}/{workers}⌉"
    each = plan.agent.trajectories_per_worker
    yield Quantity("agent workers: trajectories each", "trajectories", each, formula)


def _filter(request: Request) -> Iterator[Quantity]:
    if request.filter is None:
        return
    size, most = request.filter.prompts_per_call, request.filter.most_prompts
    own = request.call_key == GEN_BATCH
    given = ("", request.settings.origin(GEN_BATCH)) if own else ("Q", DERIVED)
    yield Quantity("filter: prompts per call", "prompts", size, *given)
    formula = f"⌈Q/{size}⌉·{size} = ⌈{request.q}/{size}⌉·{size}"
    yield Quantity("filter: prompts per step, at least", "prompts", request.filter.least_prompts, formula)
    formula = "no limit on calls" if most is None else f"{most // size} calls · {size}"
    yield Quantity("filter: prompts per step, at most", "prompts", most or "no limit", formula)


def _asynchronous(request: Request) -> Iterator[Quantity]:
    if request.asynchronous is None:
        return
    one, share, mini = request.asynchronous, request.staleness, request.actor.mini
    rounds, batches, flying = one.rounds_per_sync, one.mini_batches_per_round, one.prompts_in_flight
    origins = {key: ("", request.settings.origin(key)) for key in (ROUNDS, PER_ROUND)}
    if request.async_derived:
        other = batches if request.async_derived == ROUNDS else rounds
        origins[request.async_derived] = f"{request.q}/({mini}·{other})", DERIVED
    yield Quantity("async: rounds per weight update P", "rounds", rounds, *origins[ROUNDS])
    yield Quantity("async: mini-batches per round R", "mini-batches", batches, *origins[PER_ROUND])
    yield Quantity("async: prompts per round", "prompts", one.prompts_per_round, f"R·M = {batches}·{mini}")
    origin = request.settings.origin("async_training.staleness_threshold")
    yield Quantity("async: staleness", "share", share, "", origin)
    formula = f"⌊(1 + staleness)·P·R·M⌋ = ⌊(1 + {share})·{rounds}·{batches}·{mini}⌋"
    yield Quantity("async: prompts in flight, at most", "prompts", flying, formula)
    formula, rows = f"{flying}·{request.n}", one.trajectories_in_flight
    yield Quantity("async: trajectories in flight, at most", "trajectories", rows, formula)
    formula, rows = f"({flying} - {request.q})·{request.n}", one.stale_trajectories
    yield Quantity("async: stale trajectories, at most", "trajectories", rows, formula)


def _validation(request: Request) -> Iterator[Quantity]:
    asked, origin = request.validation, request.settings.origin
    size, n = asked.prompts_per_call, asked.samples_per_prompt
    yield Quantity("validation batch", "prompts per call", size or "all", "", origin("data.val_batch_size"))
    yield Quantity("validation responses", "responses per prompt", n, "", origin(f"{ROLLOUT}.val_kwargs.n"))
    if size:
        yield Quantity("validation trajectories", "trajectories per call", size * n, f"{size}·{n}")
