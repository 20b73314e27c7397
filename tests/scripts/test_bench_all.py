"""All benches: a page of the figures that there are, which a second start adds to."""

from __future__ import annotations

import json
import runpy
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from transformers import AutoModelForCausalLM

import scripts.bench.all as benches
from scripts.bench.all import BENCHES, Bench, Row, main, measure, page

FIGURES = {
    "trl-0.85M-bf16": {
        "model": "0.85M",
        "dtype": "bf16",
        "tokens": 32,
        "ragged": False,
        "trajectories_per_step": 128,
        "hydraflow_trajectories_per_s": 256.0,
        "trl_trajectories_per_s": 128.0,
        "ratio": 2.0,
        "least_seconds_per_step": 0.02,
        "least_seconds_per_update": 0.015,
        "hydraflow_phases_s": {"timing_s/update_actor": 0.3},
    },
    "plan": {"devices": 16, "milliseconds": {"configuration": 1.5}},
}
FAKE = "import json; print(json.dumps({'a': 1}, indent=2)); print(json.dumps({'a': 2}))"


@pytest.fixture(autouse=True)
def short_look(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(benches, "LOOK_SECONDS", 0.01)


def keep(results: Path, name: str, load: float = 0.1) -> None:
    results.mkdir(exist_ok=True)
    kept = {"load": load, "seconds": 1.0, "commit": "abc1234", "found": [FIGURES[name]]}
    (results / f"{name}.json").write_text(json.dumps(kept))


def of_fake(found: benches.Found) -> list[Row]:
    return [Row("fake", "/".join(str(one["a"]) for one in found))]


def test_the_page_has_the_figures_that_there_are(tmp_path: Path) -> None:
    keep(tmp_path, "plan")
    keep(tmp_path, "trl-0.85M-bf16")
    found = page(tmp_path)
    assert "| batch plan for 16 devices | 1.5 ms |  |  |  |" in found
    assert "| GRPO step, 0.85M, bf16, 128 x 32 tokens | 0.5 s | TRL 1 s | 2.00 | 0.02 s |" in found
    assert "| the update of that step | 0.3 s |  |  | 0.015 s, 5% of it |" in found
    assert "Commits: abc1234. The machine was quiet." in found
    assert "Not measured: step, trl-recipe, trl-0.85M-fp32, trl-0.85M-fp32-short-ragged," in found
    (row, _) = benches.of_trl([{**FIGURES["trl-0.85M-bf16"], "ragged": True}])
    assert row.what == "GRPO step, 0.85M, bf16, 128 x up to 32 tokens"
    keep(tmp_path, "plan", load=3.0)
    assert "**The machine was not quiet**: up to 3.0 of its cores" in page(tmp_path)


def test_what_was_measured_is_not_measured_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = tmp_path / "fake.py"
    script.write_text(FAKE)
    broken = tmp_path / "broken.py"
    broken.write_text("raise SystemExit('no TRL here')")
    monkeypatch.setattr(
        benches,
        "BENCHES",
        {"one": Bench(str(script), (), of_fake), "other": Bench(str(broken), (), of_fake)},
    )
    results, target = tmp_path / "results", tmp_path / "page.md"
    assert main([], results, target) == 1
    assert "| fake | 1/2 |" in target.read_text() and "Not measured: other." in target.read_text()
    first = (results / "one.json").read_text()
    script.write_text("print('{\"a\": 3}')")
    assert main(["one"], results, target) == 0 and (results / "one.json").read_text() == first
    assert main(["one", "--again"], results, target) == 0
    assert "| fake | 3 |" in target.read_text()
    assert main(["one", "--page", str(tmp_path / "other.md")], results, target) == 0
    assert "| fake | 3 |" in (tmp_path / "other.md").read_text()


def test_a_bench_that_fails_says_why(tmp_path: Path) -> None:
    script = tmp_path / "broken.py"
    script.write_text("raise SystemExit('no TRL here')")
    assert measure("one", Bench(str(script), (), of_fake), tmp_path) == "no TRL here"
    assert not (tmp_path / "one.json").exists()


SLEEPS = """
import pathlib, subprocess, sys, time
child = subprocess.Popen(["sh", "-c", "trap '' TERM; sleep 60"], start_new_session=True)
pathlib.Path(sys.argv[1]).write_text(str(child.pid))
time.sleep(60)
"""


@pytest.mark.slow(short=True)
def test_a_bench_that_takes_too_long_leaves_nothing_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not even a process in a session of its own that does not end when asked to."""
    monkeypatch.setattr(benches, "LIMIT_SECONDS", 2.0)
    monkeypatch.setattr(benches, "GRACE_SECONDS", 0.1)
    script, kept = tmp_path / "sleeps.py", tmp_path / "pid"
    script.write_text(SLEEPS)
    assert measure("one", Bench(str(script), (str(kept),), of_fake), tmp_path) == "took more than 2.0 s"
    assert_ends(int(kept.read_text()))


def assert_ends(pid: int) -> None:
    """Within a few seconds; an orphan stays a zombie until the first process reaps it."""
    with suppress(psutil.NoSuchProcess):
        process, deadline = psutil.Process(pid), time.monotonic() + 10
        while process.status() != psutil.STATUS_ZOMBIE:
            assert time.monotonic() < deadline
            time.sleep(0.02)


def test_a_page_without_a_folder_is_refused_before_anything_is_measured(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["plan", "--page", str(tmp_path / "none" / "x.md")], tmp_path)
    assert f"x.md: there is no folder {tmp_path}/none" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_sampling_is_compared_in_the_same_dtype() -> None:
    speeds = {("fp32", "native"): 20, ("fp32", "transformers"): 10}
    speeds |= {("bf16", "native"): 90, ("bf16", "transformers"): 30}
    case = {"sequences": 128, "model": "1M", "lengths": "ragged"}
    of_case = [
        {**case, "dtype": dtype, "engine": engine, "tokens_per_second": speed}
        for (dtype, engine), speed in speeds.items()
    ]
    full, half = benches.of_generation(of_case)
    assert (full.ratio, half.ratio) == (2.0, 3.0)
    assert half.what == "sampling 128 at once, 1M, bf16, ragged lengths, one thread"


def test_memory_of_a_head_says_how_much_is_gradients() -> None:
    sizes = {"way": "fused", "tokens": 32768, "vocabulary": 151936, "hidden": 896}
    _, row = benches.of_head([{**sizes, "cpu_s": 400.0, "peak_mib": 1800.0, "gradients_mib": 631.31}])
    assert row.what.startswith("head, 32,768 tokens x 151,936, hidden size 896,")
    assert row.ours == "1,800 MiB, 631 of them gradients" and row.peer == "all logits once 18,992 MiB"


def test_memory_of_a_run_has_a_row_for_each_part_of_it() -> None:
    sizes = {"steps": 200, "before_mib": {"workers": 1000.0}, "after_mib": {"workers": 1030.0}}
    found = [{"start": start, **sizes, "growth": {"workers": 0.03}} for start in (60, 400)]
    early, late = benches.of_growth(found)
    assert early.what == "default recipe, memory over 200 steps after 60, workers"
    assert late.what == "default recipe, memory over 200 steps after 400, workers"
    assert early.ours == "1,000 -> 1,030 MiB, +3.0%"


def test_wrong_advantages_fail_their_bench(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = runpy.run_path(str(benches.HERE / "advantages.py"))
    names = bench["main"].__globals__
    monkeypatch.setattr(sys, "argv", ["advantages.py", "--rows", "2", "--tokens", "8", "--repeats", "1"])
    bench["main"]()
    right = bench["gae"]
    monkeypatch.setitem(names, "gae", lambda *given, **knobs: (right(*given, **knobs)[0] * 1.00001, None))
    with pytest.raises(SystemExit, match="GAE differs from the loop by 1e-05 of the largest advantage"):
        bench["main"]()


@pytest.fixture
def growth(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    monkeypatch.syspath_prepend(benches.HERE)
    return runpy.run_path(str(benches.HERE / "growth.py"))


LOGS_A_STEP = """
import os, pathlib, sys, time
pathlib.Path("pid").write_text(str(os.getpid()))
pathlib.Path("metrics.jsonl").write_text('{"step": 1, "a": 2}')
time.sleep(60)
"""


def test_a_run_whose_growth_is_measured_always_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, growth: dict[str, Any]
) -> None:
    monkeypatch.chdir(tmp_path)
    given = [sys.executable, "-c", LOGS_A_STEP], tmp_path / "metrics.jsonl"
    sizes = growth["sizes_at"]([1], *given, deadline=time.monotonic() + 30)
    assert sizes[1]["controller"] > 1 and not psutil.pid_exists(int(Path("pid").read_text()))
    with pytest.raises(SystemExit, match="the run did not reach step 2"):
        growth["sizes_at"]([1, 2], *given, deadline=time.monotonic() + 0.5)
    assert not psutil.pid_exists(int(Path("pid").read_text()))


def test_late_growth_fails_its_bench(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], growth: dict[str, Any]
) -> None:
    sizes = {60: 1000.0, 260: 1500.0, 400: 2000.0, 600: 2019.0}
    names = growth["main"].__globals__
    monkeypatch.setitem(names, "default_assets", lambda *overrides: None)
    monkeypatch.setitem(
        names, "sizes_at", lambda *given: {mark: {"workers": size} for mark, size in sizes.items()}
    )
    monkeypatch.setattr(sys, "argv", ["growth.py"])
    growth["main"]()
    sizes[600] = 2024.0
    capsys.readouterr()
    with pytest.raises(SystemExit, match=r"still growing after step 400, over 1%: workers \+1\.2%"):
        growth["main"]()
    early, late = benches.objects(capsys.readouterr().out)
    assert (early["growth"], late["growth"]) == ({"workers": 0.5}, {"workers": pytest.approx(0.012)})


@pytest.mark.parametrize("name", ["0.85M", "gpt2"])
def test_models_end_responses_at_a_given_rate(tmp_path: Path, name: str) -> None:
    held = runpy.run_path(str(benches.HERE / "held.py"))
    model = AutoModelForCausalLM.from_pretrained(held["write_model"](name, tmp_path, end_every=64))
    tokens = torch.randint(2, model.config.vocab_size, (4, 16), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        ends = model(tokens).logits.softmax(-1)[..., model.config.eos_token_id]
    assert torch.allclose(64 * ends, torch.ones_like(ends), atol=0.1)


def test_scripts_exist() -> None:
    assert all((benches.HERE / bench.script).is_file() for bench in BENCHES.values())
