"""oneDNN in tests that run on any CPU."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from hydraflow.models import linear


def noted_by_onednn(monkeypatch: pytest.MonkeyPatch, caller: ModuleType) -> list[Tensor]:
    """Lets oneDNN multiply wherever this runs; the list gets the matrices that `caller` gives it."""
    if not torch.backends.mkldnn.is_available():
        pytest.skip("this torch has no oneDNN")
    found: list[Tensor] = []
    real: Any = vars(caller)["onednn_product"]

    def product(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        found.append(weight)
        return real(x, weight, bias)

    monkeypatch.setattr(linear, "onednn_is_faster", lambda: True)
    monkeypatch.setattr(caller, "onednn_product", product)
    return found
