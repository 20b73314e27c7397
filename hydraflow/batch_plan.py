"""The batch plan of reinforcement learning: every batch-size number of a run, resolved and checked before anything starts.

In: the configuration, how many processes and prompts there are, which roles run. Out: one `BatchPlan`, or one `ConfigError`
with every broken rule. `batch_plan_request.py` reads the keys.

Letters: Q prompts per step, n trajectories per prompt, S = Q·n; M prompts per optimizer step, G = M·n; dp data ranks,
g = G/dp; m rows per data rank in one forward; E passes; K = (Q/M)·E optimizer steps per step; P, R longest prompt and response.

A new rule is a function from the `Request` to problems, added to `RULES`; a new number is a line in `_quantities`.
Left out on purpose: which rows go where (`trainer/mini_batches.py`), how tables look (`batch_plan_table.py`).
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Collection, Iterator
from dataclasses import asdict, dataclass
from functools import partial

from hydraflow.batch_plan_parts import (
    MicroPlan,
    MicroRequest,
    Quantity,
    RolePlan,
    divisors,
    nearest,
    not_positive,
    options,
    provenance,
    warmup_problems,
    warmup_steps,
)
from hydraflow.batch_plan_request import ROLLOUT, TRAIN_BATCH, Request, RoleRequest, read, sizes
from hydraflow.errors import ConfigError, Problem
from hydraflow.schema import PPOConfig


@dataclass(frozen=True)
class ValidationPlan:
    """How held-out prompts are sampled."""

    prompts_per_call: int | None
    """Prompts in one call; None: all at once."""
    samples_per_prompt: int
    """Responses per prompt."""


@dataclass(frozen=True)
class BatchPlan:
    """Every number that the running code takes from the batch-size keys."""

    prompts_per_step: int
    samples_per_prompt: int
    trajectories_per_step: int
    rollout_ranks: int
    """Processes that sample, each a part of the prompts."""
    actor: RolePlan
    critic: RolePlan | None
    old_log_prob: MicroPlan
    ref: MicroPlan | None
    values: MicroPlan | None
    validation: ValidationPlan
    steps_per_epoch: int
    """Whole batches in one pass over the prompts; 0: the number of prompts is not known."""
    total_steps: int
    """Training steps of the run; 0: not known."""
    quantities: tuple[Quantity, ...]
    """All of it again for people: unit, formula, provenance."""
    notes: tuple[str, ...]
    """Keys that were given and have no effect."""

    def to_json(self) -> str:
        """The content of `plan.json`."""
        return json.dumps(asdict(self), indent=2, ensure_ascii=False)


def resolve_plan(
    config: PPOConfig, *, processes: int, prompts: int | None, critic: bool, reference: bool, given: Collection[str] = ()
) -> BatchPlan:
    """The plan of a run on `processes` devices over `prompts` training prompts (None: not known yet).

    `critic`, `reference`: whether those roles run. `given`: keys of the command line, for the provenance of each number.
    Raises ConfigError with all broken rules and the nearest legal values.

    >>> config = PPOConfig()
    >>> config.data.train_batch_size, config.actor_rollout_ref.actor.ppo_mini_batch_size = 8, 4
    >>> plan = resolve_plan(config, processes=2, prompts=100, critic=False, reference=False)
    >>> plan.actor.rows_per_rank, plan.actor.optimizer_steps_per_step, plan.total_steps
    (2, 2, 12)
    """
    if problems := not_positive(sizes(config)):
        raise ConfigError(problems)
    request = read(config, processes=processes, prompts=prompts, critic=critic, reference=reference)
    if problems := list(dict.fromkeys(problem for rule in RULES for problem in rule(request))):
        raise ConfigError(problems)
    return _plan(request, given)


# --- rules: each names its numbers and the nearest legal values ----------------------------------------------------------


def _mini_batches_fill_the_step(request: Request) -> Iterator[Problem]:
    """M divides Q."""
    for role in request.roles:
        if request.q % role.mini == 0:
            continue
        yield Problem(role.mini_key, role.mini, f"must divide {TRAIN_BATCH}={request.q}", _step_remedy(request, role))


def _step_remedy(request: Request, role: RoleRequest) -> str:
    """Another mini-batch, or another step; where neither alone is legal, both."""
    minis = [one.mini for one in request.roles]
    whole = math.lcm(*minis)
    shared = all(mini * request.n % request.processes == 0 for mini in minis)
    steps = [whole * k for k in (request.q // whole, request.q // whole + 1) if k] if shared else []
    either = [options(role.mini_key, nearest(role.mini, _legal_minis(request))), options(TRAIN_BATCH, nearest(request.q, steps))]
    return " or ".join(filter(None, either)) or _one_mini_batch(request, _rounded_up(request))


def _one_mini_batch(request: Request, prompts: int) -> str:
    """The overrides of a plan with one mini-batch of so many prompts."""
    keys = dict.fromkeys([TRAIN_BATCH, *(role.mini_key for role in request.roles)])
    return " ".join(f"{key}={prompts}" for key in keys)


def _shared_prompts(request: Request) -> int:
    """The fewest prompts whose trajectories the data ranks can share."""
    return request.processes // math.gcd(request.processes, request.n)


def _rounded_up(request: Request) -> int:
    """The smallest step, not below the asked one, that the data ranks can share."""
    unit = _shared_prompts(request)
    return -(-request.q // unit) * unit


def _ranks_share_a_mini_batch(request: Request) -> Iterator[Problem]:
    """dp divides G."""
    for role in request.roles:
        g_all = role.mini * request.n
        if g_all % request.processes == 0 or _too_few_rows(request):
            continue
        rule = (
            f"times {ROLLOUT}.n={request.n} is {g_all} trajectories per optimizer step, "
            f"which {request.processes} data ranks cannot share equally"
        )
        yield Problem(role.mini_key, role.mini, rule, _rank_remedy(request, role))


def _rank_remedy(request: Request, role: RoleRequest) -> str:
    remedy = [options(role.mini_key, nearest(role.mini, _legal_minis(request)))]
    per_prompt = range(1, request.n + request.processes + 1)
    remedy.append(options(f"{ROLLOUT}.n", nearest(request.n, [n for n in per_prompt if role.mini * n % request.processes == 0])))
    if request.config.trainer.nnodes == 1:
        fewer = nearest(request.processes, [d for d in divisors(role.mini * request.n) if d < request.processes])
        remedy.append(options("trainer.n_gpus_per_node", fewer))
    return " or ".join(filter(None, remedy))


def _every_rank_has_rows(request: Request) -> Iterator[Problem]:
    """S is at least dp."""
    if not _too_few_rows(request):
        return
    rule = f"times {ROLLOUT}.n={request.n} is {request.q * request.n} trajectories per step, fewer than {request.processes} data ranks"
    yield Problem(TRAIN_BATCH, request.q, rule, _one_mini_batch(request, _rounded_up(request)))


def _micro_batches_fill_a_rank(request: Request) -> Iterator[Problem]:
    """m divides g, where micro-batches of an update have a fixed size."""
    for role in request.roles:
        rows, left = divmod(role.mini * request.n, request.processes)
        if left == 0:
            yield from role.micro.divisor_problems(rows, f"{role.mini}·{request.n}/{request.processes}")


def _token_budgets_hold_a_row(request: Request) -> Iterator[Problem]:
    """L is at least P + R."""
    data = request.config.data
    for micro in request.passes:
        yield from micro.token_budget_problems(request.longest_row, f"{data.max_prompt_length} + {data.max_response_length}")


def _prompts_make_a_step(request: Request) -> Iterator[Problem]:
    """An epoch holds at least one whole batch."""
    if request.prompts is None or request.prompts >= request.q:
        return
    rule = f"is more than the {request.prompts} training prompts that there are, so no step can be taken"
    legal = [q for q in range(1, request.prompts + 1) if all(q % role.mini == 0 for role in request.roles)]
    unit = _shared_prompts(request)
    smaller = _one_mini_batch(request, request.prompts // unit * unit) if request.prompts >= unit else "more data, or fewer processes"
    yield Problem(TRAIN_BATCH, request.q, rule, f"{TRAIN_BATCH}={legal[-1]}" if legal else smaller)


def _warmups_end(request: Request) -> Iterator[Problem]:
    """Warm-up and decay fit the run."""
    for role in request.roles:
        yield from warmup_problems(role.optim, role.optim_key, request.total_steps)


RULES: list[Callable[[Request], Iterator[Problem]]] = [
    _every_rank_has_rows,
    _mini_batches_fill_the_step,
    _ranks_share_a_mini_batch,
    _micro_batches_fill_a_rank,
    _token_budgets_hold_a_row,
    _prompts_make_a_step,
    _warmups_end,
]


def _too_few_rows(request: Request) -> bool:
    return request.q * request.n < request.processes


def _legal_minis(request: Request) -> list[int]:
    """Mini-batch sizes, in prompts, that divide the step and that the data ranks can share."""
    return [m for m in divisors(request.q) if m * request.n % request.processes == 0]


# --- the plan ------------------------------------------------------------------------------------------------------------


def _plan(request: Request, given: Collection[str]) -> BatchPlan:
    s = request.q * request.n
    most_rows = -(-s // request.processes)
    forward = partial(MicroRequest.plan, rows_per_rank=most_rows, row_tokens=request.longest_row, exact=False)
    actor, critic = _role_plan(request, request.actor), _role_plan(request, request.critic) if request.critic else None
    return BatchPlan(
        prompts_per_step=request.q,
        samples_per_prompt=request.n,
        trajectories_per_step=s,
        rollout_ranks=request.processes,
        actor=actor,
        critic=critic,
        old_log_prob=(old_log_prob := forward(request.old_log_prob)),
        ref=(ref := forward(request.ref) if request.ref else None),
        values=(values := forward(request.values) if request.values else None),
        validation=ValidationPlan(request.val_prompts, request.val_n),
        steps_per_epoch=request.steps_per_epoch,
        total_steps=request.total_steps,
        quantities=tuple(_quantities(request, actor, critic, [old_log_prob, ref, values], given)),
        notes=tuple(note for micro in request.passes for note in micro.notes()),
    )


def _role_plan(request: Request, role: RoleRequest) -> RolePlan:
    trajectories = role.mini * request.n
    rows = trajectories // request.processes
    return RolePlan(
        data_ranks=request.processes,
        mini_batch_prompts=role.mini,
        mini_batch_trajectories=trajectories,
        rows_per_rank=rows,
        epochs=role.epochs,
        shuffle=role.shuffle,
        micro=role.micro.plan(rows_per_rank=rows, row_tokens=request.longest_row, exact=True),
        optimizer_steps_per_step=request.q // role.mini * role.epochs,
        warmup_steps=warmup_steps(role.optim, request.total_steps),
    )


def _quantities(
    request: Request, actor: RolePlan, critic: RolePlan | None, forward: list[MicroPlan | None], given: Collection[str]
) -> Iterator[Quantity]:
    """The plan for people, top down: the run, the step, each role's optimizer step, each pass's micro-batch."""
    origin = partial(provenance, request.config, PPOConfig(), given=given)
    yield from _run_quantities(request, origin)
    yield Quantity("prompts per step Q", "prompts", request.q, "", origin(key=TRAIN_BATCH))
    yield Quantity("trajectories per prompt n", "trajectories", request.n, "", origin(key=f"{ROLLOUT}.n"))
    yield Quantity("trajectories per step S", "trajectories", request.q * request.n, f"Q·n = {request.q}·{request.n}", "derived")
    yield Quantity("data ranks dp", "processes", request.processes, "one per process", "derived")
    yield from _role_quantities(request, request.actor, actor, origin)
    if request.critic and critic:
        yield from _role_quantities(request, request.critic, critic, origin)
    for micro, plan in zip([request.old_log_prob, request.ref, request.values], forward, strict=True):
        if micro and plan:
            yield micro.quantity(plan, origin(key=micro.deciding_key))
    yield Quantity("validation batch", "prompts per call", request.val_prompts or "all", "", origin(key="data.val_batch_size"))
    yield Quantity("validation responses", "responses per prompt", request.val_n, "", origin(key=f"{ROLLOUT}.val_kwargs.n"))


def _run_quantities(request: Request, origin: Callable[..., str]) -> Iterator[Quantity]:
    trainer, per_epoch = request.config.trainer, request.steps_per_epoch
    if request.prompts is not None:
        yield Quantity("training prompts", "prompts", request.prompts, "counted in the files", "derived")
        yield Quantity("steps per epoch", "steps", per_epoch, f"⌊prompts/Q⌋ = ⌊{request.prompts}/{request.q}⌋", "derived")
    if trainer.total_training_steps is not None:
        yield Quantity("training steps", "steps", trainer.total_training_steps, "", origin(key="trainer.total_training_steps"))
    elif request.total_steps:
        formula = f"steps per epoch · epochs = {per_epoch}·{trainer.total_epochs}"
        yield Quantity("training steps", "steps", request.total_steps, formula, "derived")


def _role_quantities(request: Request, role: RoleRequest, plan: RolePlan, origin: Callable[..., str]) -> Iterator[Quantity]:
    mini, n, dp, steps = role.mini, request.n, plan.data_ranks, plan.optimizer_steps_per_step
    yield Quantity(f"{role.name}: prompts per optimizer step M", "prompts", mini, "", origin(key=role.mini_key))
    trajectories = plan.mini_batch_trajectories
    yield Quantity(f"{role.name}: trajectories per optimizer step G", "trajectories", trajectories, f"M·n = {mini}·{n}", "derived")
    yield Quantity(f"{role.name}: rows per data rank g", "trajectories", plan.rows_per_rank, f"G/dp = {trajectories}/{dp}", "derived")
    yield role.micro.quantity(plan.micro, origin(key=role.micro.deciding_key))
    formula = f"(Q/M)·E = ({request.q}/{mini})·{role.epochs}"
    yield Quantity(f"{role.name}: optimizer steps per step K", "optimizer steps", steps, formula, "derived")
    if plan.warmup_steps:
        formula = f"{plan.warmup_steps}·K = {plan.warmup_steps * steps} optimizer steps"
        yield Quantity(f"{role.name}: warm-up", "training steps", plan.warmup_steps, formula, "derived")
