"""Two runs in one folder: the second is refused, and told who the first is. A killed owner does not keep the folder."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from hydraflow.errors import ConfigError
from hydraflow.tracking.run_lock import LOCK_FILE, RunLock, is_at_work

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


def test_a_process_that_only_has_the_owners_number_is_not_the_owner(tmp_path: Path) -> None:
    owner = subprocess.Popen([sys.executable, "-c", HOLD, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    assert owner.stdout is not None and owner.stdout.readline() == "held\n"
    assert is_at_work(tmp_path) is True
    file = tmp_path / LOCK_FILE
    noted = json.loads(file.read_text())
    file.write_text(json.dumps(noted | {"started": noted["started"] - 1}))
    assert is_at_work(tmp_path) is False, "another process has its number now"
    file.write_text(json.dumps({name: value for name, value in noted.items() if name != "started"}))
    assert is_at_work(tmp_path) is True, "as earlier versions wrote it"
    owner.kill()
    owner.wait()
    owner.stdout.close()
    file.write_text(json.dumps(noted))
    assert is_at_work(tmp_path) is False
    for text in ("[]", "{", "null", '{"pid": "x", "host": 1}'):
        file.write_text(text)
        assert is_at_work(tmp_path) is None
