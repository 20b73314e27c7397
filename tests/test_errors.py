"""What a report of mistakes says, and how mistakes are collected."""

from __future__ import annotations

import pickle

import pytest

from hydraflow.errors import ConfigError, Faults, Problem, after_the_start

ONE, TWO = Problem("a", 1, "must be 2"), Problem("b", None, "is not there", "b=/x")


def test_a_report_says_truly_whether_something_had_started() -> None:
    error = ConfigError([ONE, TWO])
    assert str(error).splitlines()[0] == "2 problems found before anything was started:"
    with pytest.raises(ConfigError) as caught, after_the_start():
        raise error
    assert (
        caught.value is error and str(error).splitlines()[0] == "2 problems found after the run had started:"
    )


@pytest.mark.parametrize("started", [False, True])
def test_a_report_crosses_processes(started: bool) -> None:
    error = ConfigError([ONE, TWO], started=started)
    copy = pickle.loads(pickle.dumps(error))
    assert (copy.problems, copy.started, str(copy)) == ([ONE, TWO], started, str(error))


def test_faults_are_collected_and_said_once() -> None:
    faults = Faults()
    faults.require_none()
    assert faults.result(lambda: int("7")) == 7 and faults.passes(lambda: None)
    assert faults.result(lambda: _refuse([ONE])) is None
    assert not faults.passes(lambda: _refuse([TWO, ONE]))
    with pytest.raises(ConfigError) as caught:
        faults.require_none()
    assert caught.value.problems == [ONE, TWO]


def test_other_errors_pass_through() -> None:
    with pytest.raises(ZeroDivisionError):
        Faults().result(lambda: 1 / 0)


def _refuse(problems: list[Problem]) -> int:
    raise ConfigError(problems)
