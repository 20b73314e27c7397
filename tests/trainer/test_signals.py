"""Signals that ask for an end: noted, not obeyed at once, and only inside the block."""

from __future__ import annotations

import signal
from collections.abc import Iterator

import pytest

from hydraflow.tracking.endings import OUT_OF_TIME
from hydraflow.trainer import signals
from hydraflow.trainer.clock import Clock
from hydraflow.trainer.signals import StopSignals


@pytest.fixture(autouse=True)
def sighup_is_not_ignored() -> Iterator[None]:
    """These tests may run under nohup."""
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGHUP, before)


@pytest.mark.parametrize("number", signals.WATCHED)
def test_the_first_one_counts(number: signal.Signals) -> None:
    before = signal.getsignal(number)
    with StopSignals() as stop:
        clock = Clock(1000.0, stop)
        assert clock.why_to_stop() == ""
        signal.raise_signal(number)
        signal.raise_signal(signal.SIGTERM)
        assert clock.preempted
        assert clock.why_to_stop() == f"{number.name} received"
    assert signal.getsignal(number) == before


def test_sigusr1_is_noted_though_it_was_ignored() -> None:
    """A batch script ignores it until the training has its handler (scripts/slurm/train.sh)."""
    before = signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    try:
        with StopSignals() as stop:
            signal.raise_signal(signal.SIGUSR1)
        assert stop.received == "SIGUSR1" and signal.getsignal(signal.SIGUSR1) == signal.SIG_IGN
    finally:
        signal.signal(signal.SIGUSR1, before)


def test_sighup_stays_ignored() -> None:
    """As nohup has it."""
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with StopSignals() as stop:
            signal.raise_signal(signal.SIGHUP)
            assert not stop.received
        assert signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)


def test_a_sigterm_that_is_repeated_later_interrupts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(signals, "REPEATED", 0.0)
    with StopSignals() as received:
        signal.raise_signal(signal.SIGTERM)
        signal.raise_signal(signal.SIGUSR1)
        assert not received.insisted
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGTERM)
        assert received.insisted and received.received == "SIGTERM"


def test_a_sigterm_after_sigusr1_is_a_first_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(signals, "REPEATED", 0.0)
    with StopSignals() as received:
        signal.raise_signal(signal.SIGUSR1)
        signal.raise_signal(signal.SIGTERM)
        assert received.received == "SIGUSR1" and not received.insisted


def test_a_clock_that_ran_out_is_not_preempted() -> None:
    clock = Clock(1e-9)
    assert clock.why_to_stop() == OUT_OF_TIME and not clock.preempted
