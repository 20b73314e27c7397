"""The batch plan of supervised training, and the reader of its batch-size keys.

In: the configuration, how many devices and conversations there are. Out: one `SFTPlan`, or one `ConfigError`
with every broken rule and remedies that work together.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial

from hydraflow.batch_plan import repair
from hydraflow.batch_plan.device_rules import device_fixes, judge_devices
from hydraflow.batch_plan.layout import Cluster, Layout, Pool, ShapeNumbers
from hydraflow.batch_plan.parts import (
    MicroRequest,
    Plan,
    Quantity,
    RolePlan,
    RoleRequest,
    multiples,
    no_sizes,
)
from hydraflow.batch_plan.quantities import layout_quantities, micro_quantities, run_quantities
from hydraflow.batch_plan.repair import BATCH, Fix, Violation
from hydraflow.batch_plan.settings import Settings, value_at
from hydraflow.batch_plan.topology import NODES, PER_NODE, RoleDevices, Topology, fsdp_degrees
from hydraflow.data.config import PairsConfig
from hydraflow.errors import ConfigError
from hydraflow.schema import RMConfig, SupervisedConfig

_BATCH = "data.train_batch_size"


@dataclass(frozen=True)
class SFTPlan(Plan):
    """Every number that supervised training takes from the batch-size keys."""

    conversations_per_step: int
    """Conversations, or pairs of them, in one optimizer step, over all data ranks; a training step is one
    optimizer step."""
    role: RolePlan
    """How the model's update splits them; a conversation is a prompt with one response, a pair has two."""
    cluster: Cluster
    layouts: dict[str, Layout]
    """Layout of the one role, `model`."""
    steps_per_epoch: int
    """Whole batches in one pass over the data; 0: the number of conversations is not known."""
    total_steps: int
    """Training steps of the run; 0: not known."""
    quantities: tuple[Quantity, ...]
    """The same numbers for the table: unit, formula, origin."""
    notes: tuple[str, ...]
    """Notes to print: conversations that no step uses."""


@dataclass(frozen=True)
class _Request:
    settings: Settings[SupervisedConfig]
    topology: Topology
    layout: Layout | None
    """None: the devices do not add up."""
    conversations: int | None
    """Number of conversations, or of pairs; None: not known."""
    role: RoleRequest
    unit: int
    """Model rows per conversation (1) or pair (2)."""
    row_tokens: int
    """Maximum tokens of one of them."""
    steps_per_epoch: int
    total_steps: int


def resolve_sft_plan(
    config: SupervisedConfig,
    *,
    conversations: int | None,
    devices_per_node: int = 2,
    origins: Mapping[str, str] | None = None,
    shape: ShapeNumbers | None = None,
) -> SFTPlan:
    """The plan of a run over `conversations`, or pairs of them, for training (None: not known yet).

    `devices_per_node`: devices of a machine if `trainer.n_gpus_per_node` is null; `origins`: key -> where its
    value is from; `shape`: sizes of the model that parallel sizes must divide. Raises ConfigError with all
    broken rules and remedies.

    >>> config = SupervisedConfig()
    >>> config.data.train_batch_size = 8
    >>> plan = resolve_sft_plan(config, conversations=100)
    >>> plan.role.rows_per_rank, plan.total_steps
    (4, 12)
    """
    settings = Settings(config, SupervisedConfig(), origins or {})

    def judge(values: Mapping[str, object]) -> tuple[_Request, list[Violation]]:
        return _judge(settings.changed(values), conversations, devices_per_node, shape)

    request, violations = judge({})
    if violations:
        raise ConfigError(repair.problems(lambda values: judge(values)[1], partial(value_at, config)))
    return _plan(request)


def _judge(
    settings: Settings[SupervisedConfig], conversations: int | None, per_node: int, shape: ShapeNumbers | None
) -> tuple[_Request, list[Violation]]:
    small = no_sizes(settings)
    keys = {violation.field for violation in small}
    settings = settings.changed(dict.fromkeys(keys, 1))
    topology = _read_topology(settings.config, per_node)
    found, layouts = judge_devices(topology, {"model": shape} if shape else {})
    layout = layouts.get("model")
    config: SupervisedConfig = settings.config
    per_epoch, unit = (conversations or 0) // config.data.train_batch_size, rows_of_example(config)
    request = _Request(
        settings=settings,
        topology=topology,
        layout=layout,
        conversations=conversations,
        role=_read_role(config, layout),
        unit=unit,
        row_tokens=(config.data.max_length + _extra_tokens(config)) * unit,
        steps_per_epoch=per_epoch,
        total_steps=config.trainer.total_training_steps or per_epoch * config.trainer.total_epochs,
    )
    found += _violations(request)
    return request, [*small, *(violation for violation in found if violation.field not in keys)]


def rows_of_example(config: SupervisedConfig) -> int:
    """Rows of the model for each training example: 2 for a pair of responses."""
    return 2 if isinstance(config.data, PairsConfig) else 1


def _extra_tokens(config: SupervisedConfig) -> int:
    """Extra tokens of a row beyond its conversation: for a reward model, the position of the score."""
    return int(isinstance(config, RMConfig))


def noun_of(config: SupervisedConfig) -> str:
    """The word for a training example: conversation or pair."""
    return "pair" if rows_of_example(config) == 2 else "conversation"


