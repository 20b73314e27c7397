"""The table of all checks, and the one place that runs them, each with a time limit. No check can end the
program.

In: `CheckContext`. Out: `Result`s in the order of the table. A new check is a function from that to
findings, and a line in `CHECKS`. The checks of the configuration itself are here: keys without effect, what
cannot run yet, and the batch plan's rules, whose numbers `python -m hydraflow.plan` explains.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from queue import Empty, SimpleQueue
from typing import Any

from hydraflow.checkup import (
    data_files,
    disk,
    libraries,
    limits,
    memory,
    model_files,
    network,
    scoring,
    templates,
    trackers,
)
from hydraflow.checkup.context import CheckContext
from hydraflow.checkup.finding import CheckSkipped, Finding, State, note, of_problem, ok, problem
from hydraflow.compose.rules import problems as wrong_values
from hydraflow.compose.runnable import problems as not_runnable
from hydraflow.errors import ConfigError
from hydraflow.generation.config import GENERATION_ENGINES

SECONDS = 20.0
"""Default time limit of a check."""
PROBE_LIMIT = libraries.PROBE_SECONDS + SECONDS
"""Time limit of a check that imports a library."""


@dataclass(frozen=True)
class Check:
    """What the doctor runs under one name."""

    name: str
    look: Callable[[Any], Iterable[Finding]]
    """From `CheckContext` to findings."""
    fast: bool = False
    """Whether it takes milliseconds, so that main_ppo runs it at every start."""
    seconds: float | Callable[[Any], float] = SECONDS
    """Time limit, after which the check is abandoned."""


@dataclass(frozen=True)
class Result:
    """The findings of a check."""

    name: str
    findings: tuple[Finding, ...]
    seconds: float
    """How long the check took."""


CLUSTER = "cluster.*: describes machines for python -m hydraflow.plan; the doctor checks this one"


def check_settings(context: CheckContext) -> Iterator[Finding]:
    """Keys that main_ppo would reject or does not support, and keys without effect."""
    refused = [*context.unsupported, *wrong_values(context.asked), *not_runnable(context.config)]
    notes = [*context.notes, *([CLUSTER] if context.asked.cluster != context.config.cluster else [])]
    yield from map(of_problem, refused)
    yield from map(note, notes)
    if not refused and not notes:
        yield ok("every key has an effect and can be run")


def check_plan(context: CheckContext) -> Iterator[Finding]:
    """The batch plan resolves; its broken rules are reported one by one."""
    plan = context.plan
    steps = f"{plan.total_steps or 'an unknown number of'} training steps"
    each = f"{plan.prompts_per_step} prompts and {plan.trajectories_per_step} trajectories"
    yield ok(f"{steps} of {each} on {len(plan.cluster.devices)} devices, {plan.placement}")


CHECKS = (
    Check("library versions", libraries.check_versions, fast=True),
    Check("tensordict and torch", libraries.check_tensordict, fast=True),
    *(
        Check(
            f"{engine.needs.name} and torch", partial(libraries.check_generation, name), seconds=PROBE_LIMIT
        )
        for name, engine in GENERATION_ENGINES.items()
        if engine.needs is not None
    ),
    Check("Megatron-Core", libraries.check_megatron, seconds=PROBE_LIMIT),
    Check("flash-attn", libraries.check_flash_attention, seconds=PROBE_LIMIT),
    Check("Triton", libraries.check_triton, seconds=PROBE_LIMIT),
    Check("configuration", check_settings),
    Check("batch plan", check_plan),
    Check("processors", limits.check_processors, fast=True),
    Check("devices", memory.check_devices, fast=True),
    Check("GPUs, used", memory.check_gpus, seconds=memory.GPU_SECONDS + SECONDS),
    Check("host memory", memory.check_host_memory, fast=True),
    Check("shared memory", limits.check_shared_memory, fast=True),
    Check("open files", limits.check_open_files, fast=True),
    Check("temporary files", limits.check_temporary_files, fast=True),
    Check("disk", disk.check_disk, fast=True),
    Check("recipe's folder", disk.check_recipe, fast=True),
    Check("ports", network.check_ports, fast=True),
    Check("Ray", network.check_ray, fast=True),
    Check("trackers", trackers.check_trackers, fast=True),
    Check("trackers, used", trackers.check_writing, seconds=60.0),
    Check("model files", model_files.check_model, fast=True),
    Check("weights and model", model_files.check_weights, seconds=60.0),
    Check("model and tokenizer", model_files.check_model_fits, fast=True),
    Check("Megatron and model", model_files.check_megatron_model, fast=True),
    Check("end of sequence", templates.check_end_tokens, fast=True),
    Check("data files", data_files.check_data, seconds=60.0),
    Check("chat template", templates.check_template, fast=True),
    Check("prompt lengths", data_files.check_lengths, seconds=120.0),
    Check("reward function", scoring.check_reward, seconds=lambda c: scoring.seconds(c.config.reward)),
)
"""In the order of the report; the first to open something broken reports it."""


def run_checks(context: CheckContext | None, checks: Iterable[Check] = CHECKS) -> Iterator[Result]:
    """Runs the checks one after another; yields each result as it arrives. `context` may be None for checks
    that look at something else."""
    for check in checks:
        started = time.monotonic()
        limit = check.seconds(context) if callable(check.seconds) else check.seconds
        findings = within(limit, check, context)
        yield Result(check.name, tuple(findings), time.monotonic() - started)


def within(seconds: float, check: Check, context: CheckContext | None) -> list[Finding]:
    """The findings, or a problem after `seconds`. A check that is still running is left in a daemon thread,
    which does not delay the exit."""
    answers: SimpleQueue[list[Finding]] = SimpleQueue()
    threading.Thread(
        target=lambda: answers.put(_guarded(check, context)), name=check.name, daemon=True
    ).start()
    try:
        return answers.get(timeout=seconds)
    except Empty:
        remedy = "look for a network drive that hangs, or model code that hangs"
        return [problem(f"gave no answer within {seconds:g} seconds", remedy)]


def _guarded(check: Check, context: CheckContext | None) -> list[Finding]:
    """The check's findings. Any exception is a finding too: checks open files of any kind and run the model's
    own code."""
    found: list[Finding] = []
    try:
        for finding in check.look(context):
            found.append(finding)
    except CheckSkipped as reason:
        found.append(Finding(State.SKIPPED, str(reason)))
    except ConfigError as error:
        found += [of_problem(each) for each in error.problems]
    except (Exception, SystemExit) as error:
        evidence = f"the check itself failed: {type(error).__name__}: {error}"[:500]
        found.append(problem(evidence, "please report it, with this line"))
    return found
