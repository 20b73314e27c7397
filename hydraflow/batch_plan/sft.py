"""The batch plan of supervised training: the smaller sister of `batch_plan/resolve.py`, and like it a reader
of batch-size keys.

In: the configuration, how many devices and conversations there are. Out: one `SFTPlan`, or one `ConfigError`
with every broken rule and remedies that work together.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from functools import partial

from hydraflow.batch_plan import repair
from hydraflow.batch_plan.device_rules import device_cures, judge_devices
from hydraflow.batch_plan.layout import Cluster, Devices, Layout, Pool, ShapeNumbers
from hydraflow.batch_plan.parts import (
    MicroPlan,
    MicroRequest,
    Quantity,
    RolePlan,
    multiples,
    no_sizes,
    warmup_steps,
    warmup_violations,
)
from hydraflow.batch_plan.quantities import DERIVED, layout_quantities, micro_quantities
from hydraflow.batch_plan.repair import BATCH, Cure, Violation
from hydraflow.batch_plan.settings import Settings, value_at
from hydraflow.batch_plan.topology import NODES, PER_NODE, RoleDevices, Topology, fsdp_degrees
from hydraflow.errors import ConfigError
from hydraflow.schema import SFTConfig

_BATCH = "data.train_batch_size"


@dataclass(frozen=True)
class SFTPlan:
    """Every number that supervised training takes from the batch-size keys."""

    conversations_per_step: int
    """Conversations in one optimizer step, over all data ranks; a training step is one optimizer step."""
    role: RolePlan
    """How the model's update cuts them; a conversation is a prompt with one response."""
    cluster: Cluster
    layouts: dict[str, Layout]
    """Of the one role, `model`."""
    steps_per_epoch: int
    """Whole batches in one pass over the data; 0: the number of conversations is not known."""
    total_steps: int
    """Training steps of the run; 0: not known."""
    quantities: tuple[Quantity, ...]
    """All of it again for people: unit, formula, provenance."""
    notes: tuple[str, ...]
    """What is to be said aloud: conversations that no step takes."""

    def to_json(self) -> str:
        """The content of `plan.json`; device ranges as [first, last + 1]."""
        return json.dumps(
            asdict(self), indent=2, ensure_ascii=False, default=lambda part: [part.start, part.stop]
        )


@dataclass(frozen=True)
class _Facts:
    conversations: int | None
    devices_per_node: int
    shapes: Mapping[str, ShapeNumbers]


@dataclass(frozen=True)
class _Request:
    settings: Settings[SFTConfig]
    config: SFTConfig
    topology: Topology
    layout: Layout | None
    """None: the devices do not add up."""
    conversations: int | None
    micro: MicroRequest

    @property
    def batch(self) -> int:
        return self.config.data.train_batch_size

    @property
    def ranks(self) -> int:
        """Data ranks; 1 where the devices do not add up, which is another rule's matter."""
        return self.layout.data_ranks if self.layout else 1

    @property
    def steps_per_epoch(self) -> int:
        return (self.conversations or 0) // self.batch

    @property
    def total_steps(self) -> int:
        return (
            self.config.trainer.total_training_steps
            or self.steps_per_epoch * self.config.trainer.total_epochs
        )


def resolve_sft_plan(
    config: SFTConfig,
    *,
    conversations: int | None,
    devices_per_node: int = 2,
    origins: Mapping[str, str] | None = None,
    shape: ShapeNumbers | None = None,
) -> SFTPlan:
    """The plan of a run over so many training conversations (None: not known yet).

    `devices_per_node`: devices of a machine where `trainer.n_gpus_per_node` does not say it; `origins`: key
    -> where its value is from; `shape`: what the model can be divided into. Raises ConfigError with all
    broken rules and remedies.

    >>> config = SFTConfig()
    >>> config.data.train_batch_size = 8
    >>> plan = resolve_sft_plan(config, conversations=100)
    >>> plan.role.rows_per_rank, plan.total_steps
    (4, 12)
    """
    settings = Settings(config, SFTConfig(), origins or {})
    facts = _Facts(conversations, devices_per_node, {"model": shape} if shape else {})
    request, violations = _judge(settings, facts)
    if violations:

        def judged(values: Mapping[str, object]) -> list[Violation]:
            return _judge(settings.changed(values), facts)[1] if values else violations

        raise ConfigError(repair.problems(judged, partial(value_at, config)))
    return _plan(request)


