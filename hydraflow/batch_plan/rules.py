"""Rules for a run's batch sizes, once its devices add up.

In: a `Request`; for generation alone, its section `rollout`. Out: broken rules, each with its numbers. A new
rule is a function from the request to violations, in `RULES`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

from hydraflow.batch_plan import targets
from hydraflow.batch_plan.parts import KEEP_GROUPS, RoleRequest, divisors
from hydraflow.batch_plan.repair import BATCH, BUDGET, MICRO, SCHEDULE, Fix, Violation
from hydraflow.batch_plan.request import GEN_BATCH, PER_ROUND, ROUNDS, SAMPLES, TRAIN_BATCH, Request
from hydraflow.batch_plan.topology import PER_NODE, ROLLOUT
from hydraflow.generation.config import GENERATION_ENGINES, SamplingConfig, least_batched_tokens


def judge_batches(request: Request) -> list[Violation]:
    """Every broken rule, each once."""
    found: dict[str, Violation] = {}
    for rule in RULES:
        for violation in rule(request):
            found.setdefault(violation.rule, violation)
    doubtful = request.numbers.doubtful
    return [one for one in found.values() if one.field not in doubtful or one.stage not in (BATCH, MICRO)]


def _step_violation(request: Request, rule: str, field: str, value: object, text: str) -> Violation:
    return Violation(rule, BATCH, field, value, text, partial(targets.fixes, request))


def _mini_batches_fill_the_step(request: Request) -> Iterator[Violation]:
    """M divides Q."""
    for role in request.roles:
        if request.q % role.mini:
            key, given = role.mini_key, request.numbers.handles.get(role.mini_key)
            derived = request.numbers.key("Q") != TRAIN_BATCH
            step = f"{request.q} prompts per step" if derived else f"{TRAIN_BATCH}={request.q}"
            makes = f"makes {role.mini} prompts per optimizer step, which " if given else ""
            text = f"{makes}must divide {step}"
            yield _step_violation(request, f"M | Q:{key}", key, given or role.mini, text)


def _ranks_share_a_mini_batch(request: Request) -> Iterator[Violation]:
    """dp divides G, or M where groups stay together."""
    for role in request.roles:
        g_all, together = role.mini * request.n, role.micro.together
        shared = role.ranks is None or g_all % (role.ranks * together) == 0
        if shared or request.q * request.n < (role.ranks or 1):
            continue
        key, given = role.mini_key, request.numbers.handles.get(role.mini_key)
        makes = f"makes {role.mini} prompts, which " if given else ""
        ranks = f"{role.ranks} data ranks of the {role.name}"
        text = f"{makes}times {SAMPLES}={request.n} is {g_all} trajectories per optimizer step, which {ranks}"
        text += " cannot share equally"
        if together > 1:
            text = f"{makes}must be a multiple of the {ranks}: {KEEP_GROUPS}=true gives each whole groups"
        fixes = partial(_with_fewer_devices, request, role)
        yield Violation(f"dp | G:{role.name}", BATCH, key, given or role.mini, text, fixes)


def _with_fewer_devices(request: Request, role: RoleRequest) -> Iterator[Fix]:
    yield from targets.fixes(request)
    layout = request.layouts[role.name]
    shares = role.mini * request.n // role.micro.together
    ranks = [d for d in divisors(shares) if d < layout.data_ranks]
    alone = all(one.devices == layout.devices for one in request.layouts.values())
    if ranks and alone and len(layout.devices) == layout.devices_per_node:
        yield {PER_NODE: ranks[-1] * layout.model_parallel}
    if role.micro.together > 1:
        yield {KEEP_GROUPS: False}


def _every_rank_has_rows(request: Request) -> Iterator[Violation]:
    """S is at least dp, for every role that receives the step's trajectories."""
    for role, layout in request.layouts.items():
        calls, what = (request.prompts_per_call, "call") if role == "rollout" else (request.q, "step")
        rows = calls * request.n
        if rows >= layout.data_ranks:
            continue
        key = request.call_key if role == "rollout" else request.numbers.key("Q")
        given = request.numbers.handles.get(key)
        text = "is fewer" if given else f"times {SAMPLES}={request.n} is {rows}"
        text += f" trajectories per {what}" + (" than" if given else ", fewer than")
        text += f" {layout.data_ranks} data ranks of the {role}"
        fixes = partial(_larger_calls, request, layout.data_ranks)
        yield Violation(f"S >= dp:{role}", BATCH, key, given or calls, text, fixes)


