"""SwanLab: metrics, validation tables, configuration, on its server or in the run folder's swanlab/.

In: metrics of a step. Out: an experiment of the project `trainer.project_name`. A resumed run continues the
same experiment. Without a login, or if the server rejects it, everything stays in the run folder;
`swanlab sync <run folder>/swanlab/run-*` uploads it. Left out on purpose: what SwanLab captures by itself;
the run folder has it.
"""

from __future__ import annotations

import hashlib
import logging
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from hydraflow.errors import first_line
from hydraflow.tracking.base import SAMPLE_COLUMNS, SAMPLE_TABLE, RunInfo, Sample, Tracker, rows_of

ID_LENGTH = 21
"""Length of SwanLab's run ids, which are letters and digits."""
MODES = ("offline", "local", "disabled")

logger = logging.getLogger(__name__)


def offline_because(environ: Mapping[str, str]) -> str | None:
    """Why a run would be kept in its folder; None: it goes to the server."""
    if (mode := environ.get("SWANLAB_MODE", "")) in MODES:
        return f"SWANLAB_MODE={mode}"
    home = Path(environ.get("HOME") or Path.home())
    saved = Path(environ.get("SWANLAB_SAVE_DIR") or home / ".swanlab") / ".netrc"
    if environ.get("SWANLAB_API_KEY") or saved.is_file() or Path(".swanlab/.netrc").is_file():
        return None
    return "there is no login"


class SwanlabTracker(Tracker):
    """One experiment of a project. SwanLab has no flush; it writes within seconds. Raises what SwanLab
    raises; `guarded.py` wraps it."""

    def __init__(self, run: RunInfo):
        import swanlab
        from requests.exceptions import RequestException
        from swanlab.exceptions import ApiError, AuthenticationError

        self._swanlab: Any = swanlab
        offline = offline_because(os.environ)
        mode = offline.partition("=")[2] or "offline" if offline else "online"
        hook = sys.excepthook
        try:
            self._run = self._open(run, mode)
        except (ApiError, AuthenticationError, RequestException) as error:
            if mode != "online":
                raise
            text = "swanlab: %s The run is kept in %s; swanlab sync uploads it later"
            logger.warning(text, first_line(error), run.folder / "swanlab")
            self._run = self._open(run, "offline")
        finally:
            sys.excepthook = hook  # SwanLab replaces it, and ours prints the error
        for path in run.about.files:
            self._run.save(str(path), base_path=str(run.folder), policy="now")

    def _open(self, run: RunInfo, mode: str) -> Any:
        return self._swanlab.init(
            mode=mode,
            log_dir=str(run.folder / "swanlab"),
            project=run.about.project,
            name=run.about.experiment,
            id=run_id(run),
            resume="allow",
            reinit=True,
            # runtime: the command line as it was typed; git: the remote's address, which may hold a token
            settings=self._swanlab.Settings(
                terminal={"proxy_type": "none"}, probe={"runtime": False, "git": False}, interactive=False
            ),
            config={**run.about.config, "start": dict(run.about.facts)},
        )

    def log(self, metrics: dict[str, float], step: int) -> None:
        self._run.log({name: float(value) for name, value in metrics.items()}, step=step)

    def log_samples(self, samples: Sequence[Sample], step: int) -> None:
        """Adds the table of this validation."""
        table = self._swanlab.echarts.Table()
        table.add(list(SAMPLE_COLUMNS), rows_of(samples))
        self._run.log({SAMPLE_TABLE: table}, step=step)

    def close(self, *, failed: bool = False) -> None:
        """Ends the experiment, as crashed if the run failed."""
        if failed:
            self._run.finish(state="crashed", error="the run failed; its summary.json says why")
        else:
            self._run.finish()


def run_id(run: RunInfo) -> str | None:
    """The run's identity in SwanLab's form; None: SwanLab chooses.

    >>> run_id(RunInfo(Path("."), run_id="ppo-1-ff00"))
    '1ba9b3f8baec2fbc2efdc'
    """
    return hashlib.sha256(run.run_id.encode()).hexdigest()[:ID_LENGTH] if run.run_id else None
