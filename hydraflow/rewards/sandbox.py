"""Runs untrusted programs, each in its own namespaces: user, mount, PID, network, IPC.

In: a Python program, the inputs of its tests and limits. Out: how it ended on each and what it printed. Its
root folder has the interpreter and the system's libraries, read-only, a few devices and an empty `/tmp`.
There is no network and no /proc, and other processes are invisible. It runs without capabilities: started by
root, under an unused user id; otherwise as the user, in a user namespace. util-linux does all of this
(`unshare`, `mount`, `pivot_root`, `setpriv`), except for a filter of system calls (`sandbox_calls.py`). Where
the machine forbids it, nothing runs and `require_sandbox` says why. Left out on purpose: cgroups, which users
can seldom create, so the memory limit applies to each process of a program; languages other than Python.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from hydraflow.errors import ConfigError
from hydraflow.rewards.config import SandboxConfig
from hydraflow.rewards.sandbox_calls import call_filter
from hydraflow.rewards.sandbox_program import DONE

KEY = "reward.sandbox"
START_SECONDS = 1.0
"""Seconds of a row's time limit that are reserved for starting and ending a sandbox."""
_TOOLS = ("unshare", "mount", "umount", "pivot_root", "setpriv", "sh")
_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
_ENVIRONMENT = {"PATH": _PATH, "HOME": "/tmp", "LANG": "C.UTF-8", "OMP_NUM_THREADS": "1"}
_NAMESPACES = ("--mount", "--pid", "--net", "--ipc", "--uts", "--fork", "--kill-child")
_UNUSED_USERS = range(61184, 65520)
"""User ids that systemd assigns to services dynamically; no files belong to them."""
_LIBRARIES = ("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/libx32", "/etc/ld.so.cache")
# The new root is assembled on /sys, which nothing here needs, and is made read-only before it is entered.
# umount reads /proc, so /proc goes last. Mounts below a library folder are made read-only as well.
_ENTER = """
set -e
umask 022
size=$1; shift
mount -t tmpfs -o nosuid,nodev,size=1m,mode=755 sandbox /sys
cd /sys
mkdir dev tmp mnt proc
mount --rbind /proc proc
while [ "$1" != -- ]; do
    mkdir -p ".${1%/*}"
    if [ -h "$1" ]; then
        ln -s "$(readlink "$1")" ".$1"
    elif [ -e "$1" ]; then
        if [ -d "$1" ]; then mkdir -p ".$1"; else : > ".$1"; fi
        mount --rbind "$1" ".$1"
    fi
    shift
done
shift
while read -r _ _ _ _ place _; do
    case $place in
        /sys/proc | /sys/proc/*) ;;
        /sys/*)
            place=$(printf %b "$place")
            [ ! -e "$place" ] || mount -o remount,bind,ro,nosuid "$place"  # or hidden, below the old /sys
            ;;
    esac
done < /proc/self/mountinfo
for device in null zero random urandom; do
    : > "dev/$device"
    mount --bind "/dev/$device" "dev/$device"
done
mount -t tmpfs -o nosuid,nodev,size="$size",mode=1777 sandbox tmp
mount -o remount,bind,ro,nosuid,nodev .
pivot_root . mnt
cd /
umount -l /mnt
umount -l /proc
exec setpriv --no-new-privs --pdeathsig KILL --inh-caps=-all --ambient-caps=-all --bounding-set=-all "$@"
"""


class SandboxError(Exception):
    """A program could not be run at all."""


class Outcome(NamedTuple):
    """The result of one test of a program."""

    how: str
    """DONE, or why it failed (`sandbox_program.py`)."""
    output: str
    """What the program printed, or what its function returned as JSON."""


def run(
    source: str, inputs: Sequence[Any], *, sandbox: SandboxConfig, seconds: float, function: str | None = None
) -> list[Outcome]:
    """The outcomes of the tests, up to the first that exceeded a limit or until `seconds`, the time for all
    of them, have passed. `inputs`: what each writes to standard input, or the arguments of `function`. Raises
    SandboxError.

    >>> run("print(int(input()) ** 2)", ["7", "x"], sandbox=SandboxConfig(), seconds=5.0)
    [Outcome(how='done', output='49\\n'), Outcome(how='raised', output='')]
    """
    memory = int(sandbox.memory * 2**30)
    request = {
        "source": source,
        "inputs": list(inputs),
        "function": function,
        "seconds": seconds,
        "timeout": sandbox.timeout,
        "memory": memory,
        "processes": sandbox.processes,
        "output": sandbox.output,
        "calls": _calls().hex(),
    }
    most = len(inputs) * (6 * sandbox.output + 100)  # JSON writes some bytes as six
    stdout = os.memfd_create("sandbox-output")
    try:
        errors = _run_to_end(_command(sandbox, memory), json.dumps(request).encode(), stdout, seconds)
        if os.fstat(stdout).st_size > most:
            raise SandboxError("the program took over the process that runs its tests")
        with open(stdout, "rb", closefd=False) as file:
            file.seek(0)
            lines = file.read().splitlines(keepends=True)
    finally:
        os.close(stdout)
    outcomes = [Outcome(*json.loads(line)) for line in lines if line.endswith(b"\n")]
    if errors:
        raise SandboxError(errors)
    if not outcomes:  # the first test always has an outcome in time, whatever the program does
        raise SandboxError(f"it did not start within {seconds:g} seconds: the machine is too busy")
    return outcomes


