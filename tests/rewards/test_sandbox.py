"""Programs that do what they must not: each costs its tests, and nothing of it stays.

As root the sandbox is made by root's rights, otherwise in a user namespace; where root runs the tests, an
ordinary user's way is tried, too, with the system's interpreter.
"""

from __future__ import annotations

import os
import platform
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

import hydraflow
from hydraflow.errors import ConfigError
from hydraflow.rewards.config import SandboxConfig
from hydraflow.rewards.sandbox import require_sandbox, run

LIMITS = SandboxConfig(timeout=2.0, memory=0.25, processes=8, output=10_000)
SHORT = replace(LIMITS, timeout=0.5)
"""For programs that compute until they are ended."""
SYSTEM_PYTHON = Path("/usr/bin/python3")
NOBODY = ["setpriv", "--reuid=65534", "--regid=65534", "--clear-groups"]


def how(source: str, given: str = "", limits: SandboxConfig = LIMITS) -> tuple[str, str]:
    (outcome,) = run(source, [given], sandbox=limits, seconds=15.0)
    return outcome


def test_a_program_reads_and_prints_and_each_test_starts_afresh() -> None:
    counts = "import os, sys\nn = len(os.listdir('.'))\nopen(str(n), 'w')\nprint(n, sys.stdin.read().upper())"
    outcomes = run(counts, ["a", "é"], sandbox=LIMITS, seconds=15.0)
    assert outcomes == [("done", "0 A\n"), ("done", "1 É\n")]


def test_output_at_the_end_counts_and_so_does_the_exit_code() -> None:
    assert how("import atexit\natexit.register(print, 'late')\nprint('early')") == ("done", "early\nlate\n")
    assert how("import sys\nprint(1)\nsys.exit(0)") == ("done", "1\n")
    assert how("import sys\nprint(1)\nsys.exit(3)") == ("raised", "1\n")
    assert how("print(") == ("raised", "")


def test_a_function_is_called_with_arguments() -> None:
    source = (
        "class Solution:\n    def add(self, a, b):\n        print('noise')\n        return (a + b, {1: [a]})"
    )
    (outcome,) = run(source, [[1, 2]], sandbox=LIMITS, seconds=15.0, function="add")
    assert outcome == ("done", '[3, {"1": [1]}]')
    outcomes = run("def f(a):\n    return 1 // a", [[1], [0]], sandbox=LIMITS, seconds=15.0, function="f")
    assert outcomes == [("done", "1"), ("raised", "")]


@pytest.mark.slow(short=True)
@pytest.mark.parametrize(
    ("source", "ended"),
    [
        ("while True: pass", "took too long"),
        ("import time\ntime.sleep(60)", "took too long"),
        ("import signal\nfor s in range(1, 65):\n  try: signal.signal(s, signal.SIG_IGN)\n"
         "  except (OSError, ValueError): pass\nwhile True: pass", "took too long"),
        ("while True: print('x' * 1000)", "printed too much"),
        ("import os\nwhile True: os.write(1, b'x' * 65536)", "printed too much"),
        ("held = bytearray(10**9)", "raised"),
        ("open('/tmp/file', 'w').write('x' * 10**9)", "raised"),
        ("import os\nos.close(1)\nwhile True: pass", "took too long"),
    ],
)  # fmt: skip
def test_limits(source: str, ended: str) -> None:
    assert how(source, limits=SHORT if ended == "took too long" else LIMITS)[0] == ended


@pytest.mark.slow(short=True)
def test_a_fork_bomb_and_a_daemon_leave_nothing() -> None:
    bomb = "import os, time\n"
    bomb += "made = 0\nwhile True:\n  try:\n    made += 1\n    if not os.fork(): time.sleep(60)\n"
    bomb += "  except BlockingIOError:\n    print(made)\n    break"
    daemon = "import os, time\nif not os.fork():\n  os.setsid()\n  time.sleep(60)\nprint('gone')"
    began = time.monotonic()
    assert how(bomb) == ("done", "8\n")  # it and seven others
    assert how("import os\nwhile True: os.fork()")[0] in ("raised", "took too long")  # on a busy machine
    stubborn = "import os\nwhile True:\n  try: os.fork()\n  except OSError: pass"
    assert how(stubborn, limits=SHORT)[0] == "took too long"
    assert how(daemon) == ("done", "gone\n")
    assert time.monotonic() - began < 30


