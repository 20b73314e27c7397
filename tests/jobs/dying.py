"""Workers that die at a chosen moment."""

from __future__ import annotations

import os
import signal

from hydraflow.dispatch.modes import Dispatch, register
from hydraflow.dispatch.transport import StoredValue
from hydraflow.workers.rollout import RolloutWorker


class DiesWhileItLoads(RolloutWorker):
    """Its process is killed in the middle of the weights of version 1."""

    @register(dispatch_mode=Dispatch.ONE_TO_ALL, blocking=False, read_only=True)
    def load_bucket(self, stored: StoredValue) -> None:
        """See `RolloutWorker`."""
        bucket = stored.read()
        if bucket.version == 1 and bucket.number == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        super().load_bucket(stored)
