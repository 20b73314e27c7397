"""When the weights of a worker with param_offload are on the device: for a call of its own, and while they
are read, be it in the call of another worker. On a CPU nothing moves, so the host memory
is one apart."""

from __future__ import annotations

import threading

import torch
from engine.memory_apart import MemoryApart
from workers.by_hand import make_actor, make_prompts, make_rollout

from hydraflow.engine.config import FSDPConfig
from hydraflow.engine.fsdp.engine import FSDPEngine
from hydraflow.generation.weights import Assembly
from hydraflow.models.adapters import Form
from hydraflow.protocol.batch import DataProto
from hydraflow.weights.slots import OpenSlots
from hydraflow.workers.actor import ActorWorker, SendOptions
from hydraflow.workers.training import ROWS_PER_RANK
from hydraflow.workers.weights_shared import sent_buckets


def resting_actor(path: str) -> tuple[ActorWorker, list[str]]:
    """An actor whose weights rest in a memory apart, as on a GPU; the moves that they make."""
    actor = make_actor(path, FSDPConfig(dtype="fp32", param_offload=True))
    engine = actor.engine
    assert isinstance(engine, FSDPEngine)
    engine._param_offload = apart = MemoryApart(engine.module)
    actor.after_call()
    return actor, apart.moves


def test_weights_move_once_for_each_call(tiny: str) -> None:
    """An update of two mini-batches among them; between the calls they rest."""
    actor, moves = resting_actor(tiny)
    rollout = make_rollout(tiny, actor=actor)  # gets the weights in its own call, after which they rest again
    assert moves == ["rest", "wake", "rest"]
    batch = rollout.generate(make_prompts())
    learnt = batch.select(["prompts", "responses", "response_mask"])
    columns = {"old_log_probs": batch.get("rollout_log_probs"), "advantages": batch.get("rollout_log_probs")}
    optimizer_steps: list[int] = []
    optimizer = actor.engine._optimizer  # type: ignore[attr-defined]
    optimizer.register_step_post_hook(lambda *_: optimizer_steps.append(1))
    batch = DataProto.from_dict({**dict(learnt.items()), **columns}, meta_info={ROWS_PER_RANK: [6, 6]})
    for call in (lambda: actor.compute_log_prob(learnt), lambda: actor.update(batch, step=1)):
        moves.clear()
        call()
        actor.after_call()
        assert moves == ["wake", "rest"]
    assert len(optimizer_steps) == 2


def test_weights_rest_once_the_last_bucket_is_sent(tiny: str) -> None:
    actor, moves = resting_actor(tiny)
    wanted = {name: tensor.clone() for name, tensor in make_actor(tiny).engine.weights()}
    moves.clear()
    place, buckets = actor.open_weights_listener(), list[int]()
    found: dict[str, torch.Tensor] = {}

    def read() -> None:
        assembly = Assembly()
        for bucket in sent_buckets(place, 0, "cpu", 60.0, OpenSlots()):
            buckets.append(bucket.header.number)
            for name, sent_weight in bucket.weights():
                if (whole := assembly.add(sent_weight)) is not None:
                    found[name] = whole

    reader = threading.Thread(target=read)
    reader.start()
    whole, _ = actor.share_weights([0], False, SendOptions(1, 4096, "fp32", True, Form.MERGED))
    assert whole
    reader.join()
    actor.after_call()
    assert moves == ["wake", "rest"] and buckets == list(range(len(buckets))) and len(buckets) > 2
    assert found.keys() == wanted.keys()
    assert all(torch.equal(tensor, wanted[name]) for name, tensor in found.items())
