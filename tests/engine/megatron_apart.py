"""A Megatron engine on a CPU that has a host memory apart from its own: what rests has no memory, so that
using it ends the process."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from engine import rank_jobs
from engine.memory_apart import CALLS, rests_after

from hydraflow.engine.megatron.engine import MegatronEngine
from hydraflow.engine.offload import Offload
from hydraflow.protocol import ragged

OFFLOADS = ("param_offload", "grad_offload", "optimizer_offload")


class RestingMegatron(MegatronEngine):
    """Rests after each of its calls."""

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        for name, offload in zip(OFFLOADS, offloads(self), strict=True):
            assert not offload._rests, "a CPU is its own host"
            offload._rests = getattr(self._settings, name)
        self._optimizer_state.rest()
        self.rest()


for _name in CALLS:
    setattr(RestingMegatron, _name, rests_after(MegatronEngine, _name))


def offloads(engine: MegatronEngine) -> list[Offload]:
    """By OFFLOADS."""
    return [engine._weights, engine._gradients, engine._optimizer_state]


def held(engine: MegatronEngine) -> tuple[int, int, int]:
    """Bytes of weights, gradients, and optimizer state on the device."""
    buffers = [one for chunk in engine._ddp or () for one in chunk.buffers + chunk.expert_parallel_buffers]
    weights = [parameter for chunk in engine._built.chunks for parameter in chunk.parameters()]
    state = [] if engine._optimizer is None else list(engine._optimizer.own_tensors())
    return _bytes(weights), _bytes([buffer.grad_data for buffer in buffers]), _bytes(state)


def _bytes(tensors: Iterable[torch.Tensor]) -> int:
    storages = {one.untyped_storage()._cdata: one.untyped_storage() for one in tensors}
    return sum(storage.nbytes() for storage in storages.values())


def begin(engine: MegatronEngine) -> tuple[dict[str, Any], Callable[[int], None]]:
    """Two steps; what was found, and a function that takes another. `held` says what was on the device: while
    the engine was idle, in passes of both kinds, in the optimizer's step, and at rest."""
    found: dict[str, Any] = {"said": [], "reported": [], "held": {"idle": held(engine)}}

    def loss_of(*args: Any) -> Any:
        found["held"]["update"] = held(engine)
        return rank_jobs.loss_of(*args)

    def step(number: int) -> None:
        share = rank_jobs.my_share(rank_jobs.make_batch(number), engine)
        found["said"].append(ragged.parts(engine.forward([share]).get("log_probs"))[0])
        found["reported"].append(engine.forward_backward(share.chunk(2), loss_of))
        found["reported"].append(engine.optimizer_step())
        engine.lr_step()

    for adamw in (one.optimizer for one in engine._optimizer._chain.chained_optimizers):
        adamw.register_step_post_hook(lambda *_: found["held"].update(step=held(engine)))
    step(0)
    step(1)
    found["held"]["rest"] = held(engine)
    return found, step


def train(engine: MegatronEngine, folder: Path) -> dict[str, Any]:
    """Two steps, a checkpoint, which is read again, a directory, and a third step; also what was on the
    device."""
    found, step = begin(engine)
    engine.snapshot([*rank_jobs.CONTENTS, "hf_model"]).write(folder / "checkpoint")
    engine.save_hf(folder / "model")
    engine.load(folder / "checkpoint", rank_jobs.CONTENTS)
    step(2)
    found["weights"] = {}
    for name, tensor in engine.weights():
        engine.rest()  # not while they are read
        found["weights"][name] = tensor.clone()
    found["held"]["sent"] = held(engine)
    for offload in offloads(engine):
        offload.wake()
    return found


def same(found: Any, wanted: Any) -> bool:
    """Bit by bit."""
    if isinstance(wanted, torch.Tensor):
        return torch.equal(found, wanted)
    if isinstance(wanted, Mapping):
        return found.keys() == wanted.keys() and all(same(found[name], wanted[name]) for name in wanted)
    if isinstance(wanted, list | tuple):
        return len(found) == len(wanted) and all(map(same, found, wanted))
    return bool(found == wanted)
