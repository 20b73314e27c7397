"""The batch plan of supervised training: the smaller sister of `batch_plan/resolve.py`, and like it a reader
of batch-size keys.

In: the configuration, how many devices and conversations there are. Out: one `SFTPlan`, or one `ConfigError`
with every broken rule and remedies that work together.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial

from hydraflow.batch_plan import repair
from hydraflow.batch_plan.device_rules import device_cures, judge_devices
from hydraflow.batch_plan.layout import Cluster, Devices, Layout, Pool, ShapeNumbers
from hydraflow.batch_plan.parts import (
    MicroRequest,
    Plan,
    Quantity,
    RolePlan,
    multiples,
    no_sizes,
    warmup_steps,
    warmup_violations,
)
from hydraflow.batch_plan.quantities import layout_quantities, micro_quantities, run_quantities
from hydraflow.batch_plan.repair import BATCH, Cure, Violation
from hydraflow.batch_plan.settings import Settings, value_at
from hydraflow.batch_plan.topology import NODES, PER_NODE, RoleDevices, Topology, fsdp_degrees
from hydraflow.errors import ConfigError
from hydraflow.schema import SFTConfig

_BATCH = "data.train_batch_size"


@dataclass(frozen=True)
class SFTPlan(Plan):
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


@dataclass(frozen=True)
class _Request:
    settings: Settings[SFTConfig]
    topology: Topology
    layout: Layout | None
    """None: the devices do not add up."""
    conversations: int | None
    micro: MicroRequest

    @property
    def config(self) -> SFTConfig:
        return self.settings.config

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
        trainer = self.config.trainer
        return trainer.total_training_steps or self.steps_per_epoch * trainer.total_epochs


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

    def judge(values: Mapping[str, object]) -> tuple[_Request, list[Violation]]:
        return _judge(settings.changed(values), conversations, devices_per_node, shape)

    request, violations = judge({})
    if violations:
        raise ConfigError(repair.problems(lambda values: judge(values)[1], partial(value_at, config)))
    return _plan(request)


def _judge(
    settings: Settings[SFTConfig],
    conversations: int | None,
    devices_per_node: int,
    shape: ShapeNumbers | None,
) -> tuple[_Request, list[Violation]]:
    small = no_sizes(_sizes(settings.config), partial(value_at, settings.defaults))
    keys = {violation.field for violation in small}
    settings = settings.changed(dict.fromkeys(keys, 1))
    topology = _read_topology(settings.config, devices_per_node)
    devices = judge_devices(topology, {"model": shape} if shape else {})
    layout = devices.layouts.get("model")
    request = _Request(settings, topology, layout, conversations, _read_micro(settings.config, layout))
    found = [*devices.violations, *(violation for rule in RULES for violation in rule(request))]
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
        sharers=layout.context if layout else 1,
    )


def _ranks_share_the_batch(request: _Request) -> Iterator[Violation]:
    if request.batch % request.ranks == 0:
        return

    def cures() -> Iterator[Cure]:
        most = request.conversations or request.batch * request.ranks
        for batch in multiples(min(request.batch, most), request.ranks):
            yield {_BATCH: batch}
        model = request.topology.roles["model"]
        if request.batch < request.ranks:
            yield from device_cures(request.topology, model, model.model_parallel)
            yield {NODES: 1, PER_NODE: model.model_parallel}

    text = f"conversations cannot be shared equally by {request.ranks} data ranks"
    yield Violation("dp | batch", BATCH, _BATCH, request.batch, text, cures)


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
    batch, total = request.batch, request.total_steps
    rows, warmup = batch // request.ranks, warmup_steps(request.config.optim, request.total_steps)
    micro = request.micro.plan(rows_per_rank=rows, row_tokens=request.config.data.max_length, exact=True)
    role = RolePlan(
        data_ranks=request.ranks,
        mini_batch_prompts=batch,
        mini_batch_trajectories=batch,
        rows_per_rank=rows,
        epochs=1,
        shuffle=False,
        micro=micro,
        optimizer_steps_per_step=1,
        accumulation_steps=rows // micro.rows if micro.rows else None,
        warmup_steps=warmup,
        decay_steps=max(0, total - warmup),
        total_optimizer_steps=total,
    )
    left = (request.conversations or 0) % batch
    text = (
        f"{left} of {request.conversations} training conversations fill no step of {batch}: an epoch leaves"
    )
    return SFTPlan(
        conversations_per_step=batch,
        role=role,
        cluster=request.topology.cluster,
        layouts={"model": request.layout},
        steps_per_epoch=request.steps_per_epoch,
        total_steps=total,
        quantities=tuple(_quantities(request, role, request.layout)),
        notes=(f"{text} them out",) if left else (),
    )


def _quantities(request: _Request, role: RolePlan, layout: Layout) -> Iterator[Quantity]:
    origin, config, rows = request.settings.origin, request.config, role.rows_per_rank
    batch, trainer, kind = request.batch, config.trainer, config.optim.lr_scheduler_type
    yield from layout_quantities(layout)
    yield Quantity("conversations per step", "conversations", batch, "", origin(_BATCH))
    yield Quantity("rows per data rank", "conversations", rows, f"{batch}/{role.data_ranks}")
    given = origin(request.micro.deciding_key)
    yield from micro_quantities(request.micro, role.micro, given, config.data.max_length)
    if role.accumulation_steps is not None:
        formula = f"{rows}/{role.micro.rows}"
        yield Quantity("accumulation steps", "micro-batches", role.accumulation_steps, formula)
    yield from run_quantities(
        None if request.conversations is None else request.steps_per_epoch,
        f"⌊{request.conversations}/{batch}⌋",
        trainer.total_epochs,
        trainer.total_training_steps,
        origin("trainer.total_training_steps"),
    )
    if role.warmup_steps:
        yield Quantity("warm-up", "steps", role.warmup_steps)
    if role.decay_steps and kind != "constant":
        formula = f"{request.total_steps} - {role.warmup_steps}"
        yield Quantity(f"{kind} decay", "steps", role.decay_steps, formula)
