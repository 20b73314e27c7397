"""The page as a file: small, quick, self-contained, and unaffected by what is in samples."""

from __future__ import annotations

import html
import json
import re
import time
from html.parser import HTMLParser
from pathlib import Path

import pytest
from report.runs import ACCURACY, HOSTILE, SCORE, hostile_run, record, write_run

from hydraflow.report.__main__ import main
from hydraflow.report.page import render
from hydraflow.report.reading import read_run


def data_of(page: str) -> dict:
    found = re.search(r'<script type="application/json" id="data">(.*?)</script>', page, re.DOTALL)
    assert found is not None
    return json.loads(found[1])


def test_the_command_writes_a_page_into_the_run_folder(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = write_run(tmp_path / "ppo-1", [record(step, **{ACCURACY: 0.5}) for step in (1, 2)])
    assert main([str(folder)]) == 0
    page = (folder / "report.html").read_text()
    assert f"{folder}/report.html: " in capsys.readouterr().out
    charts = {chart["name"]: chart for chart in data_of(page)["charts"]}
    assert charts[ACCURACY]["title"] == "sums: accuracy, mean" and charts[SCORE]["unit"] == "score"
    assert charts[SCORE]["curves"][0]["y"] == [0.0198, 0.03921]
    assert "data.train_batch_size" in page and "prompts per step Q" in page


def test_mistakes_are_answered_with_2(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = str(write_run(tmp_path / "run", [record(1)]))
    assert main([str(tmp_path / "none")]) == 2
    assert main([folder, "--output", str(tmp_path / "no" / "such" / "folder.html")]) == 2
    assert main([folder] * 33) == 2
    for place in (".", "/", str(tmp_path)):
        assert main([folder, "--output", place]) == 2
    reported = capsys.readouterr().err
    assert "is not a folder" in reported and "cannot be written" in reported and "at most 32 runs" in reported


class Tags(HTMLParser):
    """What a page would load or run: addresses, scripts, and its policy."""

    def __init__(self, page: str):
        super().__init__()
        self.addresses: list[str] = []
        self.scripts, self.policy = 0, ""
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = dict(attrs)
        self.addresses += [
            value or "" for name, value in attrs if name in ("src", "href", "srcset", "action", "style")
        ]
        self.scripts += tag == "script"
        if given.get("http-equiv") == "Content-Security-Policy":
            self.policy = given.get("content") or ""


def test_nothing_is_fetched_and_only_the_pages_own_script_may_run(tmp_path: Path) -> None:
    tags = Tags(render([read_run(hostile_run(tmp_path / "run"))]))
    assert [address for address in tags.addresses if not address.startswith(("#", "data:,"))] == []
    assert tags.scripts == 2, "the data and the page's own"
    assert tags.policy.startswith("default-src 'none'; style-src 'sha256-") and "unsafe" not in tags.policy
    assert {"base-uri 'none'", "form-action 'none'"} <= set(tags.policy.split("; ")), (
        "default-src does not speak for these"
    )


def test_hostile_text_is_text(tmp_path: Path) -> None:
    page = render([read_run(hostile_run(tmp_path / "run"))])
    for text in HOSTILE[:2]:
        assert text not in page
        assert html.escape(text).replace("&quot;", "&#34;") in page
    assert "1337" not in page, "a template in a sample is not filled in"
    assert f"… ({len(HOSTILE[4]) - 2000} more characters)" in page
    page.encode("utf-8")


def test_ten_thousand_steps_are_quick_and_small(tmp_path: Path) -> None:
    more = {f"actor/metric{number}": 0.123456789 * number for number in range(60)}
    folder = write_run(
        tmp_path / "run",
        [record(step, **{name: value * step % 7 for name, value in more.items()}) for step in range(10_000)],
    )
    began = time.process_time()
    page = render([read_run(folder)])
    seconds = time.process_time() - began
    assert seconds < 2.5, "about half a second of work on a machine that does nothing else"
    assert len(page.encode()) < 500_000
    data = data_of(page)
    drawn = next(chart for chart in data["charts"] if chart["name"] == "actor/metric3")["curves"][0]
    width = data["axes"][drawn["x"]]["w"]
    assert width == 54 and f"the mean of a span of {width} steps" in page
    assert "Each bar is the mean of 42 steps." in page
    assert "metrics.jsonl has every step" in page


def test_runs_side_by_side(tmp_path: Path) -> None:
    first = write_run(tmp_path / "a" / "ppo", [record(1), record(2)], settings={"lr": (0.1, "command line")})
    second = write_run(tmp_path / "b" / "ppo", [record(1)], settings={"lr": (0.2, "default")})
    page = render([read_run(folder) for folder in (first, second, second)])
    assert data_of(page)["runs"] == ["a/ppo", "b/ppo (2)", "b/ppo (3)"]
    chart = next(chart for chart in data_of(page)["charts"] if chart["name"] == SCORE)
    assert [curve["run"] for curve in chart["curves"]] == [0, 1, 2]
    assert 'id="differences"' in page and "Where the runs differ" in page


def test_metrics_that_never_move_take_no_chart(tmp_path: Path) -> None:
    page = render(
        [
            read_run(
                write_run(tmp_path / "run", [record(step, **{"critic/score/max": 1.0}) for step in (1, 2, 3)])
            )
        ]
    )
    assert "<code>critic/score/max</code> = 1" in page
