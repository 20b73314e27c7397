"""What /proc says of a process whatever its program's name is."""

from __future__ import annotations

import os
import subprocess
import sys

from hydraflow.system.interrupts import kill_family
from hydraflow.system.processes import stat_fields
from hydraflow.tracking.run_lock import _start_ticks

NAMED = r"""
import ctypes, time
ctypes.CDLL(None).prctl(15, b"\xfcber) Z 1 (x", 0, 0, 0)
print("named", flush=True)
time.sleep(300)
"""


def test_a_name_may_hold_any_bytes() -> None:
    with subprocess.Popen([sys.executable, "-c", NAMED], stdout=subprocess.PIPE) as process:
        try:
            assert process.stdout is not None and process.stdout.readline() == b"named\n"
            state, parent = stat_fields(process.pid)[:2]
            assert state in (b"R", b"S") and int(parent) == os.getpid()
            assert isinstance(_start_ticks(process.pid), int)
            # what ends a command looks at every process of the machine, and ends its own
            ended = subprocess.run([sys.executable, "-c", KILLS], capture_output=True, text=True, timeout=60)
            assert ended.stdout == "gone\n", ended.stderr
        finally:
            process.kill()


KILLS = f"""
import subprocess, sys
from {kill_family.__module__} import kill_family
child = subprocess.Popen(["sleep", "300"])
kill_family()
print("gone" if child.wait(10) == -9 else "there")
"""
