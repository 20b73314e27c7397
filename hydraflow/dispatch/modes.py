"""Dispatch modes: how the arguments of a call are distributed over the ranks of a group, and how the answers
are combined into one result.

In: the caller's arguments, and a `CallContext` that describes the group. Out: for each argument a list with
one entry per rank; one result. A method is declared with `@register(...)`; a custom mode is added with
`register_dispatch_mode`. Left out on purpose: sending and waiting (`group`, `future`), cutting rows
(`shards`)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import TYPE_CHECKING, Any, TypeVar

from hydraflow.dispatch.shards import is_batch, split
from hydraflow.metrics import Metric, merge
from hydraflow.protocol.coordinates import Coordinates
from hydraflow.protocol.remote import RemoteBatch

if TYPE_CHECKING:
    from hydraflow.dispatch.group import Group

Method = TypeVar("Method", bound=Callable[..., Any])
MEGATRON_MESH = "megatron"
"""Name of the mesh that the MEGATRON modes use."""


@dataclass(frozen=True)
class CallContext:
    """What a mode knows about the call."""

    group: Group
    role: str
    method: str
    """Name of the method, for messages."""
    padding: bool
    """Whether the method accepts rows that are padding."""
    only: int | None = None
    """The only rank to call; None: as the mode says."""

    @property
    def world_size(self) -> int:
        return self.group.world_size

    def mesh(self, name: str) -> list[Coordinates]:
        return self.group.mesh(self.role, name)


PerRank = tuple[Sequence[Sequence[Any]], dict[str, Sequence[Any]]]
"""Positional and keyword arguments, each a sequence with one entry per rank."""


@dataclass(frozen=True)
class Mode:
    """One way to call a group."""

    name: str
    dispatch_fn: Callable[..., PerRank]
    """(context, *args, **kwargs) -> PerRank."""
    collect_fn: Callable[[Any, list[Any]], Any]
    """(context, answers of the collectors in their order) -> result. A DataProto arrives as a RemoteBatch."""
    collectors: Callable[[CallContext], list[int]] = lambda context: list(range(context.world_size))
    """Ranks whose answers are used, in the order of their rows."""
    joins: bool = False
    """The result is the collectors' rows concatenated, so a future of it can be passed on before it is
    ready."""
    rank_zero: bool = False
    """Only rank 0 runs."""


class Dispatch(StrEnum):
    """Names of the built-in modes. hydraflow's own workers use RANK_ZERO, ONE_TO_ALL and `mesh_mode`; the
    others are verl's, for workers written for verl."""

    RANK_ZERO = "rank_zero"
    """Rank 0 alone runs; its answer is the result."""
    ONE_TO_ALL = "one_to_all"
    """Every rank gets all arguments; a list of answers."""
    ALL_TO_ALL = "all_to_all"
    """A list with one entry per rank is scattered; other arguments go to every rank; a list of answers."""
    DP_COMPUTE = "dp_compute"
    """Every argument is a list with one entry per rank; a list of answers."""
    DP_COMPUTE_PROTO = "dp_compute_proto"
    """Batches are divided over all ranks; the answers are concatenated into one batch."""
    DP_COMPUTE_PROTO_WITH_FUNC = "dp_compute_proto_with_func"
    """As DP_COMPUTE_PROTO; the first argument is a function that every rank gets."""
    DP_COMPUTE_METRIC = "dp_compute_metric"
    """Batches are divided over all ranks; the answers, dicts of metrics, are merged."""
    MEGATRON_COMPUTE = "megatron_compute"
    """Every argument is a list with one entry per data rank of the mesh "megatron"; a list of answers by data
    rank."""
    MEGATRON_COMPUTE_PROTO = "megatron_compute_proto"
    """Batches are divided over the data ranks of the mesh "megatron"; answers as in `mesh_mode`."""


class Execute(StrEnum):
    """Which ranks run."""

    ALL = "all"
    RANK_ZERO = "rank_zero"


