"""The supervisor waits for descriptors of any number."""

from __future__ import annotations

import fcntl
import os
import resource

from hydraflow.system.tether import _readable


def test_descriptors_above_those_that_select_takes() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(4096, hard), hard))
    read, write = os.pipe()
    try:
        high = fcntl.fcntl(read, fcntl.F_DUPFD, 2000)
        assert _readable([high], 0.0) == []
        os.write(write, b"x")
        assert _readable([high], 5.0) == [high]
        os.close(high)
    finally:
        os.close(read)
        os.close(write)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
