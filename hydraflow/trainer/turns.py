"""Turns: roles that share devices, but no process, work one after the other.

In: the roles with their devices. Out: before a call of a role, every other role on its devices is put to
sleep. A model finishes its calls and offloads, as `param_offload` says, until its next call. The generation
engine releases weights and caches until it is sent weights again. `with turns("rollout"):` wakes a role and
keeps the others asleep: calls of them are refused, as are calls of a sleeping generation engine. Nothing
happens where no devices are shared. Left out on purpose: roles in the same process, which runs one method at
a time.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Protocol

from hydraflow.batch_plan.layout import Devices
from hydraflow.dispatch.group import Group, RoleGroup
from hydraflow.errors import GuardStop
from hydraflow.workers.engine_worker import EngineWorker

WITHOUT_DEVICE = ("utilization_metrics",)
"""Methods of `EngineWorker` that use no device, and so put no role to sleep."""


class Sleeper(Protocol):
    """How a role sleeps and wakes."""

    @property
    def sleeps(self) -> bool:
        """Whether its calls are refused until it is woken."""

    def sleep(self) -> None:
        """Waits for its calls, then releases memory for the other roles of its devices."""

    def wake(self) -> None:
        """Undoes `sleep`."""


@dataclass(frozen=True)
class EngineRole:
    """The `Sleeper` of a role with a training engine. It accepts all calls: each loads what is offloaded."""

    role: RoleGroup
    sleeps = False

    def sleep(self) -> None:
        self.role.call(EngineWorker.rest)

    def wake(self) -> None:
        """Does nothing: its next call loads what was offloaded."""


@dataclass
class _Member:
    """A role that takes turns with others on its devices."""

    group: Group
    devices: Devices
    sleeper: Sleeper
    beside: list[str] = field(default_factory=list)


class Turns:
    """Which roles are awake. Used by one thread."""

    def __init__(self) -> None:
        self._members: dict[str, _Member] = {}
        self._awake: set[str] = set()
        self._kept: frozenset[str] = frozenset()
        """Roles kept awake until the end of a `with` block."""
        self._going_to_sleep: str | None = None
        """The role that is being put to sleep, which may be called for that."""

    def add(self, role: RoleGroup, devices: Devices, sleeper: Sleeper) -> None:
        """Adds a role: from now on its calls put the other roles on its devices to sleep."""
        member = _Member(role.group, devices, sleeper)
        for name, other in self._members.items():
            if other.group is not member.group and other.devices & devices:
                other.beside.append(role.name)
                member.beside.append(name)
        self._members[role.name] = member
        role.group.before_call = self._begin

    def beside(self, role: str) -> list[str]:
        """The roles in other processes on its devices."""
        return self._members[role].beside if role in self._members else []

    @contextmanager
    def __call__(self, role: str) -> Iterator[None]:
        """Wakes a role and keeps it awake. GuardStop inside another turn of its devices."""
        self._require_free([role], f"turns({role!r})")
        if role in self._members and self._members[role].sleeper.sleeps:
            self._members[role].sleeper.wake()
        with self.together(role):
            yield

    @contextmanager
    def together(self, *roles: str) -> Iterator[None]:
        """Keeps roles awake at the same time, for weights that travel between them. The block itself wakes
        roles that sleep. GuardStop inside another turn of their devices."""
        self._require_free(roles, "turns.together")
        self._sleep_beside(roles)
        self._awake.update(roles)
        before, self._kept = self._kept, self._kept.union(roles)
        try:
            yield
        finally:
            self._kept = before

    @contextmanager
    def undisturbed(self) -> Iterator[None]:
        """Puts no role to sleep: for calls that cannot wait for other roles to finish."""
        with self.together(*self._members):
            yield

    def _begin(self, role: str, method: str) -> None:
        """Before a call of a role. GuardStop when it sleeps."""
        is_free = role not in self._members or method in WITHOUT_DEVICE
        if is_free or role in self._kept or role == self._going_to_sleep:
            return
        self._require_free([role], method)
        if self._members[role].sleeper.sleeps:
            raise _refused(role, method, self.beside(role))
        self._sleep_beside([role])
        self._awake.add(role)

    def _require_free(self, roles: Collection[str], method: str) -> None:
        for role in roles:
            if working := [one for one in self.beside(role) if one in self._kept.difference(roles)]:
                raise _refused(role, method, working)

    def _sleep_beside(self, roles: Collection[str]) -> None:
        beside = {other for role in roles for other in self.beside(role)}
        for other in sorted(beside & self._awake - set(roles)):
            self._going_to_sleep = other
            try:
                self._members[other].sleeper.sleep()
            finally:
                self._going_to_sleep = None
            self._awake.discard(other)


def _refused(role: str, method: str, working: Collection[str]) -> GuardStop:
    names = " and ".join(working)
    verb = "works" if len(working) == 1 else "work"
    return GuardStop(
        f"{role} was called ({method}) while it sleeps: {names} {verb} on the same devices; call it in its"
        f" own turn, with turns({role!r}), after theirs"
    )
