"""python -m hydraflow.plan [overrides] [--all] [--json] [--svg FILE] [--job NAME]: explains what
a command line would run.

In: the overrides of main_ppo (or of main_sft, main_dpo, main_rm, main_generate). Out: the batch plan with its
formulas, the placement of roles, one step in words, memory, notes; or every broken rule, with exit code 2.
Starts nothing and needs no GPU, no model and no data.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from hydraflow.compose.advice import advice
from hydraflow.compose.arguments import CommandLineOption, split
from hydraflow.compose.command import Command
from hydraflow.compose.debugging import applied
from hydraflow.compose.launch import launch
from hydraflow.compose.loading import EntryPoint
from hydraflow.errors import ConfigError, HydraflowError, Problem
from hydraflow.explain.report import Report, make_report
from hydraflow.explain.show import show
from hydraflow.schema import JOBS, JobConfig, PPOConfig
from hydraflow.system.paths import expanded
from hydraflow.system.printing import reader_may_leave

NO_ROOM = 1
"""Exit code of a plan that does not fit according to its memory estimate."""
SWITCHES = (
    CommandLineOption("--all", doc="Show every number with its formula, and memory by purpose."),
    CommandLineOption(
        "--json", doc='Print one JSON object instead; {"problems": [...]} where a rule is broken.'
    ),
    CommandLineOption(
        "--svg", value="FILE", doc="Also draw the step, from prompts to optimizer steps, to FILE."
    ),
    CommandLineOption(
        "--job",
        value="NAME",
        choices=tuple(JOBS),
        doc="Plan python -m hydraflow.main_NAME (ppo).\n"
        "Exit codes: 0 a plan, 1 a plan that DOES NOT FIT the memory, 2 a broken rule.",
    ),
)


class Planning:
    """Makes the report while the command line is checked, and shows it if there are no errors."""

    def __init__(self) -> None:
        self._report: Report | None = None

    def judge(self, config: JobConfig, command: Command) -> list[Problem]:
        """Makes the report; returns the problems that this finds."""
        try:
            self._report = make_report(applied(config), command)
        except ConfigError as error:
            return error.problems
        return []

    def show(self, config: JobConfig, command: Command) -> int:
        """Prints the report, and draws it if --svg is given; returns the exit code."""
        report = self._report
        assert report is not None, "judge runs first"
        if path := command.switches.get("--svg"):
            _draw(report, Path(str(path)))
        with reader_may_leave():
            if command.switches.get("--json"):
                print(report.to_json())
            else:
                show(report, everything=bool(command.switches.get("--all")))
        return NO_ROOM if report.memory is not None and report.memory.fits is False else 0


def _print_problems(error: HydraflowError) -> None:
    """Prints the problems as one JSON object."""
    problems = error.problems if isinstance(error, ConfigError) else [Problem("", None, str(error))]
    with reader_may_leave():
        print(json.dumps({"problems": [one.to_json() for one in problems]}, indent=2, ensure_ascii=False))


def _draw(report: Report, path: Path) -> None:
    """Writes the picture of a step. Raises ConfigError if the job has none, or the file cannot be written."""
    from hydraflow.explain.svg import draw

    if report.step is None:
        rule = f"{report.job} makes no optimizer steps that could be drawn"
        raise ConfigError.one("--svg", path, rule, "leave out --svg")
    try:
        expanded(path).write_text(draw(report.step), encoding="utf-8")
    except OSError as error:
        rule = f"the picture cannot be written: {error.strerror}"
        raise ConfigError.one("--svg", path, rule, "--svg step.svg") from error


def main() -> int:
    """Plans the command line; returns the exit code."""
    given = split(sys.argv[1:], SWITCHES).switches  # errors are reported by `launch`
    job, planning = str(given.get("--job", "ppo")), Planning()
    entry = EntryPoint(
        job,
        JOBS.get(job, PPOConfig),
        SWITCHES,
        judges=(planning.judge,),
        tolerant=True,
        advise=advice,
        show_error=_print_problems if given.get("--json") else None,
    )
    return launch(entry, planning.show)


if __name__ == "__main__":
    sys.exit(main())
