"""Imports and tries user code in a separate process before a run starts, because an import may hang or end
its process.

In: functions with the values of their keys, or modules. Out: a `ConfigError` that says what is wrong. The
process is killed after `SECONDS`, with all its children. Left out on purpose: reward functions, which always
run in processes of their own (`rewards/`).
"""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import time
from contextlib import suppress
from functools import partial
from io import FileIO
from typing import Any

from hydraflow.algorithms.config import POLICY_LOSSES, AlgorithmConfig
from hydraflow.compose.own_functions import ESTIMATOR, own_choices, own_problems
from hydraflow.errors import ConfigError, Faults, Problem
from hydraflow.models.config import ModelSourceConfig
from hydraflow.schema import PPOConfig
from hydraflow.system.own_code import OwnFunction, import_modules, with_line

SECONDS = 120.0
"""Timeout in seconds, which includes importing torch."""
_BOOT = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[1]);"
    " from hydraflow.jobs.own_code import main; main(int(sys.argv[2]), *map(json.loads, sys.argv[3:]))"
)


def check_functions(config: PPOConfig) -> None:
    """Raises ConfigError for a user's loss or estimator that does not fit the configuration, cannot be
    imported, or fails on a few made-up rows."""
    faults = Faults()
    faults.add(list(own_problems(config)))
    known = {problem.field for problem in faults.problems}
    for choice in own_choices(config):
        if choice.key not in known:
            request = {"key": choice.key, "given": choice.given, "keys": choice.keys}
            faults.passes(partial(_in_process, choice.key, choice.given, request))
    faults.require_none()


def check_modules(model: ModelSourceConfig, field: str) -> None:
    """Raises ConfigError if a module of `external_lib` cannot be imported. `field`: the model's section."""
    if model.external_lib:
        key = f"{field}.external_lib"
        _in_process(key, model.external_lib, {"key": key, "modules": model.external_lib})


def _in_process(key: str, given: Any, request: dict[str, Any]) -> None:
    """Runs `main(request)` in a new process, and raises the problems that it reports."""
    answers, answer = os.pipe()
    with open(answers, "rb", buffering=0) as answered:
        process = subprocess.Popen(
            [sys.executable, "-c", _BOOT, json.dumps(sys.path), str(answer), json.dumps(request)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            pass_fds=[answer],
            start_new_session=True,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
        os.close(answer)
        try:
            found, code = _answer_of(process, answered)
            text = found if code == 0 else ""
            rule = f"while it was imported, it ended its process (exit code {code})"
        except subprocess.TimeoutExpired:
            text, rule = "", f"its import did not finish within {SECONDS:g} seconds"
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait(10)
    if not text:
        raise ConfigError.one(key, given, rule, "correct the code that runs at import")
    if problems := [Problem(*problem) for problem in json.loads(text)]:
        raise ConfigError(problems)


def _answer_of(process: subprocess.Popen[bytes], answered: FileIO) -> tuple[str, int]:
    """What the process has written when it ends, and its exit code. Processes that it has started may hold
    the other end for longer. Raises TimeoutExpired."""
    found, deadline = bytearray(), time.monotonic() + SECONDS
    ended = False
    while (left := deadline - time.monotonic()) > 0:
        if select.select([answered], [], [], 0.0 if ended else min(left, 0.05))[0]:
            if not (part := answered.read(1 << 16)):
                break
            found += part
        elif ended:
            break
        else:  # what it wrote before it ended can be read once more
            ended = process.poll() is not None
    return found.decode(), process.wait(max(0.0, deadline - time.monotonic()))


def main(answer: int, request: dict[str, Any]) -> None:
    """Runs in the new process: tries the requested code, and writes a JSON list of [key, value, rule, remedy]
    to the file descriptor `answer`."""
    problems: list[Problem] = []
    try:
        if "modules" in request:
            import_modules(request["modules"], request["key"])
        else:
            _try(request["key"], request["given"], request["keys"])
    except ConfigError as error:
        problems = error.problems
    given = request.get("given", request.get("modules"))
    with open(answer, "w", encoding="utf-8") as stream:
        json.dump([[request["key"], given, problem.rule, problem.remedy] for problem in problems], stream)
    os._exit(0)  # threads that the import started must not keep it alive


def _try(key: str, given: str, keys: dict[str, Any]) -> None:
    """Raises ConfigError for what is wrong with the function."""
    function = OwnFunction.named(given)
    assert function is not None, "the key names a function"
    loaded = function.load()
    # imports torch, so only once the file has loaded
    from hydraflow.algorithms.trial import try_estimator, try_loss

    try:
        if key == ESTIMATOR:
            why = try_estimator(AlgorithmConfig(adv_estimator=given, **keys))
        else:
            why = try_loss(partial(loaded, **keys), POLICY_LOSSES[given].columns)
    except Exception as error:  # the user's function may raise anything
        why = f"fails on a few rows: {with_line(error, function.path)}"
        raise ConfigError.one(key, given, why, "correct the function") from error
    if why:
        raise ConfigError.one(key, given, why, "correct the function")
