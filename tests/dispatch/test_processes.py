"""Ray's own processes are no more than a run needs, and end with it; those that do not end by themselves are
killed."""

from __future__ import annotations

import subprocess
from pathlib import Path

import psutil
import pytest
from dispatch import programs

from hydraflow.dispatch.processes import end_processes

PROGRAM = """
import ray
from hydraflow.dispatch import agent
from hydraflow.dispatch.config import RayInitConfig
from hydraflow.dispatch.processes import own_ray_processes
from hydraflow.dispatch.runtime import start_ray, stop_ray

@ray.remote(num_cpus=1)
class Careless:
    '''Starts a process and forgets it.'''
    def begin(self):
        import subprocess
        return subprocess.Popen(["sleep", "300"], start_new_session=True).pid

assert own_ray_processes() == []
start_ray(RayInitConfig(), 1)
careless = Careless.remote()
forgotten = ray.get(careless.begin.remote())
found = own_ray_processes()
assert forgotten in [process.pid for process in found]
others = [process.name() for process in found if agent.__file__ not in process.cmdline()]
assert sorted(others) == ["gcs_server", "ray::Careless", "raylet", "sleep"], others
assert len(found) == len(others) + 2
stop_ray()
print(*[process.pid for process in found if process.is_running() and process.status() != "zombie"])
"""


@pytest.mark.slow
def test_ray_starts_what_is_needed_and_nothing_remains_after_stop(tmp_path: Path) -> None:
    done = programs.run(tmp_path, PROGRAM)
    assert (done.returncode, done.stdout) == (0, "\n"), done.stdout + done.stderr[-3000:]


def test_who_does_not_end_is_killed() -> None:
    deaf = subprocess.Popen(
        ["sh", "-c", "trap '' TERM; echo deaf; sleep 300 & wait"], stdout=subprocess.PIPE, text=True
    )
    assert deaf.stdout is not None and deaf.stdout.readline() == "deaf\n"
    family = [psutil.Process(deaf.pid), *psutil.Process(deaf.pid).children(recursive=True)]
    end_processes(family, grace=0.1)
    assert deaf.wait(10) == -9
    assert not any(process.is_running() and process.status() != psutil.STATUS_ZOMBIE for process in family)
    deaf.stdout.close()
