"""Which trajectories share an optimizer step, and which data rank gets them. The controller decides, from
lengths alone.

In: sequence lengths and the role's plan. Out: one permutation of the step's rows. Mini-batches are cut in
prompt order (shuffled by seed if asked) before rows are split over ranks; balancing moves rows only inside
one mini-batch. So what is in a mini-batch does not depend on the number of ranks.
"""

from __future__ import annotations

import numpy as np

from hydraflow.batch_plan.parts import RolePlan
from hydraflow.protocol.balance import equal_size_partitions


def mini_batch_order(
    lengths: np.ndarray,
    plan: RolePlan,
    samples_per_prompt: int,
    *,
    balance: bool,
    shuffle_key: tuple[int, ...] | None,
) -> np.ndarray:
    """Row order to dispatch: rank by rank, and within a rank mini-batch by mini-batch.

    `lengths` (S,) tokens per trajectory in prompt-major order; `shuffle_key` seeds the draw of prompts, None
    keeps their order.

    >>> plan = RolePlan.simple(data_ranks=2, mini_batch_trajectories=2)
    >>> mini_batch_order(np.array([5, 1, 1, 5]), plan, 1, balance=False, shuffle_key=None).tolist()
    [0, 2, 1, 3]
    """
    rows = _prompt_order(len(lengths) // samples_per_prompt, samples_per_prompt, shuffle_key)
    per_rank: list[list[np.ndarray]] = [[] for _ in range(plan.data_ranks)]
    for mini_batch in np.split(rows, len(rows) // plan.mini_batch_trajectories):
        for rank, part in enumerate(
            _split_over_ranks(mini_batch, lengths, plan.data_ranks, samples_per_prompt, balance)
        ):
            per_rank[rank].append(part)
    return np.concatenate([part for parts in per_rank for part in parts])


def _prompt_order(prompts: int, samples: int, shuffle_key: tuple[int, ...] | None) -> np.ndarray:
    order = (
        np.arange(prompts) if shuffle_key is None else np.random.default_rng(shuffle_key).permutation(prompts)
    )
    return (order[:, None] * samples + np.arange(samples)).reshape(-1)


def _split_over_ranks(
    mini_batch: np.ndarray, lengths: np.ndarray, ranks: int, samples: int, balance: bool
) -> list[np.ndarray]:
    """Whole prompts where their number divides: a rank computes a prompt once for all of its samples that it
    has."""
    if not balance or ranks == 1:
        return np.split(mini_batch, ranks)
    units = mini_batch.reshape(-1, samples if len(mini_batch) % (samples * ranks) == 0 else 1)
    weights = lengths[units].sum(1)
    return [units[sorted(part)].reshape(-1) for part in equal_size_partitions(weights, ranks)]
