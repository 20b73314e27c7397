"""Workers without Ray: what a process would know of itself, written down."""

from __future__ import annotations

import torch
from role_plans import simple_plan

from hydraflow.batch_plan.parts import MicroPlan
from hydraflow.dispatch.modes import Dispatch, register
from hydraflow.dispatch.worker import ProcessContext, Worker
from hydraflow.engine.config import FSDPConfig, OptimConfig
from hydraflow.generation.config import SamplingConfig
from hydraflow.models.config import ModelConfig
from hydraflow.protocol import ragged
from hydraflow.protocol.batch import DataProto
from hydraflow.workers.actor import ActorSpec, ActorWorker
from hydraflow.workers.config import ActorConfig
from hydraflow.workers.rollout import RolloutSpec, RolloutWorker, SamplingSpec

END = 1
PROMPTS = [[3], [4, 5, 6, 7, 8], [9, 10], [11, 12, 13]]
MAX_TOKENS, SAMPLES, TEMPERATURE = 12, 3, 0.7


def process(rank: int = 0, world_size: int = 1, **roles: Worker) -> ProcessContext:
    """A process of a group on one node. Engines find torch.distributed ready, so nobody listens at the
    address."""
    return ProcessContext(rank, world_size, rank, "here", "127.0.0.1", "127.0.0.1", 0, "cpu", 60.0, roles)


def actor_spec(path: str, fsdp: FSDPConfig | None = None) -> ActorSpec:
    """Of an actor that learns fast, in float32."""
    actor = ActorConfig(optim=OptimConfig(lr=1e-2), fsdp_config=fsdp or FSDPConfig(dtype="fp32"))
    rows = MicroPlan(rows=5, max_tokens=None)
    return ActorSpec(
        ModelConfig(path=path),
        actor,
        simple_plan(mini_batch_trajectories=len(PROMPTS) * SAMPLES),
        log_prob=rows,
        ref=None,
        temperature=TEMPERATURE,
        response_tokens=MAX_TOKENS,
        total_steps=1,
        seed=0,
    )


def rollout_spec(path: str) -> RolloutSpec:
    """In float32."""
    return RolloutSpec(
        ModelConfig(path=path), SamplingConfig(dtype="fp32"), max_prompt=8, max_tokens=MAX_TOKENS, seed=5
    )


class ChangingActor(ActorWorker):
    """Its weights change without a batch."""

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def change(self, by: float) -> None:
        with torch.no_grad():
            for parameter in self.engine.module.parameters():  # type: ignore[attr-defined]
                parameter.add_(by)


def make_actor(path: str, fsdp: FSDPConfig | None = None) -> ActorWorker:
    """In this process."""
    return ActorWorker(process(), actor_spec(path, fsdp))


def make_rollout(
    path: str, rank: int = 0, world_size: int = 1, actor: ActorWorker | None = None
) -> RolloutWorker:
    """With the weights of the actor, which is in the same process, or of the model directory."""
    roles = {} if actor is None else {"actor": actor}
    worker = RolloutWorker(process(rank, world_size, **roles), rollout_spec(path))
    worker.load_weights() if actor is None else worker.sync_from_actor(0)
    return worker


def make_prompts(temperature: float = TEMPERATURE, visit: int = 1, version: int = 0) -> DataProto:
    """PROMPTS, each to be sampled SAMPLES times."""
    order = SamplingSpec(n=SAMPLES, temperature=temperature, top_k=-1, top_p=1.0)
    prompts = ragged.from_rows([torch.tensor(prompt) for prompt in PROMPTS])
    return DataProto.from_dict(
        {"prompts": prompts},
        {"uid": [f"prompt {i}" for i in range(len(PROMPTS))]},
        {"sampling": order, "visit": visit, "version": version},
    )
