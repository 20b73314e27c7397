"""Compilers, by compiling."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from checkup.given import configured, findings

from hydraflow.checkup import compiling
from hydraflow.checkup.facts import Facts
from hydraflow.checkup.finding import State


def test_nothing_is_compiled_unasked() -> None:
    [found] = findings(Facts(configured()), "compiler")
    assert found.state is State.SKIPPED and "--all" in found.evidence


def test_a_c_function_is_built_and_called() -> None:
    found = compiling.compile_c(os.environ)
    assert found.state is State.OK and found.evidence.endswith("answered 42")


def test_no_compiler(tmp_path: Path) -> None:
    found = compiling.compile_c({"PATH": str(tmp_path)})
    assert found.state is State.PROBLEM and "cc, gcc, clang" in found.evidence
    named = compiling.compile_c({"PATH": os.environ["PATH"], "CC": "no-such-compiler"})
    assert "CC=no-such-compiler" in named.evidence


def test_a_compiler_that_fails(tmp_path: Path) -> None:
    broken = tmp_path / "cc"
    broken.write_text(
        "#!/bin/sh\necho 'answer.c:1:10: fatal error: Python.h: No such file or directory'\nexit 1\n"
    )
    broken.chmod(0o755)
    found = compiling.compile_c({"PATH": f"{tmp_path}:{os.environ['PATH']}"})
    assert found.state is State.PROBLEM and "Python.h" in found.evidence
    assert found.remedy.startswith("apt-get install python3") and found.remedy.endswith("-dev")


@pytest.mark.slow
def test_a_kernel_is_made_when_asked() -> None:
    c_function, kernel = findings(Facts(configured(), everything=True), "compiler")
    assert c_function.state is State.OK
    assert (kernel.state, kernel.evidence) == (State.OK, "relu(2x + 1) compiled for cpu")


def test_a_kernel_that_cannot_be_made_is_a_problem() -> None:
    assert compiling.compile_kernel("no_such_device").state is State.PROBLEM