def _judge(settings: Settings[SFTConfig], facts: _Facts) -> tuple[_Request, list[Violation]]:
    small = no_sizes(_sizes(settings.config), partial(value_at, settings.defaults))
    if small:
        settings = settings.changed({violation.field: 1 for violation in small})
    config: SFTConfig = settings.config
    topology = _read_topology(config, facts.devices_per_node)
    devices = judge_devices(topology, facts.shapes)
    layout = devices.layouts.get("model")
    request = _Request(settings, config, topology, layout, facts.conversations, _read_micro(config, layout))
    found = [*devices.violations, *(violation for rule in RULES for violation in rule(request))]
    keys = {violation.field for violation in small}
    return request, [*small, *(violation for violation in found if violation.field not in keys)]


def _sizes(config: SFTConfig) -> list[tuple[str, int | None]]:
    data, trainer = config.data, config.trainer
    return [
        (_BATCH, data.train_batch_size),
        ("data.micro_batch_size_per_gpu", data.micro_batch_size_per_gpu),
        ("data.max_token_len_per_gpu", data.max_token_len_per_gpu),
        ("data.max_length", data.max_length),
        ("fsdp_config.ulysses_sequence_parallel_size", config.fsdp_config.ulysses_sequence_parallel_size),
        (NODES, trainer.nnodes),
        (PER_NODE, trainer.n_gpus_per_node),
        ("trainer.total_epochs", trainer.total_epochs),
        ("trainer.total_training_steps", trainer.total_training_steps),
    ]


def _read_topology(config: SFTConfig, devices_per_node: int) -> Topology:
    per_node = config.trainer.n_gpus_per_node or devices_per_node
    pool = Pool("trainer", config.trainer.nnodes, per_node, 0)
    model = RoleDevices(
        role="model",
        engine="fsdp2",
        devices=pool.devices,
        devices_per_node=per_node,
        pool=pool.name,
        mapping=None,
        twice=Devices(()),
        fault="",
        degrees=fsdp_degrees(config.fsdp_config, "fsdp_config"),
    )
    return Topology(Cluster((pool,)), {"model": model}, NODES, PER_NODE, None, None, frozenset(), ())


def _read_micro(config: SFTConfig, layout: Layout | None) -> MicroRequest:
    return MicroRequest(
        purpose="the update",
        rows=config.data.micro_batch_size_per_gpu,
        rows_key="data.micro_batch_size_per_gpu",
        dynamic=config.data.use_dynamic_bsz,
        max_tokens=config.data.max_token_len_per_gpu,
        tokens_key="data.max_token_len_per_gpu",
        switch_key="data.use_dynamic_bsz",
        sharers=layout.context if layout else 1,
    )


def _ranks_share_the_batch(request: _Request) -> Iterator[Violation]:
    if request.batch % request.ranks == 0:
        return
    text = f"conversations cannot be shared equally by {request.ranks} data ranks"
    yield Violation("dp | batch", BATCH, _BATCH, request.batch, text, partial(_batches, request))


def _batches(request: _Request) -> Iterator[Cure]:
    """Other batches that the data ranks can share, and fewer devices."""
    most = request.conversations or request.batch * request.ranks
    for batch in multiples(min(request.batch, most), request.ranks):
        yield {_BATCH: batch}
    model = request.topology.roles["model"]
    if request.batch < request.ranks:
        yield from device_cures(request.topology, model, model.model_parallel)
        yield {NODES: 1, PER_NODE: model.model_parallel}


def _micro_batches_fill_a_rank(request: _Request) -> Iterator[Violation]:
    rows, left = divmod(request.batch, request.ranks)
    if left == 0:
        yield from request.micro.divisor_violations(
            rows, request.config.data.max_length, f"{request.batch}/{request.ranks}"
        )


def _token_budget_holds_a_row(request: _Request) -> Iterator[Violation]:
    yield from request.micro.token_budget_violations(request.config.data.max_length, "data.max_length")


