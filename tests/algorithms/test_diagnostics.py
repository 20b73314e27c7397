"""Difference of training's and generation's probabilities, by hand; and the examples in the package's
docstrings."""

import doctest
import importlib
import math
import pkgutil

import pytest
import torch

import hydraflow.algorithms
from hydraflow.algorithms.diagnostics import rollout_probs_diff

MODULES = [module.name for module in pkgutil.iter_modules(hydraflow.algorithms.__path__)]


def test_differences_by_hand():
    old, rollout = torch.tensor([0.5, 0.2, 0.6, 0.7]), torch.tensor([0.4, 0.2, 0.9, 0.1])
    mask = torch.tensor([1, 1, 1, 0])  # gaps 0.1, 0, -0.3
    diff = rollout_probs_diff(old.log(), rollout.log(), mask)
    assert diff["training/rollout_probs_diff_mean"] == pytest.approx(0.4 / 3, abs=1e-6)
    assert diff["training/rollout_probs_diff_max"] == pytest.approx(0.3, abs=1e-6)
    assert diff["training/rollout_probs_diff_std"] == pytest.approx(math.sqrt((0.1 - 0.16 / 3) / 2), abs=1e-6)
    # 0.5, 0.2, 0.6 against 0.4, 0.2, 0.9: covariance 0.13, squares 0.26/3 and 0.26
    assert diff["training/rollout_actor_probs_pearson_corr"] == pytest.approx(
        0.13 / math.sqrt(0.26 / 3 * 0.26), abs=1e-5
    )


def test_equal_probabilities_differ_by_nothing():
    logp = torch.tensor([0.5, 0.2]).log()
    diff = rollout_probs_diff(logp, logp.clone(), torch.ones(2))
    assert diff["training/rollout_probs_diff_max"] == 0.0
    assert diff["training/rollout_actor_probs_pearson_corr"] == pytest.approx(1.0)


def test_what_is_not_defined_is_left_out():
    logp = torch.tensor([0.5, 0.2]).log()
    assert rollout_probs_diff(logp, logp, torch.zeros(2)) == {}
    one = rollout_probs_diff(logp, logp, torch.tensor([1, 0]))
    assert one["training/rollout_probs_diff_std"] == 0.0
    assert "training/rollout_actor_probs_pearson_corr" not in one
    for pair in ((logp, logp[[0, 0]]), (logp[[0, 0]], logp)):
        assert "training/rollout_actor_probs_pearson_corr" not in rollout_probs_diff(*pair, torch.ones(2))


@pytest.mark.parametrize("name", MODULES)
def test_examples_in_docstrings(name):
    assert doctest.testmod(importlib.import_module(f"hydraflow.algorithms.{name}"), verbose=False).failed == 0


def test_examples_in_docstrings_were_found():
    modules = [importlib.import_module(f"hydraflow.algorithms.{name}") for name in MODULES]
    assert sum(doctest.testmod(module).attempted for module in modules) >= 10
