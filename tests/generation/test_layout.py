"""Which rows run together."""

from hypothesis import given
from hypothesis import strategies as st

from hydraflow.generation.layout import request_order, waves
from hydraflow.models.decoding_sizes import padded_width


def test_padding_is_small_and_never_shrinks_a_prompt() -> None:
    for length in range(1, 5000):
        width = padded_width(length)
        assert width >= length
        assert width - length <= max(3, width / 5)


def test_few_widths_serve_many_lengths() -> None:
    assert len({padded_width(n) for n in range(1, 5000)}) < 45


def test_waves_of_a_small_case() -> None:
    """Lengths 6 and 5 share width 8, length 9 has 12; prompt 0 needs two waves of at most 4 rows."""
    got = list(waves([6, 9, 5], [6, 1, 2], 4, pad=True, mixed=False))
    assert [(w.widths, w.prompts, w.owner, w.samples) for w in got] == [
        ([8], [0], [0, 0, 0, 0], [0, 1, 2, 3]),
        ([8, 8], [0, 2], [0, 0, 1, 1], [4, 5, 0, 1]),
        ([12], [1], [0], [0]),
    ]


def test_prompts_of_several_widths_may_share_a_wave() -> None:
    got = list(waves([30, 9, 5, 6], [1, 2, 2, 1], 4, pad=True, mixed=True))
    assert [(w.widths, w.prompts, w.owner, w.samples) for w in got] == [
        ([8, 8], [2, 3], [0, 0, 1], [0, 1, 0]),
        ([12, 32], [1, 0], [0, 0, 1], [0, 1, 0]),
    ]


def test_a_prompt_is_not_split_over_waves_when_one_can_hold_it() -> None:
    got = list(waves([5, 5], [3, 3], 4, pad=True, mixed=True))
    assert [(w.prompts, w.samples) for w in got] == [([0], [0, 1, 2]), ([1], [0, 1, 2])]
    got = list(waves([5, 5], [1, 4], 4, pad=True, mixed=True))
    assert [(w.prompts, w.samples) for w in got] == [([0], [0]), ([1], [0, 1, 2, 3])]


def test_without_padding_only_equal_lengths_meet() -> None:
    assert [(w.widths, w.prompts) for w in waves([6, 5, 6], [1, 1, 1], 9, pad=False, mixed=False)] == [
        ([5], [1]),
        ([6, 6], [0, 2]),
    ]


@given(
    st.lists(st.tuples(st.integers(1, 40), st.integers(1, 9)), min_size=1, max_size=20),
    st.integers(1, 12),
    st.booleans(),
    st.booleans(),
)
def test_every_sample_runs_once_and_comes_back_in_order(
    prompts: list[tuple[int, int]], max_rows: int, pad: bool, mixed: bool
) -> None:
    lengths, samples = [p for p, _ in prompts], [n for _, n in prompts]
    plan = list(waves(lengths, samples, max_rows, pad=pad, mixed=mixed))
    assert all(0 < len(w.owner) <= max_rows for w in plan)
    assert all(w.owner == sorted(w.owner) and w.widths == sorted(w.widths) for w in plan)
    assert mixed or all(len(set(w.widths)) == 1 for w in plan)
    run = [(w.prompts[o], s) for w in plan for o, s in zip(w.owner, w.samples, strict=True)]
    assert [run[i] for i in request_order(plan, samples)] == [
        (i, s) for i, n in enumerate(samples) for s in range(n)
    ]
