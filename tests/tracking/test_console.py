"""The terminal: plain lines in a pipe, a display in a real pseudo-terminal, and what Ctrl-C leaves behind."""

import os
import pty
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from hydraflow.tracking.base import RunInfo
from hydraflow.tracking.console import PlainConsole, RunProgress
from hydraflow.tracking.trackers import open_trackers

ROOT = Path(__file__).parents[2]
SCRIPT = """
import signal, sys, time
from pathlib import Path
from hydraflow.tracking.base import RunInfo
from hydraflow.tracking.trackers import open_trackers
# a test that runs in the background inherits an ignored SIGINT
signal.signal(signal.SIGINT, signal.default_int_handler)
try:
    with open_trackers(["console"], RunInfo(Path(sys.argv[1]), "tiny", 1000)) as trackers:
        for step in range(1000):
            trackers.log({"critic/score/mean": step / 4, "val-core/sums/acc/mean@1": 0.125}, step)
            print(f"note {step}")
            time.sleep(0.02)
except KeyboardInterrupt:
    print("stopped cleanly")
"""


def test_plain_lines_in_a_pipe(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with open_trackers(["console"], RunInfo(tmp_path, total_steps=3)) as trackers:
        assert isinstance(trackers._trackers[-1].tracker, PlainConsole)  # type: ignore[attr-defined]
        trackers.log({"val-core/sums/acc/mean@1": 0.25}, 0)
        trackers.log({"critic/score/mean": 0.5, "perf/throughput": 1234.4, "unknown/name": 1.0}, 1)
    first, second = capsys.readouterr().out.splitlines()
    assert first == "step 0/3  accuracy 0.250"
    assert second.startswith("step 1/3, ")
    assert second.endswith(" left  accuracy 0.250  reward 0.500  tokens/s per device 1234")
    assert "\x1b" not in first + second


def test_time_left_is_the_pace_of_the_last_steps_times_the_rest() -> None:
    progress = RunProgress(total_steps=10)
    progress.note({}, 0, now=100.0)
    assert progress.seconds_left() is None
    progress.note({}, 2, now=106.0)
    progress.note({"val-core/sums/acc/mean@1": 0.5}, 2, now=109.0)  # the same step again: no new pace
    assert progress.seconds_left() == 3.0 * 8
    for step in range(3, 30):
        progress.note({}, step, now=106.0 + step)
    assert progress.seconds_left() == 0.0
    assert RunProgress(total_steps=None).seconds_left() is None


def test_ctrl_c_in_a_terminal_gives_the_cursor_back_and_keeps_other_output(tmp_path: Path) -> None:
    output = interrupted_in_a_terminal(tmp_path, wait_for=b"note 3")
    hidden, shown = output.rfind(b"\x1b[?25l"), output.rfind(b"\x1b[?25h")
    assert -1 < hidden < shown, "the cursor was hidden by the display and must be visible again at the end"
    assert output.rstrip().endswith(b"stopped cleanly")
    assert b"Traceback" not in output
    assert b"/1000" in output and b"accuracy" in output
    for step in range(4):
        assert b"note %d\r\n" % step in output


def interrupted_in_a_terminal(folder: Path, wait_for: bytes) -> bytes:
    """What SCRIPT writes to a pseudo-terminal when it gets SIGINT once `wait_for` has appeared."""
    controller, terminal = pty.openpty()
    environment = os.environ | {"TERM": "xterm", "COLUMNS": "120", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", SCRIPT, str(folder)]
    process = subprocess.Popen(command, stdin=terminal, stdout=terminal, stderr=terminal, env=environment)
    os.close(terminal)
    output, sent = b"", False
    try:
        while chunk := read_or_end(controller):
            output += chunk
            if not sent and wait_for in output:
                process.send_signal(signal.SIGINT)
                sent = True
    finally:
        process.kill()
        process.wait()
        os.close(controller)
    return output


def read_or_end(descriptor: int) -> bytes:
    """The next output; b"" when the other side of the pseudo-terminal was closed, which Linux reports as an
    I/O error."""
    try:
        return os.read(descriptor, 4096)
    except OSError:
        return b""