def _conversations_make_a_step(request: _Request) -> Iterator[Violation]:
    there = request.conversations
    if there is None or there >= request.batch:
        return
    text = f"is more than the {there} training conversations that there are, so no step can be taken"

    def cures() -> Iterator[Cure]:
        if batch := there // request.ranks * request.ranks:
            yield {_BATCH: batch}
        if there:
            yield {_BATCH: 1, NODES: 1, PER_NODE: request.topology.roles["model"].model_parallel}

    yield Violation("conversations >= batch", BATCH, _BATCH, request.batch, text, cures, advice="more data")


def _warmup_ends(request: _Request) -> Iterator[Violation]:
    yield from warmup_violations(request.config.optim, "optim", request.total_steps)


RULES: list[Callable[[_Request], Iterator[Violation]]] = [
    _ranks_share_the_batch,
    _micro_batches_fill_a_rank,
    _token_budget_holds_a_row,
    _conversations_make_a_step,
    _warmup_ends,
]


def _plan(request: _Request) -> SFTPlan:
    assert request.layout is not None
    rows = request.batch // request.ranks
    micro = request.micro.plan(rows_per_rank=rows, row_tokens=request.config.data.max_length, exact=True)
    return SFTPlan(
        conversations_per_step=request.batch,
        role=(role := _role_plan(request, rows, micro)),
        cluster=request.topology.cluster,
        layouts={"model": request.layout},
        steps_per_epoch=request.steps_per_epoch,
        total_steps=request.total_steps,
        quantities=tuple(_quantities(request, role, request.layout)),
        notes=tuple(_left_over(request)),
    )


def _role_plan(request: _Request, rows: int, micro: MicroPlan) -> RolePlan:
    warmup = warmup_steps(request.config.optim, request.total_steps)
    return RolePlan(
        data_ranks=request.ranks,
        mini_batch_prompts=request.batch,
        mini_batch_trajectories=request.batch,
        rows_per_rank=rows,
        epochs=1,
        shuffle=False,
        micro=micro,
        optimizer_steps_per_step=1,
        accumulation_steps=rows // micro.rows if micro.rows else None,
        warmup_steps=warmup,
        decay_steps=max(0, request.total_steps - warmup),
        total_optimizer_steps=request.total_steps,
    )


def _left_over(request: _Request) -> Iterator[str]:
    if request.conversations is not None and (left := request.conversations % request.batch):
        yield (
            f"{left} of {request.conversations} training conversations fill no step of {request.batch}: an"
            " epoch leaves them out"
        )


def _quantities(request: _Request, role: RolePlan, layout: Layout) -> Iterator[Quantity]:
    origin, config = request.settings.origin, request.config
    batch, dp, trainer = request.batch, request.ranks, config.trainer
    yield from layout_quantities(layout)
    yield Quantity("conversations per step", "conversations", batch, "", origin(_BATCH))
    yield Quantity("rows per data rank", "conversations", role.rows_per_rank, f"{batch}/{dp}", DERIVED)
    yield from micro_quantities(
        request.micro, role.micro, origin(request.micro.deciding_key), config.data.max_length
    )
    if role.accumulation_steps is not None:
        formula = f"{role.rows_per_rank}/{role.micro.rows}"
        yield Quantity("accumulation steps", "micro-batches", role.accumulation_steps, formula, DERIVED)
    if request.conversations is not None:
        formula = f"⌊{request.conversations}/{batch}⌋"
        yield Quantity("steps per epoch", "steps", request.steps_per_epoch, formula, DERIVED)
    if trainer.total_training_steps is not None:
        yield Quantity(
            "training steps",
            "steps",
            trainer.total_training_steps,
            "",
            origin("trainer.total_training_steps"),
        )
    elif request.total_steps:
        formula = f"steps per epoch · epochs = {request.steps_per_epoch}·{trainer.total_epochs}"
        yield Quantity("training steps", "steps", request.total_steps, formula, DERIVED)
    if role.warmup_steps:
        yield Quantity("warm-up", "steps", role.warmup_steps, "", DERIVED)
    if role.decay_steps and config.optim.lr_scheduler_type != "constant":
        formula = f"{request.total_steps} - {role.warmup_steps}"
        yield Quantity(f"{config.optim.lr_scheduler_type} decay", "steps", role.decay_steps, formula, DERIVED)
