"""The service of a cluster is lost when it was asked for a while, not when nobody asked."""

from __future__ import annotations

import pytest

from hydraflow.dispatch import head
from hydraflow.dispatch.head import PATIENCE, PERIOD, HeadLost, RayHead


def test_a_failure_after_a_long_silence_of_the_controller_is_the_first(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now, why = 0.0, ""
    monkeypatch.setattr(head.time, "monotonic", lambda: now)
    monkeypatch.setattr(head, "unreachable", lambda address, seconds: why)
    service = RayHead("10.0.0.1:6379")
    now = PERIOD + 0.1
    service.look()
    now, why = 300.0, "connection refused"  # the controller did something else meanwhile
    service.look()
    while now < 300.0 + PATIENCE:
        service.look()
        now += PERIOD
    now += PERIOD
    with pytest.raises(HeadLost, match="has not answered for"):
        service.look()
