"""Which link a run has, who may be replaced, and beside whom the rollout sleeps. What travels is tested with
real processes (`jobs/test_placement.py`)."""

from __future__ import annotations

import os
import signal
from types import SimpleNamespace
from typing import Any

import pytest
from workers.test_rollout import MAX_TOKENS, listed, make_prompts

from hydraflow.batch_plan.resolve import resolve_plan
from hydraflow.compose.loading import load
from hydraflow.dispatch.config import RayInitConfig
from hydraflow.dispatch.group import Timeouts
from hydraflow.dispatch.placement import ResourcePool
from hydraflow.dispatch.runtime import Runtime
from hydraflow.dispatch.worker import RoleSpec
from hydraflow.generation.config import SamplingConfig
from hydraflow.models.config import ModelConfig
from hydraflow.schema import PPOConfig
from hydraflow.trainer.roles import _link, _places
from hydraflow.trainer.weight_links import ObjectStore, SameProcess, load_model_directory
from hydraflow.workers.rollout import RolloutSpec, RolloutWorker

GAE = ["algorithm.adv_estimator=gae", "algorithm.use_kl_in_reward=true", "trainer.n_gpus_per_node=4"]
PLACE = {
    "actor": "actor_rollout_ref.actor.device_mapping",
    "rollout": "actor_rollout_ref.rollout.device_mapping",
    "ref": "actor_rollout_ref.ref.device_mapping",
    "critic": "critic.device_mapping",
}


def linked(*overrides: str, **places: str) -> tuple[Any, Any]:
    """The link of such a run, and its rollout's group."""
    mappings = [f"{PLACE[role]}={devices}" for role, devices in places.items()]
    config = load("ppo", PPOConfig, [*GAE, *mappings, *overrides])
    plan = resolve_plan(config, prompts=64, devices_per_node=4)
    of_role: dict[str, Any] = {}
    for place in _places(config, plan):
        processes = {rank: SimpleNamespace(node_id="this one") for rank in range(len(place.devices))}
        group = SimpleNamespace(
            roles=dict.fromkeys(place.roles), recovery=None, replaced=0, processes=processes
        )
        of_role |= {role: SimpleNamespace(group=group) for role in place.roles}
    return _link(config, plan, of_role["actor"], of_role["rollout"]), of_role["rollout"].group


def test_a_run_that_trains_nothing_reads_the_weights_again_for_a_new_process(
    ray_session: None, tiny: str
) -> None:
    spec = RolloutSpec(
        ModelConfig(path=tiny), SamplingConfig(dtype="fp32"), max_prompt=8, max_tokens=MAX_TOKENS, seed=5
    )
    with Runtime(RayInitConfig(), Timeouts(start=120, call=60)) as runtime:
        runtime.start([ResourcePool("sampling", [1])])
        group = runtime.group("sampling", {"rollout": RoleSpec(RolloutWorker, (spec,))})
        runtime.await_ready()
        role = group.role("rollout")
        load_model_directory(role, 1)

        def sampled() -> list[list[int]]:
            return listed(runtime.fetch(role.call(RolloutWorker.generate, make_prompts()).get()), "responses")

        before = sampled()
        os.kill(group.processes[0].pid, signal.SIGKILL)
        assert sampled() == before and group.replaced == 1


def test_a_rollout_with_the_actor_takes_its_weights_from_the_same_process() -> None:
    link, group = linked()
    assert isinstance(link, SameProcess) and group.recovery is None


@pytest.mark.parametrize(
    ("overrides", "places", "beside", "replaced"),
    [
        ([], {"actor": "0-1", "rollout": "2-3", "ref": "0-1", "critic": "0-1"}, set(), True),
        (["trainer.fuse_roles=false"], {}, {"actor", "critic", "ref"}, True),
        ([], {"actor": "0-3", "rollout": "2-3", "ref": "0-3", "critic": "0-1"}, {"actor", "ref"}, True),
        ([], {"actor": "0-3", "rollout": "2-3", "ref": "2-3", "critic": "2-3"}, {"actor"}, False),
    ],
    ids=["devices of its own", "a process each", "overlapping", "with the critic"],
)
def test_only_a_process_that_holds_nothing_else_is_replaced(
    overrides: list[str], places: dict[str, str], beside: set[str], replaced: bool
) -> None:
    """A critic that is trained cannot be made again."""
    link, group = linked(*overrides, **places)
    assert isinstance(link, ObjectStore) and set(link.beside) == beside
    assert (group.recovery is not None) == replaced
