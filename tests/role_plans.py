"""Role plans of which only the sizes matter."""

from __future__ import annotations

from hydraflow.batch_plan.parts import MicroPlan, RolePlan


def simple_plan(
    *, data_ranks: int = 1, mini_batch_trajectories: int, epochs: int = 1, micro: MicroPlan | None = None
) -> RolePlan:
    """One response per prompt and one mini-batch per step."""
    rows = mini_batch_trajectories // data_ranks
    return RolePlan(
        data_ranks=data_ranks,
        mini_batch_prompts=mini_batch_trajectories,
        mini_batch_trajectories=mini_batch_trajectories,
        rows_per_rank=rows,
        epochs=epochs,
        shuffle=False,
        micro=micro or MicroPlan(rows=rows, max_tokens=None),
        optimizer_steps_per_step=epochs,
    )
