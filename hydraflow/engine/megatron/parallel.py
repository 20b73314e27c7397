"""Megatron-Core's groups of ranks, which are global to a process.

In: the sizes of an engine. Out: this rank's place. Order of ranks, fastest-varying first: tensor-parallel,
context-parallel (ranks that share the tokens of a line), data, pipeline stages, as in the plan's picture
(`explain/picture.py`). Left out on purpose: torch.distributed itself (`engine/process_group.py`).
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass

import torch.distributed as dist

from hydraflow.engine.config import MegatronConfig
from hydraflow.engine.process_group import deadline_of


@dataclass(frozen=True)
class Place:
    """A rank's place among all ranks of its role."""

    tensor: int
    tensor_size: int
    context: int
    context_size: int
    data: int
    data_size: int
    stage: int
    stages: int
    expert: int = 0
    """Index of its share of the experts, among which the ranks of a stage are regrouped."""
    expert_size: int = 1
    expert_tensor: int = 0
    """Index of its share of the rows and columns of each expert."""
    expert_tensor_size: int = 1

    @classmethod
    def of(cls, rank: int, ranks: int, settings: MegatronConfig) -> Place:
        """The place of any rank.

        >>> sizes = MegatronConfig(tensor_model_parallel_size=2, pipeline_model_parallel_size=2)
        >>> place = Place.of(6, 8, sizes)
        >>> place.tensor, place.data, place.stage
        (0, 1, 1)
        """
        tensor, stages = settings.tensor_model_parallel_size, settings.pipeline_model_parallel_size
        context = settings.context_parallel_size
        data = ranks // (tensor * context * stages)
        experts, slices = settings.expert_model_parallel_size, settings.expert_tensor_size
        rest, at = divmod(rank, tensor)
        rest, part = divmod(rest, context)
        stage, row = divmod(rest, data)
        of_experts = (rank // slices % experts, experts, rank % slices, slices)
        return cls(at, tensor, part, context, row, data, stage, stages, *of_experts)

    def rank(self, *, stage: int) -> int:
        """The rank at the same position of another stage."""
        return self.within + self.tensor_size * self.context_size * self.data_size * stage

    @property
    def within(self) -> int:
        """Its position within the stage."""
        return self.tensor + self.tensor_size * (self.context + self.context_size * self.data)

    def shares_with(self, other: Place, *, experts: bool) -> bool:
        """Whether both are among the ranks that together hold one copy of a stage's tensors, or of its
        experts. Ranks of different stages are compared by their positions."""
        if experts:
            together = self.expert_size * self.expert_tensor_size
            return self.within // together == other.within // together
        return self.within // self.tensor_size == other.within // other.tensor_size

    @property
    def is_last(self) -> bool:
        """Whether it is in the last stage, which computes the loss."""
        return self.stage == self.stages - 1


def start(settings: MegatronConfig) -> Place:
    """Creates the groups. Collective. A second engine in the process must have the same sizes."""
    from megatron.core import parallel_state, tensor_parallel

    place = Place.of(dist.get_rank(), dist.get_world_size(), settings)
    if not parallel_state.model_parallel_is_initialized():
        assert dist.group.WORLD is not None
        deadline = deadline_of(dist.group.WORLD)
        parallel_state.initialize_model_parallel(
            tensor_model_parallel_size=place.tensor_size,
            pipeline_model_parallel_size=place.stages,
            virtual_pipeline_model_parallel_size=settings.chunks if settings.chunks > 1 else None,
            expert_model_parallel_size=place.expert_size,
            expert_tensor_parallel_size=place.expert_tensor_size,
            context_parallel_size=place.context_size,
            create_gloo_process_groups=False,
            distributed_timeout_minutes=max(1, int(deadline.total_seconds() / 60)),
        )
        with warnings.catch_warnings():
            # it warns about sharing the CPU's random state, the only one here
            warnings.simplefilter("ignore")
            tensor_parallel.model_parallel_cuda_manual_seed(0)
    found = (
        parallel_state.get_tensor_model_parallel_world_size(),
        parallel_state.get_context_parallel_world_size(),
        parallel_state.get_pipeline_model_parallel_world_size(),
        parallel_state.get_virtual_pipeline_model_parallel_world_size() or 1,
        parallel_state.get_expert_model_parallel_world_size(),
        parallel_state.get_expert_tensor_parallel_world_size(),
    )
    experts = place.expert_size, place.expert_tensor_size
    wanted = (place.tensor_size, place.context_size, place.stages, settings.chunks, *experts)
    assert found == wanted, f"this process has Megatron groups of other sizes: {found}, not {wanted}"
    return place
