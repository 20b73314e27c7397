"""The group of one role's ranks: joining and leaving it, and what all of its ranks do together.

In: rank, number of ranks, address of rank 0. Out: torch.distributed, ready, with a deadline on every
collective. Left out on purpose: choosing addresses and starting processes (`dispatch/`).
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from functools import cache
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from hydraflow.device import collective_backend
from hydraflow.engine.shared_memory import windows_for, windows_of
from hydraflow.errors import ConfigError

Result = TypeVar("Result")


def start(
    *,
    rank: int,
    world_size: int,
    address: str,
    port: int,
    device_type: str,
    timeout_s: float,
    listen_fd: int | None = None,
    group_size: int | None = None,
) -> None:
    """Waits until all ranks have joined, at most `timeout_s` seconds; a second call in the same process does
    nothing.

    group_size: number of neighbouring ranks that form a separate group; None: all ranks form one. listen_fd:
    on rank 0, the bound socket that reserved the port; it is taken over. Raises torch's DistStoreError or
    DistNetworkError when the others do not join; any collective raises after `timeout_s`.
    """
    size = group_size or world_size
    if dist.is_initialized():
        assert (dist.get_rank(), dist.get_world_size()) == (rank % size, size), (
            "this process has already joined with another rank or size"
        )
        return
    timeout = timedelta(seconds=timeout_s)
    _share_devices_of_gloo()
    store = dist.TCPStore(address, port, world_size, rank == 0, timeout, master_listen_fd=listen_fd)
    dist.init_process_group(
        collective_backend(device_type),
        store=dist.PrefixStore(f"group {rank // size}", store),
        rank=rank % size,
        world_size=size,
        timeout=timeout,
    )


@cache
def _share_devices_of_gloo() -> None:
    """From now on, all gloo groups of this process share the devices of the first one.

    A device is a thread that wakes a hundred times a second; torch gives every group its own and has no
    option to share one. Megatron-Core makes some forty groups, whose threads took more CPU time than training
    a small model. What is sent, and in which order, does not change.
    """
    gloo: Any = dist.ProcessGroupGloo
    make = gloo.__init__
    devices: list[Any] = []

    def shared(group: Any, store: dist.Store, rank: int, size: int, *options: Any, **settings: Any) -> None:
        if devices and not options and settings.keys() == {"timeout"}:
            given = gloo._Options()
            given._devices, given._threads = devices, 2 * len(devices)
            given._timeout = settings["timeout"]
            make(group, store, rank, size, given)
            return
        make(group, store, rank, size, *options, **settings)
        if not devices and not options:
            devices.extend(group.options._devices)

    gloo.__init__ = shared


def stop() -> None:
    """Leaves the group, if there is one."""
    if dist.is_initialized():
        host_group.cache_clear()
        groups_of.cache_clear()
        windows_of.cache_clear()
        dist.destroy_process_group()


@cache
def host_group() -> dist.ProcessGroup | None:
    """A gloo group of all ranks, for collectives in another thread during training. The first call is
    collective."""
    return dist.new_group(backend="gloo")


@cache
def groups_of(size: int, purpose: str) -> tuple[dist.ProcessGroup, dist.ProcessGroup]:
    """This rank's group of `size` neighbouring ranks, and the group of the ranks at the same position in
    theirs. The first call for a size and a purpose is collective. Each purpose has separate groups, because
    collectives of one group run one after the other. Deadlines are the default group's.

    `size` must divide the number of ranks: of 4 ranks in groups of 2, rank 1 gets (0, 1) and (1, 3).
    """
    ranks = torch.arange(dist.get_world_size()).view(-1, size)
    assert dist.group.WORLD is not None
    timeout = deadline_of(dist.group.WORLD)
    neighbours, same_place = (
        dist.new_subgroups_by_enumeration(groups.tolist(), timeout=timeout)[0] for groups in (ranks, ranks.T)
    )
    return neighbours, same_place


def all_reduce(
    values: torch.Tensor, how: str = "sum", group: dist.ProcessGroup | None = None
) -> torch.Tensor:
    """Sum or max over the ranks of a group (None: all ranks), as a new float64 tensor on the CPU."""
    reduced = values.detach().to(device="cpu", dtype=torch.float64, copy=True)
    if dist.get_world_size(group) > 1:
        dist.all_reduce(reduced, {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX}[how], group)
    return reduced


def on_first_rank(work: Callable[[], Result]) -> Result | None:
    """The result of `work` on rank 0, None elsewhere. Raises rank 0's ConfigError on every rank.
    Collective."""
    return on_every_rank(lambda: work() if dist.get_rank() == 0 else None)


def on_every_rank(work: Callable[[], Result]) -> Result:
    """The result of `work`. When ranks raise a ConfigError, every rank raises that of the lowest, so none
    waits for a collective that the others never start. Collective."""
    problem: ConfigError | None = None
    try:
        result = work()
    except ConfigError as error:
        problem = error
    found: list[ConfigError | None] = [None] * dist.get_world_size()
    dist.all_gather_object(found, problem)
    found[dist.get_rank()] = problem  # itself instead of a copy, which lacks its cause
    if first := next((one for one in found if one is not None), None):
        raise first
    return result


def from_first_rank(
    find: Callable[[], torch.Tensor], shape: torch.Size, dtype: torch.dtype, device: torch.device
) -> torch.Tensor:
    """What `find` returns on rank 0, the only one that calls it, on the device of every rank. Collective."""
    full = torch.empty(shape, dtype=dtype, device=device)
    if dist.get_rank() == 0:
        full.copy_(find())
    if dist.get_world_size() > 1:
        dist.broadcast(full, src=0)
    return full


def gather_parts(whole: torch.Tensor, mine: torch.Tensor, group: dist.ProcessGroup) -> None:
    """Fills the flat tensor `whole` with equal parts, in the order of the group's ranks. `mine` may be a view
    of its place in `whole`."""
    if whole.device.type != "cpu":
        dist.all_gather_single(whole, mine, group=group)
        return
    parts = whole.view(group.size(), -1)
    exchange(parts, mine.expand_as(parts), group)
    if parts[group.rank()].data_ptr() != mine.data_ptr():
        parts[group.rank()] = mine


def exchange(received: torch.Tensor, sent: torch.Tensor, group: dist.ProcessGroup) -> None:
    """On a CPU: sends row i of `sent` to rank i of the group and receives row i of `received` from it; this
    rank's own rows are not touched. Through shared memory on one machine, otherwise by gloo's sends, whose
    collectives make another copy and take up to four times as long."""
    if (windows := windows_for(sent, group)) is None:
        _send(received, sent, group)
        return
    for part, rows in windows.parts(sent):
        for other, row in rows.items():
            received[other, part] = row


def add_parts(
    total: torch.Tensor, sent: torch.Tensor, group: dist.ProcessGroup, received: torch.Tensor | None
) -> None:
    """On a CPU: sums row i of every rank's `sent` (ranks, n) into `total` (n,) of rank i, in the order of
    ranks. `received`: from `room_to_add`."""
    if (windows := windows_for(sent, group)) is not None:
        parts = windows.parts(sent)
    else:
        assert received is not None
        _send(received, sent, group)
        parts = iter([(slice(None), dict(enumerate(received)))])
    for part, rows in parts:
        first, second, *others = (
            sent[rank, part] if rank == group.rank() else rows[rank] for rank in range(group.size())
        )
        torch.add(first, second, out=total[part])
        for row in others:
            total[part].add_(row)


def room_to_add(sent: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor | None:
    """The memory that `add_parts` needs besides its arguments, if any."""
    return None if windows_for(sent, group) is not None else torch.empty_like(sent)


def _send(received: torch.Tensor, sent: torch.Tensor, group: dist.ProcessGroup) -> None:
    others = [rank for rank in range(group.size()) if rank != group.rank()]
    works = [dist.irecv(received[other], group=group, group_src=other) for other in others]
    works += [dist.isend(sent[other], group=group, group_dst=other) for other in others]
    for work in works:
        assert work is not None
        work.wait(deadline_of(group))  # without it point-to-point work waits half an hour


def deadline_of(group: dist.ProcessGroup) -> timedelta:
    """How long a collective of a group may take on CPUs."""
    found: timedelta = group._get_backend(torch.device("cpu")).options._timeout
    return found
