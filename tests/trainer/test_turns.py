"""Roles that share devices, but no process, take turns. With real processes: `jobs/test_placement.py`."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from hydraflow.batch_plan.layout import Devices
from hydraflow.errors import GuardStop
from hydraflow.trainer.turns import Turns
from hydraflow.workers.engine_worker import EngineWorker


class Recorder:
    """Roles that note when they sleep and wake; only the rollout refuses calls until it is woken."""

    def __init__(self) -> None:
        self.turns, self.seen = Turns(), list[str]()

    def add(self, name: str, devices: range, group: Any = None) -> Any:
        """A role in a process of its own, or in that of `group`; the group."""
        group = group or SimpleNamespace(before_call=None)
        role: Any = SimpleNamespace(name=name, group=group)
        sleeper = SimpleNamespace(sleeps=False)

        def sleep() -> None:
            self.call(role)  # the message that it sends
            self.seen.append(f"{name} sleeps")
            sleeper.sleeps = name == "rollout"

        def wake() -> None:
            with self.turns.together("actor", name):
                sleeper.sleeps = False
                self.seen.append(f"{name} wakes")

        sleeper.sleep, sleeper.wake = sleep, wake
        self.turns.add(role, Devices.of([devices]), sleeper)
        return role

    def call(self, role: Any, method: str = "compute") -> None:
        role.group.before_call(role.name, method)

    def since(self) -> list[str]:
        seen, self.seen = self.seen, []
        return seen


def test_whoever_is_awake_on_the_same_devices_sleeps_before_a_call() -> None:
    """Actor 0-3, rollout 2-5, critic 0-1 beside its reward model, and a judge of its own on device 6."""
    run = Recorder()
    actor, rollout = run.add("actor", range(4)), run.add("rollout", range(2, 6))
    critic, judge = run.add("critic", range(2)), run.add("judge", range(6, 7))
    beside = {name: run.turns.beside(name) for name in ("actor", "rollout", "critic", "judge", "reward")}
    assert beside == {
        "actor": ["rollout", "critic"],
        "rollout": ["actor"],
        "critic": ["actor"],
        "judge": [],
        "reward": [],
    }
    for role in (rollout, critic, judge, rollout):
        run.call(role)
    assert run.since() == []
    run.call(actor)
    assert run.since() == ["critic sleeps", "rollout sleeps"]
    run.call(judge)
    run.call(actor)
    assert run.since() == []
    with run.turns("rollout"):
        assert run.since() == ["rollout wakes", "actor sleeps"]
        run.call(rollout)
        run.call(critic)
    run.call(actor)
    assert run.since() == ["critic sleeps", "rollout sleeps"]


def test_a_save_that_cannot_wait_sends_nobody_to_sleep() -> None:
    run = Recorder()
    actor, rollout = run.add("actor", range(2)), run.add("rollout", range(2))
    run.call(rollout)
    with run.turns.undisturbed():
        run.call(actor)
    assert run.since() == []
    run.call(actor)
    assert run.since() == ["rollout sleeps"]


def test_a_call_for_metrics_sends_nobody_to_sleep() -> None:
    """The rollout may just have got its weights."""
    run = Recorder()
    ref, rollout = run.add("ref", range(2)), run.add("rollout", range(2))
    run.call(rollout)
    run.call(ref, EngineWorker.utilization_metrics.__name__)
    assert run.since() == []


def test_a_role_that_could_not_be_sent_to_sleep_is_sent_again() -> None:
    """A wait for it was interrupted."""
    run = Recorder()
    actor, ref = run.add("actor", range(2)), run.add("ref", range(2))
    run.call(ref)
    sleeper = run.turns._members["ref"].sleeper
    sleep, sleeper.sleep = sleeper.sleep, lambda: 1 / 0
    with pytest.raises(ZeroDivisionError):
        run.call(actor)
    sleeper.sleep = sleep
    run.call(actor)
    assert run.since() == ["ref sleeps"]
    run.call(ref)
    assert run.since() == ["actor sleeps"]


def test_a_call_in_another_roles_turn_names_both() -> None:
    run = Recorder()
    actor, rollout, ref = (run.add(name, range(2)) for name in ("actor", "rollout", "ref"))
    with run.turns("rollout"):
        for role in (actor, ref):
            with pytest.raises(GuardStop, match=rf"^{role.name} was called \(compute\) .*: rollout works on"):
                run.call(role)
        with (
            pytest.raises(GuardStop, match="^actor was called .* it sleeps: rollout works"),
            run.turns("actor"),
        ):
            pass
        with run.turns.together("actor", "rollout"):
            run.call(actor)
            run.call(rollout)
    assert run.since() == []
    run.call(ref)
    assert run.since() == ["actor sleeps", "rollout sleeps"]
    with pytest.raises(
        GuardStop, match=r"rollout was called .* it sleeps: actor and ref work .*turns\('rollout'\)"
    ):
        run.call(rollout)
    with run.turns("actor"), pytest.raises(GuardStop, match="^rollout .* actor works"), run.turns("rollout"):
        pass
    assert run.since() == ["ref sleeps"]


def test_roles_of_one_process_do_not_wait_for_each_other() -> None:
    run = Recorder()
    actor = run.add("actor", range(2))
    ref, rollout = run.add("ref", range(2), actor.group), run.add("rollout", range(2), actor.group)
    with run.turns("rollout"):
        for role in (actor, ref, rollout):
            run.call(role)
    assert run.since() == []
