"""The page in a real browser: it draws, complains of nothing, and runs nothing of what samples say."""

from __future__ import annotations

import re
import shutil
import subprocess
from html.parser import HTMLParser
from pathlib import Path

import pytest
from report.runs import ACCURACY, HOSTILE, hostile_run, record, write_run

from hydraflow.report.__main__ import main

BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
BROWSER = next((found for name in BROWSERS if (found := shutil.which(name))), None)
pytestmark = pytest.mark.skipif(BROWSER is None, reason="there is no Chromium here: apt-get install chromium")


def opened(page: Path, home: Path) -> tuple[str, list[str]]:
    """The page's elements once its script has run, and what the browser's console said."""
    flags = ["--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run", "--disable-extensions"]
    flags += [f"--user-data-dir={home}", "--enable-logging=stderr", "--virtual-time-budget=5000", "--window-size=1400,1000", "--dump-dom"]
    done = subprocess.run([str(BROWSER), *flags, page.as_uri()], capture_output=True, text=True, timeout=240, check=True, errors="replace")
    return done.stdout, [line for line in done.stderr.splitlines() if "CONSOLE" in line]


class Elements(HTMLParser):
    """Counts elements, and collects the text of the cells of samples."""

    def __init__(self, dom: str):
        super().__init__()
        self.counts: dict[str, int] = {}
        self.handlers: list[str] = []
        self.feed(dom)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.counts[tag] = self.counts.get(tag, 0) + 1
        self.handlers += [name for name, _ in attrs if name.startswith("on")]


def test_a_run_is_drawn_without_a_word_from_the_console(tmp_path: Path) -> None:
    rows = [record(step, **({ACCURACY: step / 600} if step % 50 == 0 else {}), **{"reward/failed_rows": 0.0}) for step in range(600)]
    rows[7]["actor/entropy"] = "nan"
    folder = write_run(tmp_path / "run", rows, samples={100: [{"input": "1+1=", "output": "2", "score": 1.0, "ground_truth": "2"}]})
    assert main([str(folder)]) == 0
    dom, console = opened(folder / "report.html", tmp_path / "home")
    assert console == []
    assert 'data-drawn="yes"' in dom
    assert dom.count('<path d="M') >= 5 and "NaN" not in "".join(re.findall(r' d="[^"]*"', dom))
    assert re.search(r'aria-label="Score, mean\. about 0\.\d+ → 1; least 0, greatest 1"', dom)
    assert 'class="band run-0' in dom, "600 steps are drawn thinner, with their band"
    assert dom.count("<circle") >= 12, "the few validations have marks"
    for section in ("summary", "faults", "curves", "phases", "samples", "configuration", "plan", "versions"):
        assert f'<section id="{section}"' in dom


def test_runs_are_compared_in_their_own_lines(tmp_path: Path) -> None:
    folders = [str(write_run(tmp_path / f"run{number}", [record(step) for step in range(1, 30)])) for number in range(10)]
    page = tmp_path / "page.html"
    assert main([*folders, "--output", str(page)]) == 0
    dom, console = opened(page, tmp_path / "home")
    assert console == []
    assert 'class="line run-1 dash-1"' in dom, "the tenth run has the second colour, dashed"
    assert dom.count("<svg") > 10


def test_hostile_text_runs_nothing(tmp_path: Path) -> None:
    folder = hostile_run(tmp_path / "run <b>&amp;")
    assert main([str(folder)]) == 0
    dom, console = opened(folder / "report.html", tmp_path / "home")
    assert console == [], "not even a refused attempt"
    assert 'data-drawn="yes"' in dom and "data-hacked" not in dom.split("<body>")[0]
    elements = Elements(dom)
    assert elements.counts["script"] == 2 and "img" not in elements.counts and elements.handlers == []
    assert HOSTILE[4][:20] not in dom


def test_a_page_about_nothing_is_drawn_too(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "plan.json").write_text("{}")
    assert main([str(tmp_path / "run")]) == 0
    dom, console = opened(tmp_path / "run" / "report.html", tmp_path / "home")
    assert (console, 'data-drawn="yes"' in dom) == ([], True)
