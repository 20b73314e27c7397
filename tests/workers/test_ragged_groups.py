"""A step whose prompts have 5, 0 and 9 rows: the gradient of every optimizer step is the one of a plain model
that reads its rows one by one, on 1, 2 and 3 data ranks, however many dead rows fill the ranks up."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import product

import pytest
import torch
from engine.pool import Ranks
from torch import Tensor
from workers import ragged_jobs as jobs
from workers.gradient_jobs import AnyCase, Together
from workers.test_gradient_law import CASES, Plain, path, plain  # noqa: F401

from hydraflow.trainer.mini_batches import cut_mini_batches

ROWS = [0, 1, 2, 3, 4, 5, 6, 7, 5, 3, 2, 1, 0, 6]
"""Of the batch of the gradient law; row 5 has no trained token, others have holes in their masks."""
GROUPS = [2, 0, 2, 2, 0, 0, 2, 2, 2, 0, 2, 2, 0, 2]
"""Five rows of prompt 0, none of prompt 1, nine of prompt 2."""
TOLERANCE = 1e-9


@pytest.fixture(scope="module")
def three() -> Iterator[Ranks]:
    pool = Ranks(3)
    yield pool
    pool.stop()


def wanted(model: Plain, case: AnyCase, rows: Sequence[int]) -> Tensor:
    """The gradient of the plain model on these rows."""
    every = model.rows
    model.rows = [every[ROWS[row]] for row in rows]
    try:
        return model.gradient(case)
    finally:
        model.rows = every


@pytest.mark.parametrize("head", CASES)
@pytest.mark.parametrize(
    ("data_ranks", "prompts"), [(1, 1), (2, 1), (3, 1), (3, 2)], ids=lambda number: f"{number}"
)
def test_the_gradient_of_ragged_groups(
    path: str,  # noqa: F811
    plain: Callable[[str], Plain],  # noqa: F811
    ranks: Ranks,
    three: Ranks,
    data_ranks: int,
    prompts: int,
    head: str,
) -> None:
    model, pool = plain(head), {2: ranks, 3: three}.get(data_ranks)
    parts = [range(14)] if prompts == 2 else [of_group(2), of_group(0)]

    def unlawful(cases: Sequence[AnyCase]) -> list[str]:
        args = path, head, model.batch.select_idxs(ROWS), GROUPS, prompts, cases
        of_ranks = pool.run(jobs.gradients, *args) if pool else [jobs.gradients(*args)]
        failed = []
        for case in cases:
            right = [wanted(model, case, rows) for rows in parts]
            for found, micro in product(of_ranks, jobs.MICRO):
                for gradient, of_step in zip(found[case.name, micro], right, strict=True):
                    norm = 1.0 if isinstance(case, Together) else of_step.norm().item()
                    if not (error := (gradient - of_step).norm().item() / norm) < TOLERANCE:
                        failed.append(f"{case.name}, {micro}: {error:.1e}")
        return failed

    assert not (failed := unlawful([model.together(CASES[head])])), unlawful(CASES[head]) or failed


def of_group(group: int) -> list[int]:
    return [row for row, of_row in enumerate(GROUPS) if of_row == group]


def test_dead_rows_cost_a_forward_only_where_a_rank_has_no_other() -> None:
    """Five rows on three ranks: two each, one of them dead. Alone in a micro-batch it is read, else it is
    not."""
    lengths = torch.tensor([9, 8, 7, 6, 5]).numpy()
    groups = torch.zeros(5).numpy()
    three_ranks = jobs.plan_of(3, 1, jobs.MICRO["three rows"])
    cut = cut_mini_batches(lengths, groups, three_ranks, balance=True, shuffle_key=None)
    assert (cut.rows_per_rank, int((~cut.live).sum())) == ([2], 1)
    shares = [cut.live[first : first + 2].tolist() for first in (0, 2, 4)]
    [with_dead] = [share for share in shares if not all(share)]
    reads = {name: jobs.rows_read(with_dead, micro) for name, micro in jobs.MICRO.items()}
    assert reads == {"one row": 2, "three rows": 1, "24 tokens": 1} | dict.fromkeys(jobs.WHOLE, 1)
