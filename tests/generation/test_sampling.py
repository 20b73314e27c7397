"""Random draws and filtering, against published and hand-computed values."""

import numpy as np
import pytest
import torch

from hydraflow.generation.base import SamplingParams
from hydraflow.generation.sampling import UniformDraws, choose, keep, key_words, philox

ONES = 0xFFFFFFFF


@pytest.mark.parametrize(
    ("counter", "key", "expected"),
    [
        ([0] * 4, [0] * 2, [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]),
        ([ONES] * 4, [ONES] * 2, [0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD]),
        (
            [0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344],
            [0xA4093822, 0x299F31D0],
            [0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1],
        ),
    ],
)
def test_philox_gives_the_known_answers_of_its_authors(
    counter: list[int], key: list[int], expected: list[int]
) -> None:
    words = philox(np.array(counter, dtype=np.uint64)[:, None], np.array(key, dtype=np.uint64)[:, None])
    assert words[:, 0].tolist() == expected


def test_keys_of_different_types_or_splits_differ_and_numpy_integers_count_as_integers() -> None:
    keys = [(1,), ("1",), (1, 1), (11,), ("a", "b"), ("ab",), ("a,b",)]
    assert len({tuple(key_words(key)) for key in keys}) == len(keys)
    assert key_words((np.int64(7), "x")).tolist() == key_words((7, "x")).tolist()


def draws(rows: list[tuple[int, int]]) -> UniformDraws:
    """Rows of (prompt, sample)."""
    prompts, samples = zip(*rows)
    return UniformDraws(
        [(0, f"uid{i}") for i in range(4)], np.array(samples), np.array(prompts), torch.device("cpu")
    )


def test_a_draw_depends_on_prompt_sample_and_token_only() -> None:
    several, alone = draws([(0, 0), (0, 1), (3, 5)]), draws([(3, 5)])
    for token in (0, 1, 31, 32, 33, 100):
        assert several.at(token)[2] == alone.at(token)[0]
    assert several.at(0)[2] == alone.at(0)[0], "going back is possible"
    table = torch.stack([several.at(t) for t in range(100)])
    assert len(table.unique()) == 300


def test_draws_are_uniform() -> None:
    source = draws([(p, s) for p in range(4) for s in range(500)])
    u = torch.stack([source.at(t) for t in range(40)]).flatten()
    assert float(u.min()) >= 0 and float(u.max()) < 1
    shares = torch.histc(u, bins=10, min=0, max=1) / len(u)
    # 80000 draws: the standard deviation of a tenth's share is 0.00106.
    assert float((shares - 0.1).abs().max()) < 0.005
    assert abs(float(u.mean()) - 0.5) < 0.005


LOGP = torch.tensor([[0.1, 0.4, 0.2, 0.3]]).log()


@pytest.mark.parametrize(
    ("top_k", "top_p", "kept"),
    [
        (-1, 1.0, [1, 1, 1, 1]),
        (2, 1.0, [0, 1, 0, 1]),
        (9, 1.0, [1, 1, 1, 1]),
        (-1, 0.3, [0, 1, 0, 0]),
        (-1, 0.69, [0, 1, 0, 1]),
        (-1, 0.71, [0, 1, 1, 1]),
        # Within the best two, the first has 4/7 = 0.571 of the probability.
        (2, 0.56, [0, 1, 0, 0]),
        (2, 0.58, [0, 1, 0, 1]),
    ],
)
def test_filters_keep_the_tokens_that_they_should(top_k: int, top_p: float, kept: list[int]) -> None:
    assert torch.equal(keep(LOGP.exp(), top_k, top_p), LOGP.exp() * torch.tensor([kept]))


def test_equal_probabilities_are_kept_in_token_order_by_top_p_and_together_by_top_k() -> None:
    weights = torch.full((1, 4), 0.25)
    assert (keep(weights, -1, 0.49) > 0)[0].tolist() == [True, True, False, False]
    assert (keep(weights, 2, 1.0) > 0)[0].tolist() == [True] * 4
    many = torch.cat([torch.full((1, 300), 0.25), torch.ones(1, 300)], 1)  # more than are looked at first
    assert (keep(many, -1, 0.9) > 0)[0].nonzero()[:, 0].tolist() == [*range(150), *range(300, 600)]


def test_a_token_is_where_the_uniform_number_falls_in_token_order() -> None:
    u = torch.tensor([0.0, 0.099, 0.101, 0.499, 0.501, 0.699, 0.701, 1 - 2**-53], dtype=torch.float64)
    tokens, logp = choose(LOGP.expand(8, 4), SamplingParams(max_tokens=1), u)
    assert tokens.tolist() == [0, 0, 1, 1, 2, 2, 3, 3]
    assert torch.allclose(logp, LOGP[0, tokens])


