"""One small model directory, and one data file that is all right."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from checkup.given import parquet, row


@pytest.fixture
def model(tiny: str, tmp_path: Path) -> Path:
    """A copy of the small model, to be broken."""
    return Path(shutil.copytree(tiny, tmp_path / "model"))


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """Eight good rows."""
    return parquet(tmp_path / "train.parquet", [row(f"{i}+1=", f"{i + 1:03d}") for i in range(8)])