def _read_topology(config: SupervisedConfig, devices_per_node: int) -> Topology:
    per_node = config.trainer.n_gpus_per_node or devices_per_node
    pool = Pool("trainer", config.trainer.nnodes, per_node, 0)
    model = RoleDevices(
        role="model",
        engine="fsdp2",
        devices=pool.devices,
        devices_per_node=per_node,
        pool=pool.name,
        degrees=fsdp_degrees(config.fsdp_config, "fsdp_config"),
    )
    return Topology(Cluster((pool,)), {"model": model})


def _read_role(config: SupervisedConfig, layout: Layout | None) -> RoleRequest:
    micro = MicroRequest(
        purpose="the update",
        rows=config.data.micro_batch_size_per_gpu,
        rows_key="data.micro_batch_size_per_gpu",
        dynamic=config.data.use_dynamic_bsz,
        max_tokens=config.data.max_token_len_per_gpu,
        tokens_key="data.max_token_len_per_gpu",
        sharers=layout.context if layout else 1,
    )
    return RoleRequest(
        name="model",
        mini=config.data.train_batch_size,
        mini_key=_BATCH,
        ranks=layout.data_ranks if layout else None,
        epochs=1,
        shuffle=False,
        micro=micro,
        optim=config.optim,
        optim_key="optim",
    )


def _violations(request: _Request) -> Iterator[Violation]:
    """Broken rules, apart from those of devices."""
    role, there, noun = request.role, request.conversations, noun_of(request.settings.config)
    batch, ranks, model = role.mini, role.ranks or 1, request.topology.roles["model"]

    def shared() -> Iterator[Fix]:
        for other in multiples(min(batch, there or batch * ranks), ranks):
            yield {_BATCH: other}
        if batch < ranks:
            yield from device_fixes(request.topology, model, model.model_parallel)
            yield {NODES: 1, PER_NODE: model.model_parallel}

    if batch % ranks:
        text = f"{noun}s cannot be shared equally by {ranks} data ranks"
        yield Violation("dp | batch", BATCH, _BATCH, batch, text, shared)
    yield from role.micro_batch_violations(1, request.row_tokens, f"{batch}/{ranks}")
    longest, extra = "data.max_length", _extra_tokens(request.settings.config)
    longest = f"({longest} + {extra})" if extra else longest
    longest = f"{request.unit}·{longest}" if request.unit > 1 else longest
    yield from role.micro.token_budget_violations(request.row_tokens, longest)
    if there is not None and there < batch:
        fewer: list[Fix] = [{_BATCH: there // ranks * ranks}] if there >= ranks else []
        fewer += [{_BATCH: 1, NODES: 1, PER_NODE: model.model_parallel}] if there else []
        text = f"is more than the {there} available training {noun}s, so no step can be taken"
        yield Violation("conversations >= batch", BATCH, _BATCH, batch, text, fewer, advice="more data")
    yield from role.warmup_violations(request.total_steps)


def _plan(request: _Request) -> SFTPlan:
    assert request.layout is not None
    batch, total, tokens = request.role.mini, request.total_steps, request.row_tokens
    role = request.role.plan(q=batch, n=1, row_tokens=tokens, total_steps=total)
    left = (request.conversations or 0) % batch
    noun, profiler = noun_of(request.settings.config), request.settings.config.global_profiler
    text = f"{left} of {request.conversations} training {noun}s do not fill a step of {batch}"
    return SFTPlan(
        conversations_per_step=batch,
        role=role.of_units(request.unit) if request.unit > 1 else role,
        cluster=request.topology.cluster,
        layouts={"model": request.layout},
        steps_per_epoch=request.steps_per_epoch,
        total_steps=total,
        quantities=tuple(_quantities(request, role, request.layout)),
        notes=(
            *((f"{text}: each epoch leaves that many out",) if left else ()),
            *profiler.never_profiled(total, len(request.layout.devices)),
        ),
    )


def _quantities(request: _Request, role: RolePlan, layout: Layout) -> Iterator[Quantity]:
    noun, rows = noun_of(request.settings.config), role.rows_per_rank
    batch, kind = request.role.mini, request.role.optim.lr_scheduler_type
    yield from layout_quantities(layout)
    yield Quantity(f"{noun}s per step", f"{noun}s", batch, "", request.settings.origin(_BATCH))
    yield Quantity("rows per data rank", f"{noun}s", rows, f"{batch}/{role.data_ranks}")
    yield from micro_quantities(request.settings, request.role.micro, role.micro, request.row_tokens)
    if role.accumulation_steps is not None:
        formula = f"{rows}/{role.micro.rows}"
        yield Quantity("accumulation steps", "micro-batches", role.accumulation_steps, formula)
    per_epoch = None if request.conversations is None else request.steps_per_epoch
    yield from run_quantities(request.settings, per_epoch, f"⌊{request.conversations}/{batch}⌋")
    if role.warmup_steps:
        yield Quantity("warm-up", "steps", role.warmup_steps)
    if role.decay_steps and kind != "constant":
        formula = f"{request.total_steps} - {role.warmup_steps}"
        yield Quantity(f"{kind} decay", "steps", role.decay_steps, formula)
