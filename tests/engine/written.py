"""Checkpoints that several tests read, each written once."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

import pytest

Which = TypeVar("Which")
Written = tuple[list[dict[str, Any]], Path]
"""What the ranks found when they wrote it, and its folder, which no test changes."""


def written_once(
    write: Callable[[Which, Path], list[dict[str, Any]]], folders: pytest.TempPathFactory
) -> Callable[[Which], Written]:
    """A function that writes the checkpoint for an argument when it is first called with it."""

    @cache
    def written(which: Which) -> Written:
        folder = folders.mktemp("written")
        return write(which, folder), folder

    return written
