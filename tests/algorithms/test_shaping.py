"""Reward shaping: each part by hand, and all of them together against loops in float64."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hydraflow.algorithms.config import AlgorithmConfig, compares_groups
from hydraflow.algorithms.running import RunningMoments
from hydraflow.algorithms.shaping import OverlongBuffer, shape_scores


def f64(values) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


def shaped(
    config, scores, groups, lengths, *, right=None, samples=None, overlong=None, seen=None
) -> list[float]:
    found = shape_scores(
        config,
        f64(scores),
        lengths=torch.tensor(lengths),
        right=torch.tensor(right if right is not None else [True] * len(scores)),
        group_ids=torch.tensor(groups),
        samples=torch.arange(len(scores)) if samples is None else torch.tensor(samples),
        seen=seen or RunningMoments(),
        overlong=overlong,
    )
    assert found.dtype == torch.float64
    return found.tolist()


def test_the_defaults_change_nothing():
    scores = torch.tensor([1.0, 2.0])
    ids = torch.tensor([0, 1])
    seen = RunningMoments()
    found = shape_scores(
        AlgorithmConfig(), scores, lengths=ids, right=ids > 0, group_ids=ids, samples=ids, seen=seen
    )
    assert found is scores and seen.count == 0 and not compares_groups(AlgorithmConfig())


def test_an_overlong_response_costs():
    """20 tokens before the limit of 100, and as much again beyond it."""
    buffer = OverlongBuffer(limit=100, size=20, factor=0.5)
    found = shaped(AlgorithmConfig(), [1.0] * 5, [0] * 5, [3, 80, 85, 100, 120], overlong=buffer)
    assert found == [1, 1, 0.875, 0.5, 0]


def test_short_and_right_responses_get_more():
    """Group 4: lengths 10, 20 and 30, of which the first is wrong. Group 7: all of one length."""
    config = AlgorithmConfig(length_penalty=2.0)
    found = shaped(
        config, [0, 1, 1, 1, 0], [4, 4, 4, 7, 7], [10, 20, 30, 5, 5], right=[False, True, True, True, False]
    )
    assert found == [0, 1, 0, 1, 0] and compares_groups(config)


def test_rows_of_a_sample_are_one_length():
    """Rows 0 and 1 are a sample of 30 tokens, row 2 one of 10."""
    found = shaped(AlgorithmConfig(length_penalty=1.0), [1, 1, 1], [0] * 3, [10, 20, 10], samples=[0, 0, 1])
    assert found == [0.5, 0.5, 1.5]


def test_clipping_comes_after_normalization():
    config = AlgorithmConfig(norm_mean_type="batch", reward_clip=1.5)
    assert shaped(config, [0, 1, 5], [0, 1, 2], [1] * 3) == [-1.5, -1, 1.5]


@pytest.mark.parametrize("kind", ["batch", "group", "running"])
def test_equal_scores_become_zero(kind):
    config = AlgorithmConfig(norm_mean_type=kind, norm_std_type=kind)
    assert shaped(config, [0.1] * 6, [0, 1] * 3, [1] * 6) == [0] * 6
    assert compares_groups(config) == (kind == "group")


def test_samples_that_score_alike_keep_the_differences_of_their_rows():
    """Two samples of two rows, 0 and 1 each: their standard deviation is 0."""
    config = AlgorithmConfig(norm_mean_type="group", norm_std_type="group")
    assert shaped(config, [0, 1, 0, 1], [0] * 4, [1] * 4, samples=[0, 0, 1, 1]) == [-0.5, 0.5, -0.5, 0.5]


def test_a_response_alone_keeps_its_score():
    config = AlgorithmConfig(norm_mean_type="group", norm_std_type="group")
    assert shaped(config, [3.0, 0.0, 2.0], [5, 6, 6], [1] * 3) == pytest.approx(
        [3.0, -math.sqrt(0.5), math.sqrt(0.5)], abs=1e-5
    )


@settings(deadline=None, max_examples=50)
@given(
    st.lists(st.lists(st.floats(-100, 100), min_size=1, max_size=5), min_size=1, max_size=5),
    st.integers(0, 4),
)
def test_running_statistics_are_those_of_one_list(steps, stopped):
    """Also if a run is resumed after `stopped` of its steps."""
    config = AlgorithmConfig(norm_mean_type="running", norm_std_type="running")
    seen, sofar = RunningMoments(), []
    for number, scores in enumerate(steps):
        if number == stopped:
            kept, seen = seen.state_dict(), RunningMoments()
            seen.load_state_dict(kept)
        found = shaped(config, scores, [0] * len(scores), [1] * len(scores), seen=seen)
        sofar += scores
        mean, std = (np.mean(sofar), np.std(sofar, ddof=1) + 1e-6) if len(sofar) > 1 else (0.0, 1.0)
        assert found == pytest.approx((np.array(scores) - mean) / std, rel=1e-7, abs=1e-6)


def test_rows_of_a_sample_are_one_of_the_run():
    seen = RunningMoments()
    config = AlgorithmConfig(norm_mean_type="running")
    assert shaped(config, [1, 3, 8], [0] * 3, [1] * 3, samples=[0, 0, 1], seen=seen) == [-4, -2, 3]
    assert (seen.count, seen.mean) == (2, 5.0)


KINDS = st.sampled_from([None, "batch", "group"])


@settings(deadline=None, max_examples=100)
@given(
    st.builds(
        AlgorithmConfig,
        length_penalty=st.sampled_from([0.0, 0.5]),
        norm_mean_type=KINDS,
        norm_std_type=KINDS,
        reward_clip=st.sampled_from([None, 1.0]),
    ),
    st.lists(
        st.tuples(st.integers(-4, 4), st.integers(0, 2), st.integers(0, 9), st.booleans()),
        min_size=1,
        max_size=8,
    ),
)
def test_all_of_it_against_loops(config, rows):
    scores, groups, lengths, right = (list(column) for column in zip(*rows))
    buffer = OverlongBuffer(limit=8, size=4, factor=1.0)
    of_length = []
    for score, group, length, is_right in rows:
        score = score - max(0, length - 4) / 4
        others = [other for other, of in zip(lengths, groups) if of == group]
        short = 0.0
        if max(others) > min(others):
            short = 0.5 - (length - min(others)) / (max(others) - min(others))
        of_length.append(score + config.length_penalty * (short if is_right else min(0.0, short)))

    def compared(kind, group):
        return [x for x, of in zip(of_length, groups) if kind == "batch" or of == group]

    wanted = []
    for score, group in zip(of_length, groups):
        if config.norm_mean_type and len(other := compared(config.norm_mean_type, group)) > 1:
            score = score - np.mean(other)
        if config.norm_std_type and len(other := compared(config.norm_std_type, group)) > 1:
            score = score / (np.std(other, ddof=1) + 1e-6 if max(other) > min(other) else 1.0)
        wanted.append(
            np.clip(score, -config.reward_clip, config.reward_clip) if config.reward_clip else score
        )
    found = shaped(config, scores, groups, lengths, right=right, overlong=buffer)
    assert found == pytest.approx(wanted, rel=1e-6, abs=1e-7)
