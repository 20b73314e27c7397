"""python -m hydraflow.report RUN [RUN2 ...] [--output FILE]: one self-contained HTML page.

In: run folders, also of runs that are in progress or were interrupted. Out: curves, phase times, samples,
configuration with origins, plan, faults and versions; with several runs side by side, and what differs
between them. Exit code 2 for a folder that holds no run.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from hydraflow.errors import ConfigError, HydraflowError
from hydraflow.system.paths import expanded
from hydraflow.system.printing import make_printable
from hydraflow.system.whole_files import replacing

MOST_RUNS = 32
"""Number of distinguishable lines: eight colours, each in four styles."""
NAME = "report.html"


def main(argv: Sequence[str] | None = None) -> int:
    """Writes the page and prints its path; returns the exit code."""
    make_printable()
    about = "One HTML page about training runs."
    parser = argparse.ArgumentParser("python -m hydraflow.report", description=about)
    parser.add_argument("runs", nargs="+", metavar="RUN", help="a run folder; several are compared")
    where = f"the page to write; by default RUN/{NAME}, and {NAME} here for several runs"
    parser.add_argument("--output", metavar="FILE", help=where)
    arguments = parser.parse_args(argv)
    try:
        return _report(arguments.runs, arguments.output)
    except HydraflowError as error:
        print(error, file=sys.stderr)
        return error.exit_code


def _report(folders: Sequence[str], output: str | None) -> int:
    # Imported here so that --help and mistakes are answered at once.
    from hydraflow.report.page import render
    from hydraflow.report.reading import read_run

    started = time.monotonic()
    if len(folders) > MOST_RUNS:
        rule = f"a page shows at most {MOST_RUNS} runs"
        raise ConfigError.one("RUN", f"{len(folders)} folders", rule, "name fewer folders")
    if output and os.path.isdir(expanded(output)):
        raise ConfigError.one("--output", output, "is a folder", f"--output {Path(output) / NAME}")
    runs = [read_run(Path(folder)) for folder in folders]
    target = expanded(output) if output else (runs[0].folder if len(runs) == 1 else Path()) / NAME
    page = render(runs)
    try:
        with replacing(target) as unfinished:
            unfinished.write_text(page, encoding="utf-8")
    except OSError as error:
        rule = f"cannot be written ({error.strerror})"
        raise ConfigError.one("--output", target, rule, "--output <another file>") from error
    print(f"{target}: {len(page.encode()) / 1000:.0f} kB, {time.monotonic() - started:.2f} s")
    return 0


if __name__ == "__main__":
    sys.exit(main())