@pytest.mark.parametrize("filters", [{}, {"top_k": 20}, {"top_p": 0.8}, {"top_k": 200, "top_p": 0.9}])
@pytest.mark.parametrize("tokens", [128, 129, 1000])
@pytest.mark.parametrize("spread", [0.1, 4.0])
def test_a_token_of_a_large_vocabulary_is_the_one_that_float64_finds(
    tokens: int, spread: float, filters: dict[str, float]
) -> None:
    draw = np.random.default_rng(0)
    logits, uniforms = draw.normal(size=(200, tokens)) * spread, draw.random(200)
    uniforms[:2] = 0, 1 - 2**-53
    found, logp = choose(
        torch.from_numpy(logits).float(),
        SamplingParams(max_tokens=1, temperature=0.7, **filters),  # type: ignore[arg-type]
        torch.from_numpy(uniforms),
    )
    weights = np.exp(logits.astype(np.float32).astype(np.float64) / 0.7)
    probabilities = weights / weights.sum(1, keepdims=True)
    order = (-probabilities).argsort(1, kind="stable")
    kept = np.take_along_axis(probabilities, order, 1)
    kept[:, int(filters.get("top_k", tokens)) :] = 0
    kept /= kept.sum(1, keepdims=True)
    kept[kept.cumsum(1) - kept >= filters.get("top_p", 1)] = 0
    filtered = np.zeros_like(kept)
    np.put_along_axis(filtered, order, kept / kept.sum(1, keepdims=True), 1)
    ends = filtered.cumsum(1)
    chosen = (np.arange(200), found.numpy())
    assert (filtered[chosen] > 0).all()
    assert (ends[chosen] - filtered[chosen] - 1e-6 <= uniforms).all() and (
        uniforms <= ends[chosen] + 1e-6
    ).all()
    assert np.abs(logp.numpy() - np.log(probabilities[chosen])).max() < 2e-6


def test_logits_that_are_not_numbers_have_such_log_probs() -> None:
    logits, uniforms = torch.zeros(3, 1000), torch.full((3,), 0.5, dtype=torch.float64)
    logits[0, 7], logits[1, 7] = torch.nan, torch.inf
    for filters in ({}, {"top_k": 5}, {"top_p": 0.5}):
        tokens, logp = choose(logits, SamplingParams(max_tokens=1, **filters), uniforms)  # type: ignore[arg-type]
        assert logp.isfinite().tolist() == [False, False, True] and bool((tokens < 1000).all())


def test_log_probs_are_at_the_temperature_and_before_the_filters() -> None:
    """At temperature 0.5 the probabilities 0.1 0.4 0.2 0.3 become squares over 0.30: 1/30 16/30 4/30 9/30."""
    params = SamplingParams(max_tokens=1, temperature=0.5, top_k=1)
    tokens, logp = choose(LOGP, params, torch.tensor([0.99], dtype=torch.float64))
    assert tokens.tolist() == [1] and float(logp.exp()) == pytest.approx(16 / 30)


def test_greedy_takes_the_best_token_with_its_log_prob_at_temperature_one() -> None:
    tokens, logp = choose(LOGP, SamplingParams(max_tokens=1, temperature=0), None)
    assert tokens.tolist() == [1] and float(logp.exp()) == pytest.approx(0.4)


def test_large_vocabularies_are_chosen_in_parts_with_the_same_outcome(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    logits = torch.randn(7, 50, generator=torch.Generator().manual_seed(0))
    u = torch.linspace(0.05, 0.95, 7, dtype=torch.float64)
    params = SamplingParams(max_tokens=1, top_p=0.8)
    whole, greedy = (
        choose(logits, params, u),
        choose(logits, SamplingParams(max_tokens=1, temperature=0), None),
    )
    monkeypatch.setattr("hydraflow.generation.sampling.FILTERED_LOGITS", 100)
    assert all(torch.equal(a, b) for a, b in zip(whole, choose(logits, params, u)))
    assert all(
        torch.equal(a, b)
        for a, b in zip(greedy, choose(logits, SamplingParams(max_tokens=1, temperature=0), None))
    )


@pytest.mark.parametrize(
    "wrong", [{"max_tokens": 0}, {"temperature": -1.0}, {"top_k": -2}, {"top_p": 0.0}, {"top_p": 1.1}]
)
def test_numbers_outside_their_range_are_refused_by_name(wrong: dict[str, float]) -> None:
    (name,) = wrong
    with pytest.raises(ValueError, match=name):
        SamplingParams(**({"max_tokens": 4} | wrong))  # type: ignore[arg-type]
