"""An object store without room, nor room on the disk behind it: a Ray of its own with 80 MB of shared memory,
for which every disk is full."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from dispatch import programs

from hydraflow.dispatch.config import RayInitConfig
from hydraflow.dispatch.group import Timeouts
from hydraflow.dispatch.modes import Dispatch, register
from hydraflow.dispatch.placement import ResourcePool
from hydraflow.dispatch.runtime import Runtime
from hydraflow.dispatch.worker import RoleSpec, Worker
from hydraflow.errors import HydraflowError
from hydraflow.protocol.batch import DataProto

FULL = {"RAY_DEFAULT_OBJECT_STORE_MAX_MEMORY_BYTES": "80000000", "RAY_local_fs_capacity_threshold": "0.0001"}
MEGABYTE = 2**20


class Sender(Worker):
    """Makes batches."""

    @register(dispatch_mode=Dispatch.RANK_ZERO)
    def send(self, megabytes: int) -> DataProto:
        return DataProto.from_dict({"prompts": torch.ones(1, megabytes * MEGABYTE // 8, dtype=torch.int64)})


def main() -> None:
    """Sends what fits, then what does not."""
    with Runtime(RayInitConfig(), Timeouts(start=120, call=60)) as runtime:
        runtime.start([ResourcePool("here", [1])])
        sender = runtime.group("here", {"sender": RoleSpec(Sender)}).role("sender")
        runtime.await_ready()
        kept = sender.call(Sender.send, 20)
        print("20 MB are sent", flush=True)
        try:
            sender.call(Sender.send, 200)
        except HydraflowError as error:
            print(f"{type(error).__name__} {error.exit_code}: {error}", flush=True)
        del kept


@pytest.mark.slow
def test_the_error_says_what_is_full_and_what_makes_room(tmp_path: Path) -> None:
    text = f"{programs.FORKS_WORKERS}\nfrom dispatch.test_full_store import main; main()"
    process, log = programs.start(tmp_path, text, **FULL)
    assert process.wait(timeout=180) == 0 and "20 MB are sent\n" in log.read_text(), log.read_text()[-3000:]
    refused = log.read_text().partition("20 MB are sent\n")[2]
    assert "StoreFull 3: Ray's object store on " in refused and "is full" in refused
    assert "data.train_batch_size" in refused