def _run_to_end(command: Sequence[str], request: bytes, stdout: int, seconds: float) -> str:
    """Runs a sandbox until it ends or its time is up; returns errors other than the program's."""
    try:
        process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=stdout,
            stderr=subprocess.PIPE,
            env=_ENVIRONMENT,
            cwd="/",
            start_new_session=True,
        )
    except OSError as error:
        return f"{command[0]}: {error.strerror}"
    with process:
        try:
            _, errors = process.communicate(request, timeout=seconds + START_SECONDS / 2)
        except subprocess.TimeoutExpired:
            return ""
        finally:  # also when the row's alarm interrupts
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, signal.SIGKILL)
    if process.returncode == 0:
        return ""
    return errors.decode(errors="replace").strip()[-500:] or f"ended with exit code {process.returncode}"


def _command(sandbox: SandboxConfig, memory: int) -> list[str]:
    python, folders = _interpreter(sandbox.python)
    program = Path(__file__).with_name("sandbox_program.py").read_text(encoding="utf-8")
    enter = ["sh", "-c", _ENTER, "sandbox", str(memory), *folders, "--"]
    user: list[str] = []
    if os.geteuid() == 0:
        number = str(_UNUSED_USERS[os.getpid() % len(_UNUSED_USERS)])
        user = [f"--reuid={number}", f"--regid={number}", "--clear-groups"]
    own_user = [] if user else ["--user", "--map-root-user"]
    start = [python, "-I", "-B", "-X", "utf8", "-c", program]
    return ["unshare", *own_user, *_NAMESPACES, *enter, *user, *start]


def _calls() -> bytes:
    """The filter of system calls. SandboxError where this machine has none."""
    try:
        return call_filter()
    except ValueError as error:
        raise SandboxError(str(error)) from error


@cache
def _interpreter(python: str | None) -> tuple[str, list[str]]:
    """The interpreter and the files that it needs. Raises SandboxError."""
    # a virtual environment's packages are visible only if it was named explicitly
    chosen = (
        os.path.realpath(sys.executable) if python is None else os.path.abspath(os.path.expanduser(python))
    )
    ask = [chosen, "-I", "-c", "import sys; print(sys.prefix); print(sys.base_prefix)"]
    try:
        answer = subprocess.run(ask, capture_output=True, text=True, timeout=30, check=True)
    except (OSError, subprocess.SubprocessError) as error:
        raise SandboxError(f"the interpreter {chosen} does not run: {error}") from error
    folders = [*_LIBRARIES]
    for folder in answer.stdout.split("\n")[:2]:
        if not any(Path(folder).is_relative_to(known) for known in folders):
            folders.append(folder)
    return chosen, folders


def require_sandbox(sandbox: SandboxConfig, timeout: float) -> None:
    """ConfigError when programs cannot be run here, with what is missing. `timeout`: that of a row."""
    if sandbox.timeout + START_SECONDS > timeout:
        rule = f"does not fit into reward.timeout={timeout:g}, of which {START_SECONDS:g} are for starting"
        remedy = f"reward.timeout={sandbox.timeout + START_SECONDS:g}"
        raise ConfigError.one(f"{KEY}.timeout", sandbox.timeout, rule, remedy)
    if lacking := [tool for tool in _TOOLS if shutil.which(tool, path=_PATH) is None]:
        rule = f"programs of responses run in namespaces, which need {', '.join(lacking)}"
        raise ConfigError.one(KEY, None, rule, "install util-linux")
    try:
        outcomes = run("print(6 * 7)", [""], sandbox=sandbox, seconds=max(5.0, sandbox.timeout))
    except SandboxError as error:
        rule = f"programs of responses run in their own namespaces, which cannot be created here: {error}"
        raise ConfigError.one(KEY, None, rule, _remedy()) from error
    if outcomes != [Outcome(DONE, "42\n")]:
        rule = f"a program that prints 42 failed within these limits ({outcomes[0].how})"
        raise ConfigError.one(KEY, None, rule, f"raise {KEY}.memory, {KEY}.timeout or {KEY}.processes")


def _remedy() -> str:
    if os.geteuid() == 0:
        return (
            "a container needs the capability for it: docker run --cap-add SYS_ADMIN --security-opt"
            " seccomp=unconfined --security-opt apparmor=unconfined, or run as a user that may make user"
            " namespaces"
        )
    allowed = {
        "user.max_user_namespaces": "15000",
        "kernel.unprivileged_userns_clone": "1",
        "kernel.apparmor_restrict_unprivileged_userns": "0",
    }
    off = [f"{name}={value}" for name, value in allowed.items() if _forbids(name, value)]
    if off:
        return f"allow user namespaces: sysctl -w {' '.join(off)}"
    return "allow user namespaces; a container needs docker run --security-opt seccomp=unconfined"


def _forbids(name: str, allowed: str) -> bool:
    with suppress(OSError):
        now = Path("/proc/sys", *name.split(".")).read_text().strip()
        return now == "0" if allowed != "0" else now != "0"
    return False
