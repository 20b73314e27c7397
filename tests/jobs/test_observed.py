"""What a run lets its user see: the timeline, log files, profiles, stacks, a debugger in a worker. What one
leaves whose worker dies: `test_interrupts.py`."""

from __future__ import annotations

import json
import re
import socket
from pathlib import Path
from typing import Any

import pytest
from dispatch import trace_format
from jobs.command import ONE_RANK, SMALL_RECIPE, hydraflow, read_steps, start, wait_for

pytestmark = pytest.mark.slow

PHASES = [
    "gen",
    "old_log_prob",
    "ref",
    "values",
    "reward",
    "adv",
    "update_critic",
    "update_actor",
    "update_weights",
]


def trace_of(run: Path) -> dict[str, Any]:
    trace = json.loads((run / "timeline.json").read_text())
    trace_format.check(trace)
    return trace


def during(step: dict[str, Any], events: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Those that begin in a step."""
    return [event for event in events if step["ts"] <= event["ts"] < step["ts"] + step["dur"]]


def test_a_step_is_the_sum_of_its_spans_and_as_long_as_the_metrics_say(run: Path) -> None:
    events = trace_format.spans(trace_of(run), "controller")
    measured = {line["step"]: line for line in read_steps(run) if line["step"]}
    for number in (1, 2, 3):
        (step,) = [event for event in events if event["name"] == f"step {number}"]
        inside = [event for event in during(step, events) if event is not step]
        assert [event["name"] for event in inside if event["name"] != "dispatch"] == PHASES, (
            "in the order of the step"
        )
        assert sum(event["dur"] for event in inside) == pytest.approx(step["dur"], abs=20)
        for event in [step, *(event for event in inside if event["name"] in PHASES)]:
            name = "step" if event is step else event["name"]
            assert event["dur"] / 1e6 == pytest.approx(measured[number][f"timing_s/{name}"], abs=2e-6)
            assert event["args"] == {"step": number}


def test_roles_and_ranks_of_the_timeline(run: Path) -> None:
    trace = trace_of(run)
    names = trace_format.processes(trace)
    assert {"controller", "actor", "rollout", "reward", "advantage"} <= set(names) and next(
        iter(names)
    ) == "controller"
    (step,) = [event for event in trace_format.spans(trace, "controller") if event["name"] == "step 2"]
    for rank in (0, 1):
        work = trace_format.spans(trace, "actor", rank)
        (update,) = [event for event in during(step, work) if event["name"] == "update"]
        inner = [
            event["name"]
            for event in work
            if update["ts"] <= event["ts"] and event["ts"] + event["dur"] <= update["ts"] + update["dur"]
        ]
        assert inner == ["update", *["gradient", "optimizer_step"] * 2], "two optimizer steps"
        sampled = during(step, trace_format.spans(trace, "rollout", rank))
        assert [event["name"] for event in sampled].count("generate") == 1


def test_log_files_of_every_role_and_rank(run: Path) -> None:
    made = {path.name for path in (run / "logs").iterdir()}
    assert {
        "controller-0.log",
        "actor-0.log",
        "actor-1.log",
        "rollout-0.log",
        "rollout-1.log",
        "reward-0.log",
    } <= made
    said = hydraflow("logs", str(run), "--role", "controller", "--grep", "profile of step", cwd=run)
    assert said.returncode == 0 and re.fullmatch(
        r"\S+Z INFO controller-0 hydraflow\.dispatch\.runtime: profile of step 2: .*\n", said.stdout
    )


def test_the_profile_is_of_the_asked_step_and_rank(run: Path) -> None:
    files = sorted(path.relative_to(run / "profile").as_posix() for path in (run / "profile").rglob("*.json"))
    assert files == ["step_2/actor+rollout+advantage-0.json", "step_2/reward-0.json"], (
        "not of the warm start's second step"
    )
    names = {
        event.get("name") for event in json.loads((run / "profile" / files[0]).read_text())["traceEvents"]
    }
    assert {"actor.update", "rollout.generate"} <= names


def test_a_call_that_takes_too_long_leaves_the_stacks_of_all(tmp_path: Path, recipe_cache: Path) -> None:
    (tmp_path / "slow.py").write_text(
        "import time\n\ndef compute_score(data_source, solution_str, ground_truth, extra_info):\n   "
        " time.sleep(600)\n"
    )
    given = [
        *SMALL_RECIPE,
        "trainer.default_local_dir=out",
        f"recipe.cache_dir={recipe_cache}",
        "trainer.val_before_train=false",
    ]
    slow = ["reward.custom_reward_function.path=slow.py", "reward.timeout=900", "trainer.rpc_timeout=15"]
    done = hydraflow("main_ppo", *given, *slow, cwd=tmp_path)
    assert done.returncode == 4, done.stderr[-3000:]
    (file,) = (tmp_path / "out" / "stacks").iterdir()
    assert (
        f"reward rank 0 on node {socket.gethostname()} failed in score: no answer in 15 seconds; stacks of"
        f" all workers: {file}" in done.stderr
    )
    text = file.read_text()
    assert "compute_score (slow.py:4)" in text, "the child process of the reward worker, where it hangs"
    assert re.findall(r"^=== (.*), pid", text, re.MULTILINE) == [
        "actor+rollout+advantage rank 0",
        "actor+rollout+advantage rank 1",
        "reward rank 0",
    ]


def test_a_debugger_in_a_worker_of_ray(tmp_path: Path, recipe_cache: Path) -> None:
    """With `ray debug`'s protocol, which is a terminal's: what needs no editor. The deadline of 5 s does not
    end it."""
    stops = "    if not seen:\n        seen.append(1)\n        breakpoint()\n    return 0.0\n"
    (tmp_path / "stops.py").write_text(
        f"seen = []\n\ndef compute_score(data_source, solution_str, ground_truth, extra_info):\n{stops}"
    )
    given = [
        *SMALL_RECIPE,
        f"recipe.cache_dir={recipe_cache}",
        "trainer.total_training_steps=1",
        "trainer.default_local_dir=out",
    ]
    given += [
        "trainer.val_before_train=false",
        "reward.custom_reward_function.path=stops.py",
        "+debug=true",
        *ONE_RANK,
        "trainer.rpc_timeout=5",
    ]
    started = start("main_ppo", *given, cwd=tmp_path)
    found = re.compile(r"\(WorkerHost.* RemotePdb session open at localhost:(\d+)")
    wait_for(
        lambda: started.process.poll() is not None or found.search(started.said()), 180, "the breakpoint"
    )
    match = found.search(started.said())
    assert match, started.said()[-3000:]
    with socket.create_connection(("localhost", int(match[1])), timeout=30) as connection:
        connection.sendall(b"p 'source is ' + data_source\nc\n")
        connection.settimeout(30)
        heard = b""
        while b"(Pdb) 'source is arithmetic'" not in heard:
            heard += connection.recv(4096)
    assert started.ended(120) == 0, started.said()[-3000:]
    assert json.loads((tmp_path / "out" / "summary.json").read_text())["steps"] == 1
    assert len(list((tmp_path / "out" / "logs").glob("actor-*.log"))) == 1, "a single process per role"
