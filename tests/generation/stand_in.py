"""SGLang's stand-in as if it were installed: `sglang_stand_in/sglang/launch_server.py`."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest

STAND_IN = Path(__file__).parent / "sglang_stand_in"


class Installed:
    """What goes wrong with its servers, and their processes."""

    def __init__(self, folder: Path):
        self._folder = folder

    def goes_wrong(self, **faults: Any) -> None:
        """From now on; nothing: nothing."""
        made = self._folder / "faults.new"
        made.write_text(json.dumps(faults))
        made.rename(self._folder / "faults.json")

    def processes(self) -> list[int]:
        """Of the server that was started last, and of its scheduler: those that are alive."""
        pids = map(int, (self._folder / "pids").read_text().split())
        return [pid for pid in pids if psutil.pid_exists(pid)]


@contextmanager
def installed(folder: Path, version: str = "0.5.23") -> Iterator[Installed]:
    """For this process and for those that it starts."""
    made = folder / f"sglang-{version}.dist-info"
    made.mkdir()
    (made / "METADATA").write_text(f"Metadata-Version: 2.1\nName: sglang\nVersion: {version}\n")
    paths = [str(STAND_IN), str(folder)]
    sglang = Installed(folder)
    sglang.goes_wrong()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "path", [*paths, *sys.path])
        patch.setenv("PYTHONPATH", os.pathsep.join([*paths, os.environ.get("PYTHONPATH", "")]))
        patch.setenv("STAND_IN", str(folder / "faults.json"))
        # what a user may have set must not change what log-probabilities are
        patch.setenv("SGLANG_RETURN_ORIGINAL_LOGPROB", "1")
        yield sglang
