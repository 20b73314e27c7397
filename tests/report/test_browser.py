"""The page in a real browser: it draws, answers pointer and keys, complains of nothing, and runs nothing of
what samples say."""

from __future__ import annotations

from pathlib import Path

import pytest
from report.browser import BROWSER, visit
from report.runs import ACCURACY, HOSTILE, hostile_run, record, write_run

from hydraflow.report.__main__ import main

pytestmark = [
    pytest.mark.slow(short=True),
    pytest.mark.skipif(BROWSER is None, reason="there is no Chromium here: apt-get install chromium"),
]

DRAWN = "document.documentElement.dataset.drawn"
SCORE_PLOT = (
    "[...document.querySelectorAll('figure')].find(one => one.textContent.startsWith('Score,"
    " mean')).querySelector('.plot')"
)
POINT = f"""(() => {{
  const plot = {SCORE_PLOT}, svg = plot.querySelector('svg'), box = svg.getBoundingClientRect();
  const at = {{ clientX: box.left + box.width * 0.9999, clientY: box.top + 20 }};
  svg.dispatchEvent(new PointerEvent('pointermove', at));
  return plot.querySelector('.tip').textContent;
}})()"""
KEYS = f"""(() => {{
  const plot = {SCORE_PLOT}, svg = plot.querySelector('svg'), tip = plot.querySelector('.tip');
  svg.dispatchEvent(new Event('blur'));
  const focused = ['ArrowRight', 'ArrowRight', 'ArrowLeft'].map(key => {{
    svg.dispatchEvent(new KeyboardEvent('keydown', {{ key }}));
    return tip.querySelector('strong').textContent;
  }});
  svg.dispatchEvent(new Event('blur'));
  return [...focused, tip.hidden];
}})()"""
MINUTES = f"""(() => {{
  const axis = document.getElementById('axis');
  axis.value = 't';
  axis.dispatchEvent(new Event('change'));
  return {SCORE_PLOT}.querySelector('svg').textContent.includes('minutes');
}})()"""
DARK = """(() => {
  const theme = document.getElementById('theme'), colours = [];
  for (const value of ['dark', 'light']) {
    theme.value = value;
    theme.dispatchEvent(new Event('change'));
    colours.push(getComputedStyle(document.body).backgroundColor);
  }
  return colours;
})()"""
SIFT = """(() => {
  const find = document.querySelector('.find'), chosen = document.querySelector('.chosen');
  const rows = [...document.querySelectorAll('.settings tbody tr')];
  const shown = () => rows.filter(row => getComputedStyle(row).display !== 'none').length;
  const counts = [shown()];
  find.value = 'SEED';
  find.dispatchEvent(new Event('input'));
  counts.push(shown());
  find.value = '';
  chosen.checked = true;
  chosen.dispatchEvent(new Event('change'));
  return [...counts, shown(), document.querySelector('.settings tr.set').textContent];
})()"""
WIDER = "document.documentElement.scrollWidth - document.documentElement.clientWidth"


def test_a_run_is_drawn_and_answers_without_a_word_from_the_console(tmp_path: Path) -> None:
    rows = [
        record(step, **({ACCURACY: step / 600} if step % 50 == 0 else {}), **{"reward/failed_rows": 0.0})
        for step in range(600)
    ]
    rows[7]["actor/entropy"] = "nan"
    folder = write_run(
        tmp_path / "run",
        rows,
        samples={100: [{"input": "1+1=", "output": "2", "score": 1.0, "ground_truth": "2"}]},
    )
    assert main([str(folder)]) == 0
    asked = [
        DRAWN,
        "document.querySelectorAll('figure svg path').length",
        "document.querySelectorAll('.band').length",
        POINT,
        KEYS,
    ]
    asked += [
        "document.querySelectorAll('circle').length",
        f"{SCORE_PLOT}.querySelector('svg').getAttribute('aria-label')",
    ]
    asked += [
        (
            "[...document.querySelectorAll('path')].filter(path =>"
            " path.getAttribute('d').includes('NaN')).length"
        ),
        WIDER,
    ]
    asked += [
        MINUTES,
        DARK,
        SIFT,
        "[...document.querySelectorAll('main > section')].map(one => one.id).join(' ')",
    ]
    (
        (drawn, paths, bands, pointed, keys, marks, label, broken, wider, minutes, colours, sifted, sections),
        console,
    ) = visit(folder / "report.html", asked)
    assert console == []
    assert (drawn, broken, wider) == ("yes", 0, 0)
    assert paths >= 8 and marks == 12, "twelve validations, with marks"
    assert bands >= 2, "600 steps are drawn thinner, with a band"
    assert pointed == "steps 598 to 599, 14.95 minvalue1 (1 to 1)"
    assert keys == ["steps 0 to 1, 0 min", "steps 2 to 3, 0.05 min", "steps 0 to 1, 0 min", True]
    assert label.startswith("Score, mean. about 0.0099") and label.endswith("minimum 0, maximum 1")
    assert minutes is True and colours == ["rgb(13, 17, 23)", "rgb(255, 255, 255)"]
    assert sifted == [2, 1, 1, "data.train_batch_size64command line"]
    assert sections == "summary faults curves phases samples configuration plan versions"


def test_runs_are_compared_in_their_own_lines(tmp_path: Path) -> None:
    folders = [
        str(write_run(tmp_path / f"run{number}", [record(step) for step in range(1, 30)]))
        for number in range(10)
    ]
    page = tmp_path / "page.html"
    assert main([*folders, "--output", str(page)]) == 0
    asked = [
        DRAWN,
        f"{SCORE_PLOT}.querySelectorAll('.line').length",
        f"{SCORE_PLOT}.querySelectorAll('.line.run-1.dash-1').length",
    ]
    asked += [POINT, WIDER]
    (drawn, lines, tenth, pointed, wider), console = visit(page, asked)
    assert (console, drawn, lines, wider) == ([], "yes", 10, 0)
    assert tenth == 1, "the tenth run has the second colour, dashed"
    assert pointed.count("run") == 10 and pointed.startswith("step 29")


def test_hostile_text_runs_nothing(tmp_path: Path) -> None:
    folder = hostile_run(tmp_path / "run <b>&amp;")
    assert main([str(folder)]) == 0
    asked = [
        DRAWN,
        "document.documentElement.dataset.hacked ?? 'no'",
        "document.querySelectorAll('script').length",
    ]
    asked += ["document.querySelectorAll('img, iframe, object, embed, a[href^=javascript]').length"]
    asked += [
        "[...document.querySelectorAll('*')].filter(one => [...one.attributes].some(given =>"
        " given.name.startsWith('on'))).length"
    ]
    asked += [
        "document.querySelector('h1').textContent",
        "document.querySelector('.samples tbody td').textContent",
        POINT,
    ]
    (drawn, hacked, scripts, elements, handlers, title, cell, _), console = visit(
        folder / "report.html", asked
    )
    assert console == [], "not even a refused attempt"
    assert (drawn, hacked, scripts, elements, handlers) == ("yes", "no", 2, 0, 0)
    assert (title, cell) == ("run <b>&amp;", HOSTILE[0])


def test_a_page_about_nothing_is_drawn_too(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "plan.json").write_text("{}")
    assert main([str(tmp_path / "run")]) == 0
    assert visit(tmp_path / "run" / "report.html", [DRAWN]) == (["yes"], [])
