"""What an engine's process gets when it starts."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors import SafetensorError
from workers.by_hand import process

from hydraflow.engine import process_group
from hydraflow.engine.config import FSDPConfig
from hydraflow.errors import EnvironmentFault
from hydraflow.models.config import ModelConfig
from hydraflow.options import Implementation
from hydraflow.protocol import ragged
from hydraflow.protocol.batch import DataProto
from hydraflow.protocol.coordinates import Coordinates
from hydraflow.workers import engine_worker, utilization
from hydraflow.workers.engine_worker import EngineWorker


class NoEngine:
    """Takes an engine's arguments and builds nothing; of two ranks."""

    data_size = 2

    def __init__(self, *args: object, **kwargs: object):
        self.rests = 0

    def rest(self) -> None:
        self.rests += 1

    def coordinates(self) -> Coordinates:
        return Coordinates(data_rank=self.data_size - 1, data_size=self.data_size, is_collect=True)


@pytest.mark.parametrize(("data_size", "mfu"), [(2, 0.5), (1, 0.25)])
def test_ranks_that_share_rows_share_their_flops(
    monkeypatch: pytest.MonkeyPatch, data_size: int, mfu: float
) -> None:
    """20 FLOPs in 4 seconds, on two devices with a peak of 10 a second: of one, or of both."""
    monkeypatch.setattr(engine_worker, "join_group", lambda process: None)
    work = SimpleNamespace(forward=lambda prompts, responses: 20.0)
    monkeypatch.setattr(engine_worker.ModelWork, "of", lambda *given: work)
    monkeypatch.setattr(utilization, "peak_flops", lambda *given: 10.0)
    monkeypatch.setattr(NoEngine, "data_size", data_size)
    monkeypatch.setitem(engine_worker.TRAIN_ENGINES, "none", Implementation(f"{__name__}:NoEngine"))
    worker = EngineWorker(
        process(rank=1, world_size=2), "none", ModelConfig(), FSDPConfig(), head="policy", field="model"
    )
    row = ragged.from_rows([torch.tensor([3])])
    worker.utilization.note("x", DataProto.from_dict({"prompts": row, "responses": row}), 4.0)
    assert worker.utilization_metrics()["perf/mfu/x"].value == mfu


def test_a_collective_waits_as_long_as_a_call_may_take(monkeypatch: pytest.MonkeyPatch) -> None:
    given: dict[str, Any] = {}
    monkeypatch.setattr(process_group, "start", given.update)
    monkeypatch.setattr(engine_worker.ModelWork, "of", lambda *given: None)
    monkeypatch.setitem(engine_worker.TRAIN_ENGINES, "none", Implementation(f"{__name__}:NoEngine"))
    here = replace(process(rank=1, world_size=2), timeout_s=7200.0)
    worker = EngineWorker(
        here, "none", ModelConfig(), FSDPConfig(), None, head="policy", total_steps=1, field="model"
    )
    assert worker.engine.rests == 1, "other roles start beside it"  # type: ignore[attr-defined]
    where = dict(rank=1, world_size=2, address="127.0.0.1", port=0, listen_fd=None, group_size=None)
    assert given == where | dict(device_type="cpu", timeout_s=7200.0)


@pytest.mark.parametrize("full", [OSError(28, "No space left on device"), SafetensorError("No space left")])
def test_a_model_that_cannot_be_written_is_the_environments_fault(full: Exception) -> None:
    def save_hf(directory: str) -> None:
        raise full

    worker: Any = SimpleNamespace(engine=SimpleNamespace(save_hf=save_hf))
    with pytest.raises(EnvironmentFault, match=r"(?s)be written to /run: .*No space left.*-> make room"):
        EngineWorker.save_hf(worker, "/run")