def _per_argument(spread: Callable[[CallContext, Any], Sequence[Any]]) -> Callable[..., PerRank]:
    """A dispatch function that applies `spread` to every argument."""

    def dispatch(context: CallContext, *args: Any, **kwargs: Any) -> PerRank:
        named = {name: spread(context, value) for name, value in kwargs.items()}
        return [spread(context, value) for value in args], named

    return dispatch


_to_all = _per_argument(lambda context, value: [value] * context.world_size)


def _deal(context: CallContext, value: Any) -> Sequence[Any]:
    if isinstance(value, list | tuple) and len(value) == context.world_size:
        return value
    return [value] * context.world_size


def _listed(value: Any, size: int, what: str, method: str) -> Sequence[Any]:
    if isinstance(value, list | tuple) and len(value) == size:
        return value
    got = f"{len(value)} entries" if isinstance(value, list | tuple) else f"a {type(value).__name__}"
    raise ValueError(f"{method} takes lists with one entry for each of {size} {what}, got {got}")


def _list_per_rank(context: CallContext, value: Any) -> Sequence[Any]:
    return _listed(value, context.world_size, "ranks", context.method)


def _rows_per_rank(context: CallContext, value: Any) -> Sequence[Any]:
    if is_batch(value):
        return split(value, context.world_size, padding=context.padding)
    return [value] * context.world_size


def _function_and_rows(context: CallContext, function: Any, *args: Any, **kwargs: Any) -> PerRank:
    if not callable(function):
        got = type(function).__name__
        raise TypeError(f"{context.method} takes a function as its first argument, got a {got}")
    positional, named = _per_argument(_rows_per_rank)(context, *args, **kwargs)
    return [[function] * context.world_size, *positional], named


def _first(context: CallContext, answers: list[Any]) -> Any:
    return answers[0]


def _as_list(context: CallContext, answers: list[Any]) -> list[Any]:
    return answers


def _require_all(
    context: CallContext, answers: list[Any], is_right: Callable[[Any], bool], what: str
) -> None:
    if others := sorted({type(answer).__name__ for answer in answers if not is_right(answer)}):
        raise TypeError(f"{context.method} must return {what} on every rank, got {', '.join(others)}")


def _joined(context: CallContext, answers: list[Any]) -> RemoteBatch:
    _require_all(context, answers, lambda answer: isinstance(answer, RemoteBatch), "a DataProto")
    # a rank whose rows were all padding answers with a batch without columns
    return RemoteBatch.concat([answer for answer in answers if len(answer)] or answers)


def _is_metrics(answer: Any) -> bool:
    return isinstance(answer, dict) and all(isinstance(value, Metric) for value in answer.values())


def _merged(context: CallContext, answers: list[Any]) -> dict[str, Metric]:
    _require_all(context, answers, _is_metrics, "a dict of metrics")
    return merge(answers)


def _by_kind(context: CallContext, answers: list[Any]) -> Any:
    if all(isinstance(answer, RemoteBatch) for answer in answers):
        return _joined(context, answers)
    return merge(answers) if all(_is_metrics(answer) for answer in answers) else answers


def _data_collectors(mesh: str) -> Callable[[CallContext], list[int]]:
    def collectors(context: CallContext) -> list[int]:
        places = context.mesh(mesh)
        collecting = (rank for rank, place in enumerate(places) if place.is_collect)
        return sorted(collecting, key=lambda rank: places[rank].data_rank)

    return collectors


def mesh_mode(mesh: str) -> Mode:
    """Rows are divided by the data ranks of a named mesh; every rank of one data rank gets the same rows.

    Only answers of ranks with `is_collect` are used: batches are concatenated in the order of data ranks,
    metrics merged, anything else listed.
    """

    def rows(context: CallContext, value: Any) -> Sequence[Any]:
        if not is_batch(value):
            return [value] * context.world_size
        places = context.mesh(mesh)
        parts = split(value, places[0].data_size, padding=context.padding)
        return [parts[place.data_rank] for place in places]

    return Mode(f"mesh {mesh}", _per_argument(rows), _by_kind, _data_collectors(mesh), joins=True)


