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
from hydraflow.dispatch.group import RoleGroup, Timeouts
from hydraflow.dispatch.placement import ResourcePool
from hydraflow.dispatch.runtime import Runtime
from hydraflow.dispatch.shards import CompletedFuture
from hydraflow.dispatch.worker import RoleSpec
from hydraflow.errors import WorkerError
from hydraflow.generation.config import RolloutConfig, SamplingConfig
from hydraflow.models.adapters import Form
from hydraflow.models.config import ModelConfig
from hydraflow.schema import PPOConfig
from hydraflow.trainer.roles import _link, _places
from hydraflow.trainer.turns import EngineRole, Turns
from hydraflow.trainer.weight_links import (
    Broadcast,
    SameProcess,
    SeparateProcesses,
    SharedMemory,
    load_model_directory,
)
from hydraflow.workers.actor import ActorWorker
from hydraflow.workers.rollout import RolloutSpec, RolloutWorker
from hydraflow.workers.weights_transfer import Received

GAE = ["algorithm.adv_estimator=gae", "algorithm.use_kl_in_reward=true", "trainer.n_gpus_per_node=4"]
PLACE = {
    "actor": "actor_rollout_ref.actor.device_mapping",
    "rollout": "actor_rollout_ref.rollout.device_mapping",
    "ref": "actor_rollout_ref.ref.device_mapping",
    "critic": "critic.device_mapping",
}


def linked(*overrides: str, **places: str) -> tuple[Any, Any]:
    """The link of such a run, and its rollout's group. A role of the link's turns has the plan's devices."""
    mappings = [f"{PLACE[role]}={devices}" for role, devices in places.items()]
    config = load("ppo", PPOConfig, [*GAE, *mappings, *overrides])
    plan = resolve_plan(config, prompts=64, devices_per_node=4)
    of_role: dict[str, Any] = {}
    for place in _places(config, plan):
        processes = {rank: SimpleNamespace(node_id="this one") for rank in range(len(place.devices))}
        group = SimpleNamespace(
            roles=dict.fromkeys(place.roles), recovery=None, replaced=0, processes=processes
        )
        of_role |= {role: SimpleNamespace(name=role, group=group) for role in place.roles}
    link = _link(config, plan, of_role["actor"], of_role["rollout"], Turns())
    assert isinstance(link, SameProcess | SeparateProcesses)
    for role, layout in plan.layouts.items():
        link.turns.add(of_role[role], layout.devices, EngineRole(of_role[role]))
    return link, of_role["rollout"].group


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
    assert isinstance(link, SharedMemory) and set(link.turns.beside("rollout")) == beside
    assert (group.recovery is not None) == replaced


def test_the_configuration_says_how_often_a_process_is_replaced() -> None:
    link, group = linked("trainer.fuse_roles=false", "actor_rollout_ref.rollout.max_retries=7")
    assert group.recovery.max_retries == link.config.max_retries == 7
    assert group.recovery.restore == link.restore


class Recorder:
    """Both groups of a link: what the actor was asked to send, whether with checksums, and how often a
    generation process was replaced."""

    world_size = 2
    name, failed = "rollout", RoleGroup.failed

    def __init__(self) -> None:
        self.forms: list[Form] = []
        self.checked: list[bool] = []
        self.group = SimpleNamespace(replaced=0)
        self.deaths = 0
        """In that many of the next transfers a generation process dies."""

    def call(self, method: Any, *args: Any) -> Any:
        if method is ActorWorker.sending_device:
            return ""
        if method is ActorWorker.open_weights_listener:
            return "a place"
        if method is ActorWorker.open_weights_group:
            return "an address", 1
        if method is ActorWorker.join_weights_group:
            return CompletedFuture(True)
        if method in (ActorWorker.share_weights, ActorWorker.broadcast_weights):
            self.forms.append(args[-1].form)
            self.checked.append(args[-1].checked)
            self.group.replaced += self.deaths > 0
            self.deaths = max(0, self.deaths - 1)
            shared = method is ActorWorker.share_weights
            return CompletedFuture([(True, "another place") if shared else True])
        answers = [self.answer(method)] * self.world_size
        return CompletedFuture(answers)

    def call_rank(self, rank: int, method: Any, *args: Any) -> Any:
        return CompletedFuture([self.answer(method)])

    @staticmethod
    def answer(method: Any) -> Any:
        """Of one generation process."""
        if method is RolloutWorker.sleep:
            return None
        if method is RolloutWorker.join_weights_group:
            return True
        assert method in (RolloutWorker.read_weights, RolloutWorker.receive_weights)
        return Received(None)


