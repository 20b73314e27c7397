"""What the configuration says of itself: keys without effect, what cannot run yet, and the batch plan's
rules.

In: the configuration, and what composing it has noted. Out: findings. `python -m hydraflow.plan` explains the
numbers.
"""

from __future__ import annotations

from collections.abc import Iterator

from hydraflow.checkup.context import CheckContext
from hydraflow.checkup.finding import Finding, note, of_problem, ok
from hydraflow.compose import rules as checks
from hydraflow.compose.runnable import problems

CLUSTER = "cluster.*: describes machines for python -m hydraflow.plan; the doctor looks at this one"


def check_settings(context: CheckContext) -> Iterator[Finding]:
    """Keys that main_ppo would refuse or miss, and keys that do nothing."""
    refused = [*context.unsupported, *checks.problems(context.asked), *problems(context.config)]
    notes = [*context.notes, *([CLUSTER] if context.asked.cluster != context.config.cluster else [])]
    yield from map(of_problem, refused)
    yield from map(note, notes)
    if not refused and not notes:
        yield ok("every key has an effect and can be run")


def check_plan(context: CheckContext) -> Iterator[Finding]:
    """The batch plan resolves; its broken rules are reported one by one."""
    plan = context.plan
    steps = f"{plan.total_steps or 'an unknown number of'} training steps"
    each = f"{plan.prompts_per_step} prompts and {plan.trajectories_per_step} trajectories"
    yield ok(f"{steps} of {each} on {len(plan.cluster.devices)} devices, {plan.placement}")
