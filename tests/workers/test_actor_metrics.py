"""How far trainer and generation engine are apart, measured in the update's own pass."""

import pytest
import torch

from hydraflow.algorithms.diagnostics import rollout_probs_diff
from hydraflow.metrics import merge, values
from hydraflow.workers.actor import probs_diff_metrics


def test_micro_batches_together_give_the_numbers_of_one_pass() -> None:
    draw = torch.Generator().manual_seed(0)
    ours, theirs = torch.rand(2, 9, generator=draw, dtype=torch.float64)
    whole = rollout_probs_diff(ours.log(), theirs.log(), torch.ones(9))
    gap = (ours - theirs).abs()
    for cut in ([9], [1, 8], [0, 3, 0, 6], [4, 4, 1]):
        found = values(merge(map(probs_diff_metrics, gap.split(cut))))
        assert found == {name: pytest.approx(whole[name]) for name in found} and len(found) == 3


def test_a_replica_has_its_own_numbers() -> None:
    gaps = (torch.tensor([0.5, 0.1]), torch.zeros(2))
    found = values(merge(probs_diff_metrics(gap, 2) for gap in gaps))
    name = "training/rollout_probs_diff"
    assert found == {f"{name}_mean/replica-2": pytest.approx(0.15), f"{name}_max/replica-2": 0.5}