def _list_per_data_rank(context: CallContext, value: Any) -> Sequence[Any]:
    places = context.mesh(MEGATRON_MESH)
    parts = _listed(value, places[0].data_size, "data ranks", context.method)
    return [parts[place.data_rank] for place in places]


_MODES: dict[str, Mode] = {
    mode.name: mode
    for mode in (
        Mode(Dispatch.RANK_ZERO, _to_all, _first, lambda context: [0], joins=True, rank_zero=True),
        Mode(Dispatch.ONE_TO_ALL, _to_all, _as_list),
        Mode(Dispatch.ALL_TO_ALL, _per_argument(_deal), _as_list),
        Mode(Dispatch.DP_COMPUTE, _per_argument(_list_per_rank), _as_list),
        Mode(Dispatch.DP_COMPUTE_PROTO, _per_argument(_rows_per_rank), _joined, joins=True),
        Mode(Dispatch.DP_COMPUTE_PROTO_WITH_FUNC, _function_and_rows, _joined, joins=True),
        Mode(Dispatch.DP_COMPUTE_METRIC, _per_argument(_rows_per_rank), _merged),
        Mode(
            Dispatch.MEGATRON_COMPUTE,
            _per_argument(_list_per_data_rank),
            _as_list,
            _data_collectors(MEGATRON_MESH),
        ),
        replace(mesh_mode(MEGATRON_MESH), name=Dispatch.MEGATRON_COMPUTE_PROTO),
    )
}


def register_dispatch_mode(
    name: str, dispatch_fn: Callable[..., PerRank], collect_fn: Callable[[Any, list[Any]], Any]
) -> None:
    """Registers a new mode under its own name.

    `dispatch_fn(context, *args, **kwargs)` returns, for every argument, a list with one entry per rank;
    `shards.split` divides batches. `collect_fn(context, answers)` gets the answers of all ranks in rank
    order. Raises ValueError when the name exists.
    """
    if name in _MODES:
        raise ValueError(f"the dispatch mode {name!r} already exists")
    _MODES[name] = Mode(name, dispatch_fn, collect_fn)


def mode_named(mode: str | Mode) -> Mode:
    """The mode of that name. Raises ValueError listing the known ones."""
    if isinstance(mode, Mode):
        return mode
    if mode not in _MODES:
        raise ValueError(f"no dispatch mode {str(mode)!r}; there are {', '.join(map(str, _MODES))}")
    return _MODES[mode]


@dataclass(frozen=True)
class Registration:
    """How a method is called."""

    mode: Mode
    blocking: bool
    read_only: bool
    padding: bool
    resend: bool = True


def register(
    dispatch_mode: str | Mode = Dispatch.ALL_TO_ALL,
    execute_mode: Execute = Execute.ALL,
    *,
    blocking: bool = True,
    read_only: bool = False,
    padding: bool = True,
    resend: bool = True,
) -> Callable[[Method], Method]:
    """Declares a worker's method as callable from the controller.

    blocking: the call waits and returns the result, else a future. read_only: the method never writes to its
    input tensors, so they need no copy. padding: rows may be repeated so that they divide evenly among the
    ranks; training methods say False. resend: the call is sent again to the replacement of a process that
    died; otherwise its answer is None.
    """
    mode = mode_named(dispatch_mode)
    if Execute(execute_mode) is Execute.RANK_ZERO:
        if mode.name not in (Dispatch.RANK_ZERO, Dispatch.ONE_TO_ALL):
            lost = "the other ranks' rows would be lost"
            raise ValueError(f"execute_mode rank_zero goes with one_to_all, not with {mode.name}: {lost}")
        mode = mode_named(Dispatch.RANK_ZERO)

    def declare(method: Method) -> Method:
        setattr(method, _MARK, Registration(mode, blocking, read_only, padding, resend))
        return method

    return declare


_MARK = "hydraflow_registration"


def registration(method: Callable[..., Any]) -> Registration:
    """A method's declaration. Raises TypeError when there is none."""
    found = getattr(method, _MARK, None)
    if found is None:
        text = f"{method.__qualname__} is not declared with @register"
        raise TypeError(f"{text}, so the controller cannot call it")
    return found