def test_there_is_nothing_to_see_or_to_reach(tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("secret")
    tries = {
        f"open({str(tmp_path / 'secret')!r})": "FileNotFoundError",
        f"open({str(Path(hydraflow.__file__))!r})": "FileNotFoundError",
        "open('/etc/passwd')": "FileNotFoundError",
        "open('/usr/new', 'w')": "OSError",
        "open('/new', 'w')": "OSError",
        "open('/proc/1/environ')": "FileNotFoundError",
        "socket.create_connection(('127.0.0.1', 22), 1)": "OSError",
        "socket.create_connection(('1.1.1.1', 53), 1)": "OSError",
        "os.kill(os.getppid(), 9) or os.kill(1, 9)": "None",
        "subprocess.run(['mount', '-t', 'tmpfs', 'x', '/usr'], stderr=-3).returncode == 0": "False",
        "subprocess.run(['unshare', '-Urm', 'umount', '/tmp'], stderr=-3).returncode == 0": "False",
        "set(os.environ) - {'HOME', 'LANG', 'OLDPWD', 'OMP_NUM_THREADS', 'PATH', 'PWD'}": "set()",
    }
    source = "import os, socket, subprocess\nfor one in input().split(';'):\n  try: print(eval(one))\n"
    source += "  except Exception as error: print(type(error).__name__)"
    ended, printed = how(source, ";".join(tries))
    assert (ended, dict(zip(tries, printed.splitlines(), strict=True))) == ("done", tries)


CALLS = """
import ctypes, errno, os
libc = ctypes.CDLL(None, use_errno=True)
for number, *arguments in eval(input()):
    ctypes.set_errno(0)
    libc.syscall(number, *arguments)
    print(errno.errorcode.get(ctypes.get_errno(), 0))
"""


@pytest.mark.skipif(platform.machine() != "x86_64", reason="these are its numbers of system calls")
def test_the_process_that_watches_cannot_be_taken_over_nor_memory_be_hidden() -> None:
    calls = {
        "PTRACE_ATTACH to the first process": (101, 16, 1, 0, 0),
        "process_vm_readv": (310, 1, 0, 0, 0, 0, 0),
        "pidfd_getfd": (438, 0, 1, 0),
        "memfd_create": (319, b"hidden", 0),
        "shmget": (29, 0, 4096, 0o1777),
        "unshare a user namespace": (272, 0x10000000),
        "clone into one": (56, 0x10000000 | 17, 0, 0, 0, 0),
        "mount": (165, b"x", b"/tmp", b"tmpfs", 0, 0),
        "io_uring_setup": (425, 1, 0),
    }
    ended, printed = how(CALLS, str(list(calls.values())))
    assert (ended, printed.split()) == ("done", ["EPERM"] * len(calls))
    assert how(CALLS, "[(41, 40, 1, 0), (435, 0, 0), (39,)]") == ("done", "EAFNOSUPPORT\nENOSYS\n0\n")


def test_threads_processes_and_sockets_of_its_own_are_allowed() -> None:
    source = "import asyncio, subprocess, threading\n"
    source += "thread = threading.Thread(target=print, args=(1,))\nthread.start()\nthread.join()\n"
    source += "print(subprocess.run(['echo', '2'], capture_output=True, text=True).stdout, end='')\n"
    source += "print(asyncio.run(asyncio.sleep(0, 3)))"
    assert how(source) == ("done", "1\n2\n3\n")


def test_signals_do_not_reach_the_first_process() -> None:
    source = "import os, time\nfor number in range(1, 65):\n  try: os.kill(1, number)\n"
    source += "  except OSError: pass\ntime.sleep(0.1)\nprint('there')"
    outcomes = run(source, ["", ""], sandbox=LIMITS, seconds=15.0)
    assert outcomes == [("done", "there\n")] * 2


@pytest.mark.slow(short=True)
def test_tests_for_which_there_is_no_time_have_no_outcome() -> None:
    began = time.monotonic()
    # longer than a start takes on a slow machine
    patient = replace(LIMITS, timeout=3.0)
    outcomes = run("import time\ntime.sleep(1.2)", [""] * 9, sandbox=patient, seconds=3.0)
    assert 1 <= len(outcomes) <= 3 and outcomes[0].how == "done"
    assert outcomes[-1].how in ("done", "took too long")  # there may be no time to start it
    assert time.monotonic() - began < 8


def elsewhere(user: list[str], python: Path, code: str) -> str:
    folder = Path(hydraflow.__file__).parents[1]
    done = subprocess.run(
        [*user, str(python), "-c", code],
        env={"PATH": os.environ["PATH"], "PYTHONPATH": str(folder), "PYTHONDONTWRITEBYTECODE": "1"},
        cwd="/",
        capture_output=True,
        text=True,
        timeout=60,
    )
    return done.stdout + done.stderr


CHECK = """
from hydraflow.rewards.config import SandboxConfig
from hydraflow.rewards.sandbox import require_sandbox, run
require_sandbox(SandboxConfig(), 10.0)
print(run("import os; print(os.listdir('/tmp'), os.path.exists('/home'), os.path.exists('/proc/1'))",
          [""], sandbox=SandboxConfig(), seconds=5.0))
print(run("import os\\nwhile True: os.fork()", [""], sandbox=SandboxConfig(), seconds=5.0))
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="an ordinary user runs all of these tests that way")
@pytest.mark.skipif(not SYSTEM_PYTHON.exists(), reason="nobody may read root's interpreter")
def test_an_ordinary_user_has_the_same_sandbox() -> None:
    shown = elsewhere(NOBODY, SYSTEM_PYTHON, CHECK)
    assert "output='[] False False\\n'" in shown and "how='raised'" in shown, shown


@pytest.mark.skipif(os.geteuid() != 0, reason="mounts a folder")
def test_what_is_mounted_below_the_libraries_is_read_only_too() -> None:
    """The mount is seen by the process of this test alone, and gone with it."""
    mounted = 'mount -t tmpfs -o mode=1777 writable /usr/share && exec "$@"'
    code = "from pathlib import Path\nfrom hydraflow.rewards.sandbox import SandboxConfig, run\n"
    code += "write = \"open('/usr/share/file', 'w')\"\n"
    code += "print(run(write, [''], sandbox=SandboxConfig(), seconds=5.0), *Path('/usr/share').iterdir())\n"
    code += "exec(write)\nprint(*Path('/usr/share').iterdir())"
    shown = elsewhere(["unshare", "--mount", "sh", "-c", mounted, "sh"], Path(sys.executable), code)
    assert shown == "[Outcome(how='raised', output='')]\n/usr/share/file\n"


@pytest.mark.skipif(os.geteuid() != 0, reason="takes a right away from root")
def test_where_namespaces_are_forbidden_it_says_so_and_runs_nothing() -> None:
    shown = elsewhere(["setpriv", "--bounding-set=-sys_admin"], Path(sys.executable), CHECK)
    assert "programs of responses run in their own namespaces, which cannot be created here" in shown
    assert "unshare failed: Operation not permitted" in shown
    assert "docker run --cap-add SYS_ADMIN" in shown


def test_limits_that_fit_nothing_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"does not fit into reward.timeout=4.*\n.*reward.timeout=5"):
        require_sandbox(SandboxConfig(), 4.0)
    with pytest.raises(ConfigError, match="the interpreter .*nowhere does not run"):
        require_sandbox(SandboxConfig(python=str(tmp_path / "nowhere")), 10.0)
    with pytest.raises(ConfigError, match="a program that prints 42 .* within these limits"):
        require_sandbox(SandboxConfig(output=1), 10.0)
