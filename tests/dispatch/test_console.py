"""Workers' lines on the console: of equal lines one, while each rank's file has its own."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
from dispatch import programs

from hydraflow.dispatch.modes import Dispatch, register
from hydraflow.dispatch.worker import Worker

pytestmark = pytest.mark.slow


class Speaker(Worker):
    """Every rank says the same."""

    @register(Dispatch.ONE_TO_ALL)
    def speak(self) -> None:
        logging.getLogger("probe").info("all is well")
        logging.getLogger("probe").warning("the disk is slow")


PROGRAM = """
    import sys, time
    from dispatch.test_console import Speaker
    from hydraflow.dispatch.config import LogConfig, RayInitConfig
    from hydraflow.dispatch.group import Timeouts
    from hydraflow.dispatch.placement import ResourcePool
    from hydraflow.dispatch.runtime import Runtime
    from hydraflow.dispatch.observability import Observability
    from hydraflow.dispatch.worker import RoleSpec
    from hydraflow.system.role_logs import LogSettings

    console = sys.argv[2] if len(sys.argv) > 2 else None
    observability = Observability(logs=LogSettings(sys.argv[1], LogConfig(console=console)))
    with Runtime(RayInitConfig(), Timeouts(start=120, call=60), observability=observability) as runtime:
        runtime.start([ResourcePool("pool", [3])])
        role = runtime.group("pool", {"speaker": RoleSpec(Speaker)}).role("speaker")
        role.call(Speaker.speak)
        # Ray shows the first of equal lines at once, and gathers the others for five seconds.
        time.sleep(8 if len(sys.argv) > 2 else 2)
"""


def run(folder: Path, *console: str) -> str:
    done = programs.run(folder, PROGRAM, folder, *console)
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout + done.stderr


def test_equal_lines_are_shown_once_and_written_by_every_rank(tmp_path: Path) -> None:
    said = run(tmp_path, "warning")
    assert said.count("the disk is slow") == 2 and "[repeated 2x across cluster]" in said, said
    assert "all is well" not in said, "below the level of the console"
    for rank in range(3):
        lines = (tmp_path / f"speaker-{rank}.log").read_text().splitlines()
        assert [line.split(" ", 3)[3] for line in lines] == ["probe: all is well", "probe: the disk is slow"]


def test_by_default_the_console_shows_none(tmp_path: Path) -> None:
    assert "the disk is slow" not in run(tmp_path)
    assert "the disk is slow" in (tmp_path / "speaker-2.log").read_text()
