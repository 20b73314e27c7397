"""Device mappings against sets of device numbers, and the name of the placement."""

from __future__ import annotations

from collections.abc import Callable
from itertools import combinations
from typing import Any

from batch_plan.overrides import alternatives, plan_of, refusal
from hypothesis import given, note, settings
from hypothesis import strategies as st

Draw = Callable[[st.SearchStrategy[Any]], Any]
POLICY = "actor_rollout_ref"
KEYS = {role: f"{POLICY}.{role}.device_mapping" for role in ("actor", "ref", "rollout")} | {
    "critic": "critic.device_mapping"
}
SHARED_BY_UP_TO_EIGHT = 840
"""Prompts that 1, 2, ... 8 data ranks can share."""


def written(draw: Draw, devices: list[int]) -> Any:
    """One of the forms in which a mapping can be written."""
    first, last = devices[0], devices[-1]
    forms: list[Any] = [
        devices,
        ",".join(map(str, devices)),
        f"[{','.join(map(str, devices))}]",
        list(map(str, devices)),
    ]
    if devices == list(range(first, last + 1)):
        forms += [
            f"{first}-{last}",
            [f"{first}-{last}"],
            f"list(range({first},{last + 1}))",
            f"list(range({first}, {last + 1}))",
        ]
    if devices[:-1] == list(range(first, last)) or devices[:-1] == list(
        range(first, first + len(devices) - 1)
    ):
        forms += [f"{first}-{devices[-2]},{last}" if len(devices) > 1 else str(first)]
    return draw(st.sampled_from(forms))


@st.composite
def mapped(draw: Draw) -> tuple[int, dict[str, list[int]], dict[str, Any]]:
    """Devices of the cluster, the devices that each mapping names, and the settings."""
    nodes, per_node = draw(st.integers(1, 2)), draw(st.integers(1, 4))
    count = nodes * per_node
    taken: dict[str, Any] = {
        "trainer.nnodes": nodes,
        "trainer.n_gpus_per_node": per_node,
        "data.train_batch_size": SHARED_BY_UP_TO_EIGHT,
        f"{POLICY}.actor.ppo_mini_batch_size": SHARED_BY_UP_TO_EIGHT,
        f"{POLICY}.actor.use_kl_loss": True,
        f"{POLICY}.rollout.name": "vllm",
        f"{POLICY}.rollout.agent.num_workers": 1,
    }
    beyond = draw(st.sampled_from([0, 0, 0, 1]))
    names: dict[str, list[int]] = {}
    for role in KEYS:
        pieces = [list(range(count)), list(range(count // 2)), list(range(count // 2, count))]
        some = st.lists(
            st.integers(0, count - 1 + beyond),
            min_size=1,
            max_size=count,
            unique=draw(st.sampled_from([True, True, False])),
        )
        devices = draw(st.none() | st.sampled_from([piece for piece in pieces if piece]) | some.map(sorted))
        if devices is not None:
            names[role] = devices
            taken[KEYS[role]] = written(draw, devices)
    return count, names, taken


def placed(count: int, names: dict[str, list[int]]) -> dict[str, set[int]] | None:
    """The devices of each role; None where a mapping names none that is there, names one twice, or leaves one
    without a role."""
    if any(
        len(set(devices)) < len(devices) or set(devices) - set(range(count)) for devices in names.values()
    ):
        return None
    actor = set(names.get("actor", range(count)))
    roles = {"actor": actor, "critic": set(names.get("critic", range(count)))}
    roles |= {role: set(names.get(role, actor)) for role in ("ref", "rollout")}
    return roles if set().union(*roles.values()) == set(range(count)) else None


def placement(roles: dict[str, set[int]]) -> str:
    pairs = [(a, b) for a, b in combinations(roles.values(), 2) if a != b]
    if not pairs:
        return "colocated"
    if not any(a & b for a, b in pairs):
        return "disaggregated"
    return "partial" if all(a < b or b < a for a, b in pairs if a & b) else "overlapping"


@settings(max_examples=150, deadline=None)
@given(mapped())
def test_mappings_against_sets(drawn: tuple[int, dict[str, list[int]], dict[str, Any]]) -> None:
    count, names, taken = drawn
    roles, problems = placed(count, names), refusal(taken)
    for problem in problems:
        note(str(problem))
    assert (roles is None) == bool(problems)
    if roles is not None:
        plan = plan_of(taken)
        assert {
            role: {device for part in layout.devices.ranges for device in part}
            for role, layout in plan.layouts.items()
        } == roles
        assert plan.placement == placement(roles)
        return
    assert not refusal(
        taken | {key: value for problem in problems for key, value in alternatives(problem)[0].items()}
    )
    if len(problems) == 1:
        for alternative in alternatives(problems[0]):
            note(str(alternative))
            assert not refusal(taken | alternative)


def test_placements_have_names() -> None:
    """16 devices: what the four words mean."""
    small = {
        "trainer.nnodes": 2,
        "trainer.n_gpus_per_node": 8,
        "algorithm.adv_estimator": "grpo",
        f"{POLICY}.rollout.name": "vllm",
    }
    on = {
        "colocated": {},
        "disaggregated": {KEYS["actor"]: "0-7", KEYS["rollout"]: "8-15"},
        "partial": {KEYS["actor"]: "0-7", KEYS["rollout"]: "0-15"},
        "overlapping": {
            KEYS["actor"]: "0-11",
            KEYS["rollout"]: "8-15",
            "data.train_batch_size": 24,
            f"{POLICY}.actor.ppo_mini_batch_size": 24,
        },
    }
    assert {name: plan_of(small | mapping).placement for name, mapping in on.items()} == {
        name: name for name in on
    }