both_links = pytest.mark.parametrize("kind", [SharedMemory, Broadcast])


@both_links
def test_adapters_alone_are_sent_where_everybody_has_the_base_weights(kind: type[SeparateProcesses]) -> None:
    both: Any = Recorder()
    link = kind(both, both, RolloutConfig(name="vllm"), adapters=True)
    link.publish(0)()
    link.publish(1)()
    assert both.forms == [Form.APART, Form.ADAPTERS]
    both.group.replaced += 1
    link.publish(2)()
    link.publish(3)()
    assert both.forms[2:] == [Form.APART, Form.ADAPTERS]
    arrive = link.publish(4)
    both.deaths = 1
    arrive()
    assert both.forms[4:] == [Form.ADAPTERS, Form.APART]
    assert link.first_difference(1) is None
    assert both.forms[6:] == [Form.APART], "all weights are compared"
    link.publish(5)()
    assert both.forms[7:] == [Form.ADAPTERS]
    both.group.replaced += 1  # while nothing is sent: the new process alone gets everything, and at once
    link.restore(1)
    link.publish(6)()
    assert both.forms[8:] == [Form.APART, Form.APART]


@both_links
def test_a_process_that_died_while_it_slept_wakes_with_the_base_weights(
    kind: type[SeparateProcesses],
) -> None:
    """Until then it has none: weights sent to it would wake it beside the trainer."""
    both: Any = Recorder()
    link = kind(both, both, RolloutConfig(name="vllm"), adapters=True)
    for version in range(3):
        link.publish(version)()
        link.sleep()
    assert both.forms == [Form.APART, Form.APART, Form.ADAPTERS], "the second is checked: the first sleep"
    both.group.replaced += 1
    link.restore(1)
    assert len(both.forms) == 3
    for version in (3, 4):
        link.publish(version)()
        link.sleep()
    assert both.forms[3:] == [Form.APART, Form.ADAPTERS]


def test_weights_that_are_checked_come_whole() -> None:
    both: Any = Recorder()
    link = SharedMemory(both, both, RolloutConfig(name="vllm", verify_weights_every=2), adapters=True)
    for version in range(4):
        link.publish(version)()
    assert both.forms == [Form.APART, Form.ADAPTERS, Form.APART, Form.ADAPTERS]


def test_merged_weights_are_sent_whole_each_time() -> None:
    both: Any = Recorder()
    link = SharedMemory(both, both, RolloutConfig())
    for version in range(2):
        link.publish(version)()
    assert both.forms == [Form.MERGED, Form.MERGED]


def test_the_engine_gets_the_adapters_that_the_actor_trains() -> None:
    lora = "actor_rollout_ref.model.lora"
    vllm, rank = "actor_rollout_ref.rollout.name=vllm", f"{lora}_rank=4"
    for given, apart in (([rank], False), ([rank, f"{lora}.merge=false"], True)):
        link, _ = linked(vllm, *given)
        assert link.adapters == apart


@both_links
@pytest.mark.parametrize(
    ("sleeps", "checked"),
    [(False, [True, False, False, True, False, False]), (True, [True, True, False, True, False, False])],
    ids=["awake", "sleeps"],
)
def test_the_first_transfer_and_every_so_many_have_checksums(
    kind: type[SeparateProcesses], sleeps: bool, checked: list[bool]
) -> None:
    """And the one after the first sleep."""
    both: Any = Recorder()
    link = kind(both, both, RolloutConfig(verify_weights_every=3))
    for version in range(6):
        link.publish(version)()
        if sleeps:
            link.sleep()
    assert both.checked == checked


@both_links
def test_a_transfer_is_repeated_as_often_as_the_configuration_says(kind: type[SeparateProcesses]) -> None:
    both: Any = Recorder()
    link = kind(both, both, RolloutConfig(max_retries=2))
    both.deaths = 2
    link.publish(3)()
    assert len(both.forms) == 3
    both.deaths = 3
    with pytest.raises(WorkerError, match=r"3 times while weights of version 4 were sent; .*max_retries=2$"):
        link.publish(4)()
    assert len(both.forms) == 6
