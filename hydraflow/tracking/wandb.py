"""Weights & Biases: metrics, validation tables, configuration and run.json, on its server or in the run
folder's wandb/.

In: metrics of a step. Out: a run of the project `trainer.project_name`, whose id is the run's own, so that a
resumed run continues there. Without a login everything stays in the run folder; `wandb sync
<run folder>/wandb/offline-run-*` uploads it. Left out on purpose: what W&B captures by itself (console
output, code, command line); the run folder has it.
"""

from __future__ import annotations

import logging
import netrc
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from hydraflow.errors import first_line
from hydraflow.system.paths import expanded
from hydraflow.tracking.base import SAMPLE_COLUMNS, SAMPLE_TABLE, RunInfo, Sample, Tracker, rows_of

STEP = "training/global_step"
"""The x axis. W&B's own step cannot decrease, and steps that were logged after the last checkpoint are
repeated."""
SERVER = "https://api.wandb.ai"
INIT_SECONDS = 60.0
"""Seconds that the server may take to answer; after that the run is kept offline."""
LONGEST_ID = 64

logger = logging.getLogger(__name__)


def offline_because(environ: Mapping[str, str]) -> str | None:
    """Why a run would be kept in its folder; None: it goes to the server.

    >>> offline_because({"WANDB_API_KEY": "abc"}) is None, offline_because({"WANDB_MODE": "offline"})
    (True, 'WANDB_MODE=offline')
    """
    if (mode := environ.get("WANDB_MODE", "")) in ("offline", "dryrun", "disabled"):
        return f"WANDB_MODE={mode}"
    if environ.get("WANDB_API_KEY") or environ.get("WANDB_IDENTITY_TOKEN_FILE") or _in_netrc(environ):
        return None
    return "there is no login"


def _in_netrc(environ: Mapping[str, str]) -> bool:
    """Whether `wandb login` has left a key for the server."""
    home = Path(environ.get("HOME") or Path.home())
    file = expanded(environ.get("NETRC") or home / ".netrc")
    host = urlsplit(environ.get("WANDB_BASE_URL") or SERVER).hostname or ""
    try:
        found = netrc.netrc(file).authenticators(host)
        return found is not None and bool(found[2])
    except (OSError, netrc.NetrcParseError):
        return False


class WandbTracker(Tracker):
    """One run of a project. W&B's own process writes each row at once; it outlives this one. Raises what W&B
    raises; `guarded.py` wraps it."""

    def __init__(self, run: RunInfo):
        import wandb

        self._wandb: Any = wandb
        offline = offline_because(os.environ)
        mode = None if offline is None or offline.startswith("WANDB_MODE") else "offline"
        try:
            self._run = self._open(run, mode)
        except wandb.errors.Error as error:
            if offline is not None:
                raise
            text = "wandb: %s; the run is kept in %s; wandb sync uploads it later"
            logger.warning(text, first_line(error), run.folder / "wandb")
            wandb.teardown()  # W&B's own process still holds the id of the failed attempt
            self._run = self._open(run, "offline")
        self._run.define_metric(STEP)
        self._run.define_metric("*", step_metric=STEP)
        for path in run.about.files:
            self._run.save(str(path), base_path=str(run.folder), policy="now")

    def _open(self, run: RunInfo, mode: str | None) -> Any:
        about, proxy = run.about, run.about.wandb_proxy
        proxies: dict[str, Any] = {"http_proxy": proxy, "https_proxy": proxy} if proxy else {}
        return self._wandb.init(
            project=about.project,
            name=about.experiment,
            id=run_id(run),
            resume=None if mode == "offline" else "allow",
            reinit="create_new",
            dir=str(run.folder),
            mode=mode,
            config={**about.config, "start": dict(about.facts)},
            settings=self._wandb.Settings(
                console="off",
                quiet=True,
                disable_code=True,
                x_disable_meta=True,  # the command line as it was typed; `start` has what can be shown of it
                init_timeout=INIT_SECONDS,
                **proxies,
            ),
        )

    def log(self, metrics: dict[str, float], step: int) -> None:
        self._run.log({**metrics, STEP: step})

    def log_samples(self, samples: Sequence[Sample], step: int) -> None:
        """Adds the table of this validation; W&B keeps those of earlier steps."""
        rows = [[step, *row] for row in rows_of(samples)]
        table = self._wandb.Table(columns=["step", *SAMPLE_COLUMNS], data=rows)
        self._run.log({STEP: step, SAMPLE_TABLE: table})

    def close(self, *, failed: bool = False) -> None:
        """Ends the run, as crashed if it failed."""
        self._run.finish(exit_code=1 if failed else 0)


def run_id(run: RunInfo) -> str | None:
    """The run's identity, as W&B allows it; None: W&B chooses.

    >>> run_id(RunInfo(Path("."), run_id="a run:1/2-ff00"))
    'a-run-1-2-ff00'
    """
    return re.sub(r"[^A-Za-z0-9_-]+", "-", run.run_id)[-LONGEST_ID:] or None