def _larger_calls(request: Request, ranks: int) -> Iterator[Fix]:
    yield from targets.fixes(request)
    if request.call_key == GEN_BATCH:
        yield {GEN_BATCH: -(-ranks // request.n)}
        yield {GEN_BATCH: None}


def _prompts_make_a_step(request: Request) -> Iterator[Violation]:
    """An epoch holds at least one whole batch."""
    if request.prompts is None or request.prompts >= request.q:
        return
    key, there = request.numbers.key("Q"), f"the {request.prompts}"
    text = f"makes {request.q} prompts per step, more than {there} that are available"
    if key == TRAIN_BATCH:
        text = f"is more than {there} available training prompts"
    text += ", so no step can be taken"
    yield _step_violation(request, "prompts >= Q", key, request.numbers.shown("Q"), text)


def _groups_can_differ(request: Request) -> Iterator[Violation]:
    """The responses of a group of one never differ in score, so dynamic sampling would never end."""
    if request.filter and request.n < 2:
        keeps = "algorithm.filter_groups.enable=true keeps prompts whose responses score differently"
        text = f"gives one response per prompt, and at least 2 are needed: {keeps}"
        yield _step_violation(request, "n >= 2", request.numbers.key("n"), request.numbers.shown("n"), text)


def _micro_batches_fill_a_rank(request: Request) -> Iterator[Violation]:
    """m divides g, where micro-batches of an update have a fixed size."""
    for role in request.roles:
        formula = f"{role.mini}·{request.n}/{role.ranks}"
        yield from role.micro_batch_violations(request.n, request.longest_row, formula)


def _token_budgets_hold_a_row(request: Request) -> Iterator[Violation]:
    """L·sp is at least the longest row, or the longest group that is kept together."""
    formula = f"{request.longest_prompt} + {request.longest_response}"
    for micro in request.passes:
        yield from micro.token_budget_violations(request.longest_row, formula)


def _micro_batches_hold_groups(request: Request) -> Iterator[Violation]:
    """n divides m, with `trainer.keep_groups`."""
    for micro in request.passes:
        yield from micro.group_violations()


def engine_violations(
    rollout: SamplingConfig, section: str, *, tokens: tuple[int, int], device_type: str
) -> Iterator[Violation]:
    """Serving engines refuse rows above max_model_len. vLLM also refuses a max_num_batched_tokens below
    max_num_seqs or, without chunked prefill, below a whole row. `section`: configuration key of `rollout`;
    `tokens`: of the longest prompt and the longest response."""
    engine = GENERATION_ENGINES.get(rollout.name)
    if engine is None or "max_model_len" not in engine.reads:
        return
    row, longest, key = sum(tokens), rollout.max_model_len, f"{section}.max_model_len"
    if longest is not None and longest < row:
        fitting: list[Fix] = [{key: None}, {key: row}]
        text = f"must hold the longest row, {tokens[0]} + {tokens[1]} = {row} tokens"
        yield Violation("max_model_len", BUDGET, key, longest, text, fitting)
    if "max_num_batched_tokens" not in engine.reads:
        return
    key = f"{section}.max_num_batched_tokens"
    batched, most = rollout.max_num_batched_tokens, rollout.max_num_seqs
    least = least_batched_tokens(rollout, row, device_type)
    if batched is None or batched >= least:
        return
    because = "vLLM decodes one token of each sequence at a time"
    text = f"must be at least {section}.max_num_seqs={most}: {because}"
    if batched >= most:
        chunked = f"{section}.enable_chunked_prefill"
        default = f"{chunked}=null on a CPU"
        because = default if rollout.enable_chunked_prefill is None else f"{chunked}=false"
        text = f"must hold a whole row of {longest or row} tokens, because {because}"
    yield Violation("max_num_batched_tokens", BUDGET, key, batched, text, [{key: least}])


def _engine_holds_a_row(request: Request) -> Iterator[Violation]:
    """The engine's limits hold the longest row."""
    tokens = (request.longest_prompt, request.longest_response)
    yield from engine_violations(request.rollout, ROLLOUT, tokens=tokens, device_type=request.device_type)


def _filter_can_fill_a_step(request: Request) -> Iterator[Violation]:
    """The prompts that dynamic sampling may take are enough for a step, and the data has that many."""
    if not request.filter:
        return
    most, size = request.filter.most_prompts, request.filter.prompts_per_call
    key = "algorithm.filter_groups.max_num_gen_batches"
    if most and most < request.q:
        calls = most // size
        text = f"batches of {size} prompts are {most}, fewer than the {request.q} of a step"
        fixes = [{key: -(-request.q // size)}, {GEN_BATCH: -(-request.q // calls)}, {key: 0}]
        yield Violation("filter", BUDGET, key, calls, text, fixes)
    if request.call_key == GEN_BATCH and request.prompts is not None and size > request.prompts:
        text = f"is more than the {request.prompts} available training prompts"
        fewer: list[Fix] = [{GEN_BATCH: None}, {GEN_BATCH: request.prompts}]
        yield Violation("gen batch", BATCH, GEN_BATCH, size, text, fewer)


def _rounds_fill_the_step(request: Request) -> Iterator[Violation]:
    """P·R·M = Q: a step of asynchronous training is P rounds of R mini-batches."""
    one, q, mini = request.asynchronous, request.q, request.actor.mini
    if one is None or q % mini or one.rounds_per_sync * one.prompts_per_round == q:
        return
    updates, rounds, per_round = q // mini, one.rounds_per_sync, one.mini_batches_per_round
    first, other = (PER_ROUND, per_round), (ROUNDS, rounds)
    if not request.settings.strength(PER_ROUND):
        first, other = other, first  # the user wrote only that one
    text = f"times {other[0]}={other[1]} is {rounds * per_round} mini-batches, not the {updates} of a step"
    text += f" ({q} prompts / {mini})"
    fixes: list[Fix] = [{PER_ROUND: updates // rounds}] if updates % rounds == 0 else []
    fixes += [{ROUNDS: updates // per_round}] if updates % per_round == 0 else []
    fixes += [{ROUNDS: 1, PER_ROUND: updates}]
    if request.numbers.key("Q") == TRAIN_BATCH:
        fixes += [{TRAIN_BATCH: rounds * per_round * mini}]
    yield Violation("rounds", SCHEDULE, *first, text, fixes)


def _warmups_end(request: Request) -> Iterator[Violation]:
    """Warm-up and decay fit the run."""
    for role in request.roles:
        yield from role.warmup_violations(request.total_steps)


RULES: list[Callable[[Request], Iterator[Violation]]] = [
    _mini_batches_fill_the_step,
    _ranks_share_a_mini_batch,
    _every_rank_has_rows,
    _prompts_make_a_step,
    _groups_can_differ,
    _micro_batches_fill_a_rank,
    _micro_batches_hold_groups,
    _token_budgets_hold_a_row,
    _engine_holds_a_row,
    _filter_can_fill_a_step,
    _rounds_fill_the_step,
    _warmups_end,
]
