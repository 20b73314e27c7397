"""GPUs and memory against the plan."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

from checkup.given import configured, findings, states

from hydraflow.checkup.context import CheckContext
from hydraflow.checkup.finding import State
from hydraflow.checkup.memory import judge_device, judge_host, judge_unused
from hydraflow.memory.estimate import estimate
from hydraflow.memory.limits import MachineMemory, host_memory, limits_of
from hydraflow.memory.report import Advice, MemoryReport


def report(model: Path, data: Path) -> MemoryReport:
    context = CheckContext(configured(model, data))
    return estimate(
        context.plan, context.config, context.shape, limits=limits_of(context.config), critic_shape=None
    )


def test_a_small_model_fits(model: Path, data: Path) -> None:
    context = CheckContext(configured(model, data))
    assert states(findings(context, "host memory")) == [State.OK]
    assert states(findings(context, "devices")) == [State.OK]
    assert states(findings(context, "GPUs, used")) == [State.SKIPPED]


def test_sizes_that_the_estimate_does_not_know_are_no_problem(model: Path, data: Path) -> None:
    sizes = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(
        json.dumps({name: value for name, value in sizes.items() if name != "hidden_size"})
    )
    [found] = findings(CheckContext(configured(model, data)), "host memory")
    assert found.state is State.SKIPPED and "hidden_size" in found.evidence


def test_device_memory_below_the_estimate(model: Path, data: Path) -> None:
    found = report(model, data)
    peak = max(group.peak for group in found.groups)
    assert judge_device(found, peak, "GPU 0").state is State.OK
    # Within what an estimate may be off.
    assert judge_device(found, int(peak / 1.1), "GPU 0").state is State.WARNING
    assert judge_device(found, peak // 2, "GPU 0").state is State.PROBLEM


def test_changes_that_build_on_each_other_are_given_together(model: Path, data: Path) -> None:
    advice = tuple(
        Advice(override, 1, "", where)
        for override, where in (("a=1", "host"), ("b=2", "device"), ("c=3", "host"))
    )
    found = judge_device(replace(report(model, data), advice=advice), 1, "GPU 0")
    assert found.remedy == "a=1 b=2", "the last is for the host alone"


def test_the_plan_counts_the_prompts_that_a_run_takes(model: Path, data: Path) -> None:
    whole = CheckContext(configured(model, data)).plan.total_steps
    given = configured(model, data, data__train_max_samples=4)
    assert whole > CheckContext(given).plan.total_steps == given.trainer.total_epochs


def test_host_memory_below_the_estimate(model: Path, data: Path) -> None:
    found = report(model, data)
    assert judge_host(found, MachineMemory(2**40, 2**40)).state is State.OK
    short = judge_host(found, MachineMemory(2**40, found.host.total // 2))
    assert short.state is State.PROBLEM and "1.00 TiB" in short.evidence


def test_a_control_group_s_limit_counts(tmp_path: Path) -> None:
    (tmp_path / "memory.max").write_text("1000000000\n")
    (tmp_path / "memory.current").write_text("400000000\n")
    membership = tmp_path / "membership"
    membership.write_text("0::/\n")
    assert host_memory(tmp_path, membership) == MachineMemory(10**9, 6 * 10**8)
    (tmp_path / "memory.max").write_text("max\n")
    assert host_memory(tmp_path, membership).total > 10**9


def test_gpus_that_torch_does_not_see() -> None:
    assert judge_unused("auto", 0).state is State.OK
    assert judge_unused("cpu", 8).state is State.OK
    unseen = judge_unused("auto", 8)
    assert unseen.state is State.WARNING and "lists 8 GPUs" in unseen.evidence


def test_a_device_that_is_not_here_is_reported_once(model: Path, data: Path) -> None:
    context = CheckContext(configured(model, data, trainer__device="cuda"))
    if context.device_type == "cpu" or states(findings(context, "processors")) == [State.PROBLEM]:
        assert states(findings(context, "devices")) == [State.SKIPPED]
