"""Two runs in one folder: the second is refused, and told who the first is. A killed owner does not keep the folder."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from hydraflow.errors import ConfigError
from hydraflow.tracking.run_lock import LOCK_FILE, RunLock

HOLD = """
import sys, time
from pathlib import Path
from hydraflow.tracking.run_lock import RunLock
lock = RunLock(Path(sys.argv[1]), field="trainer.default_local_dir")
print("held", flush=True)
time.sleep(600)
"""


def test_the_second_is_refused_and_a_killed_owner_lets_go(tmp_path: Path) -> None:
    owner = subprocess.Popen([sys.executable, "-c", HOLD, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    assert owner.stdout is not None and owner.stdout.readline() == "held\n"
    with pytest.raises(ConfigError) as caught:
        RunLock(tmp_path, field="trainer.default_local_dir")
    assert caught.value.exit_code == 2
    assert f"process {owner.pid} on {socket.gethostname()}" in str(caught.value)
    owner.send_signal(signal.SIGKILL)
    owner.wait()
    owner.stdout.close()
    lock = RunLock(tmp_path, field="trainer.default_local_dir")
    assert f'"pid": {os.getpid()}' in (tmp_path / LOCK_FILE).read_text()
    lock.release()
    lock.release()
    RunLock(tmp_path, field="trainer.default_local_dir").release()
