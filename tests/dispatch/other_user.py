"""What another user of the machine gets from a run: a program that root starts and that gives its rights away
before it looks.

Arguments: the address of Ray's control service, the token's file, a session folder, a process. Output: one
JSON object of refusals.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path

import grpc
from ray.core.generated import gcs_service_pb2, gcs_service_pb2_grpc

NOBODY = 65534


def refusal(look: Callable[[], object]) -> str:
    """Why it may not; what it found, where nobody stopped it."""
    try:
        return f"found {look()!r}"
    except PermissionError:
        return "no permission"
    except grpc.RpcError as error:
        return error.code().name


def nodes(address: str) -> object:
    """Asks Ray without a token."""
    with grpc.insecure_channel(address, options=[("grpc.enable_http_proxy", 0)]) as channel:
        stub = gcs_service_pb2_grpc.NodeInfoGcsServiceStub(channel)
        return stub.GetAllNodeInfo(gcs_service_pb2.GetAllNodeInfoRequest(), timeout=5)


def main(address: str, token: str, session: str, process: str) -> None:
    """Prints what came of each attempt."""
    os.setgroups([])
    os.setgid(NOBODY)
    os.setuid(NOBODY)
    looks = {
        "token": lambda: Path(token).read_text(),
        "session": lambda: os.listdir(session),
        "environment": lambda: Path(f"/proc/{process}/environ").read_bytes(),
        "nodes": lambda: nodes(address),
    }
    print(json.dumps({name: refusal(look) for name, look in looks.items()}))


if __name__ == "__main__":
    main(*sys.argv[1:])
