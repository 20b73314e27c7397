"""A running Ray cluster, looked at without joining it: does it take our token, which nodes are in it, which
were lost.

In: the address of its control service, RAY_AUTH_MODE and the token that Ray's own loader finds. Out: names of
nodes, or a reason. Ray's own client would try a refused token for 20 s to a minute, say nothing of it, and
then blame the network. Left out on purpose: joining (`runtime.py`), starting nodes (`slurm/`).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import grpc
import ray._raylet
from ray.core.generated import gcs_pb2, gcs_service_pb2, gcs_service_pb2_grpc

from hydraflow.errors import EnvironmentFault

MESSAGES: Any = gcs_service_pb2
NODES: Any = gcs_pb2
"""Made by the protocol compiler, which writes no types."""
RAYLET: Any = ray._raylet
"""Compiled; its stub does not have all of it."""
CALL_SECONDS = 5.0
POLL_SECONDS = 0.5


def refusal(address: str) -> str | None:
    """Why the cluster at host:port would not take us for the want of the right token; None: it does, or
    cannot be asked."""
    try:
        _nodes(address)
    except grpc.RpcError as error:
        if error.code() == grpc.StatusCode.UNAUTHENTICATED:
            return (
                "it refuses our token"
                if _token()
                else "it wants a token, and we have none (RAY_AUTH_MODE is not token)"
            )
    return None


def silence(address: str) -> str | None:
    """Why no Ray answers at host:port; None: one does, though it may refuse our token."""
    try:
        _nodes(address)
    except grpc.RpcError as error:
        if error.code() in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED):
            return str(error.details())
    return None


def alive(address: str) -> set[str]:
    """Names of the nodes that are in the cluster; raises grpc.RpcError when it does not answer."""
    return {node.node_name for node in _nodes(address) if node.state == NODES.GcsNodeInfo.ALIVE}


def lost(address: str) -> set[str]:
    """Names of nodes that were in the cluster and are no more."""
    return {node.node_name for node in _nodes(address)} - alive(address)


def await_nodes(
    address: str, names: Sequence[str], seconds: float, *, ended: Callable[[], str | None] = lambda: None
) -> None:
    """Waits until nodes of all these names are in the cluster. EnvironmentFault naming those that are not
    after so many seconds.

    `ended` says why waiting makes no sense any more; None: it does.
    """
    deadline = time.monotonic() + seconds
    while missing := _missing(address, names):
        why = ended()
        if why is None and time.monotonic() > deadline:
            why = f"waited {seconds:g} s"
        if why is not None:
            raise EnvironmentFault(
                f"{len(missing)} of {len(names)} nodes have not joined Ray at {address}: {', '.join(missing)}"
                f" ({why})"
            )
        time.sleep(POLL_SECONDS)


def _missing(address: str, names: Sequence[str]) -> list[str]:
    try:
        here = alive(address)
    except grpc.RpcError as error:
        if error.code() == grpc.StatusCode.UNAUTHENTICATED:
            raise EnvironmentFault(f"Ray at {address} refuses our token") from None
        here = set()
    return [name for name in names if name not in here]


def _nodes(address: str) -> list[Any]:
    with grpc.insecure_channel(address, options=[("grpc.enable_http_proxy", 0)]) as channel:
        service = gcs_service_pb2_grpc.NodeInfoGcsServiceStub(channel)
        return list(
            service.GetAllNodeInfo(
                MESSAGES.GetAllNodeInfoRequest(), timeout=CALL_SECONDS, metadata=_token()
            ).node_info_list
        )


def _token() -> tuple[tuple[str, str], ...]:
    """What goes with each request; empty: authentication is off."""
    loader = RAYLET.AuthenticationTokenLoader.instance()
    return tuple(loader.get_token_for_http_header().items()) if loader.has_token() else ()
