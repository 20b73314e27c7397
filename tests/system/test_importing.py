"""Imports without garbage collection: what was imported is never looked at again, and nothing else."""

from __future__ import annotations

import gc
import sys

import pytest

from hydraflow.algorithms.config import ESTIMATORS
from hydraflow.system.importing import importing


@pytest.mark.parametrize("new", [False, True])
def test_only_an_import_freezes_what_exists(new: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    frozen = gc.get_freeze_count()
    with importing():
        assert not gc.isenabled()
        if new:
            monkeypatch.setitem(sys.modules, "a_module_that_is_new", sys)
    assert gc.isenabled()
    assert (gc.get_freeze_count() > frozen) == new


def test_garbage_of_a_step_is_collected_although_its_estimator_is_loaded_in_every_step() -> None:
    ESTIMATORS["grpo"].load()
    frozen = gc.get_freeze_count()
    ESTIMATORS["grpo"].load()
    assert gc.get_freeze_count() <= frozen
