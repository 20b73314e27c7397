"""Memory of one device with Megatron-Core, which holds a share of the layers, of each matrix, of the experts.

In: a model's shape, a `Layout`, a micro-batch. Out: `MemoryParts` per phase, for the fullest pipeline stage.
Weights in the compute type, gradients in float32, and 12 bytes of optimizer state per 16-bit weight (a
float32 copy and two moments), which the distributed optimizer divides over data ranks
(docs/source/api-guide/dist_optimizer.md); activations divided as in Korthikanti et al. 2022
(https://arxiv.org/abs/2205.05198). `scripts/bench/memory.py` measures dense models on CPUs, and
`tests/engine/test_megatron_offload.py` mixtures; the activations of experts follow Megatron-Core's own
formula.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from hydraflow.batch_plan.layout import Layout
from hydraflow.batch_plan.stages import layers_of_parts
from hydraflow.engine.config import MegatronConfig
from hydraflow.memory.activations import LayerCosts, MicroBatchTokens, around_layers, layer_costs
from hydraflow.memory.report import MemoryParts, fullest
from hydraflow.memory.shape import ModelShape
from hydraflow.models.chunks import head_chunk

_MLP = 5
"""Intermediates of Megatron-Core's unfused gated MLP, saved or not: gate and up, which are one tensor, the
activation, a copy of up, to which it adds glu_linear_offset=0, and their product."""


@dataclass(frozen=True)
class MegatronModelMemory:
    """Memory of a model on one device of Megatron-Core, pass by pass."""

    shape: ModelShape
    layout: Layout
    settings: MegatronConfig
    number: int
    """Bytes of a number in the forward and backward pass."""
    trained: bool
    checkpointing: bool
    policy: bool
    """Whether the output is the vocabulary; a critic has one value."""
    host_copies: bool
    """Whether collectives make one more copy (gloo, for tensors in host memory)."""

    @property
    def held(self) -> MemoryParts:
        """During an update, outside the optimizer step: weights, gradients, optimizer state."""
        weights = MemoryParts(weights=(self._dense + self._experts) * self.number)
        if not self.trained:
            return weights
        gradients = MemoryParts(gradients=4 * (self._dense + self._experts))
        on_host = self.settings.optimizer_offload
        return weights + gradients + MemoryParts(**{"host" if on_host else "optimizer": self._state})

    @property
    def resting(self) -> MemoryParts:
        """While other roles work: what is not offloaded. Gradients are freed."""
        held = self._without_gradients
        if not self.settings.param_offload:
            return held
        return replace(held, weights=0, host=held.host + held.weights)

    def forward(self, tokens: MicroBatchTokens) -> MemoryParts:
        """A forward-only pass; gradient buffers of a trained role count unless they are freed."""
        costs = self._layer_costs(tokens)
        activations = around_layers(self.shape, tokens, self.number) // self._outside + costs.forward
        passing = MemoryParts(activations=activations, logits=self._logits(tokens, copies=1))
        return self._without_gradients + passing

    def update(
        self, tokens: MicroBatchTokens, micro_batches: int, *, trained_entropy: bool = False
    ) -> MemoryParts:
        """An upper bound: the first stage's activations, as it has the most micro-batches in flight, and the
        last stage's logits. The memory of a trained entropy is left out."""
        costs = self._layer_costs(tokens)
        stages, parts = self.layout.pipeline, self.layout.virtual_pipeline
        # an interleaved schedule fills up to as many micro-batches as stages
        layers, in_flight = self._stage_layers, stages if parts > 1 else min(stages, micro_batches)
        stored = layers * (costs.entry if self.checkpointing else costs.saved) * in_flight
        if parts > 1:
            # it starts more forward passes before the first backward pass
            stored += stored * (stages - 1) // (stages * parts)
        working = (costs.saved if self.checkpointing else 0) + costs.backward
        around = around_layers(self.shape, tokens, self.number) // self._outside
        passes = MemoryParts(activations=stored + working + around, logits=self._logits(tokens, copies=2))
        step = MemoryParts(optimizer=self._state if self.settings.optimizer_offload else 0)
        # gradients are reduced over data ranks after the last pass
        is_copied = self.host_copies and self._data_ranks()[0] > 1
        reducing = MemoryParts(gathered=4 * (self._dense + self._experts) * is_copied)
        return self.held + fullest(passes, reducing, step)

    def _layer_costs(self, tokens: MicroBatchTokens) -> LayerCosts:
        shared = {"tensor": self.layout.tensor, "outside": self._outside}
        return layer_costs(self.shape, tokens, self.number, **shared, mlp_saved=_MLP, mlp_peak=_MLP)

    @property
    def _without_gradients(self) -> MemoryParts:
        return replace(self.held, gradients=0) if self.settings.grad_offload else self.held

    @property
    def _state(self) -> int:
        """Moments, and float32 weights beside 16-bit ones."""
        shards = self._dense + self._experts
        if self.settings.use_distributed_optimizer:
            data, expert_data = self._data_ranks()
            shards = -(-self._dense // data) + -(-self._experts // expert_data)
        return (12 if self.number == 2 else 8) * shards

    def sent(self) -> MemoryParts:
        """A full tensor that is sent to the generation engine, and the parts that it is gathered from."""
        return MemoryParts(weight_sync=2 * self.shape.largest_tensor * self.number)

    @property
    def _outside(self) -> int:
        """Devices that share what is between matrices (norms and residuals)."""
        return self.layout.tensor if self.settings.sequence_parallel else 1

    @property
    def _stage_layers(self) -> int:
        """Layers of the fullest stage."""
        if self.settings.gives_layers:
            return max(map(sum, layers_of_parts(self.shape.layers, self.settings)))
        return -(-self.shape.layers // self.layout.pipeline)

    @property
    def _dense(self) -> int:
        """Parameters other than routed experts, on the fullest stage."""
        shape, tensor = self.shape, self.layout.tensor
        matrices = shape.attention + (shape.shared_expert if shape.experts else shape.dense_mlp)
        if shape.experts and shape.dense_layers:
            matrices = max(matrices, shape.attention + shape.dense_mlp)
        layer = -(-matrices // tensor) + 2 * shape.hidden + shape.hidden * shape.experts
        ends = 2 if self.layout.pipeline == 1 and self.policy and not shape.tied else 1
        return self._stage_layers * layer + ends * -(-shape.embedding // tensor) + shape.hidden

    @property
    def _experts(self) -> int:
        shape, layout = self.shape, self.layout
        layers = min(self._stage_layers, shape.sparse_layers)
        return layers * -(-shape.experts // layout.expert) * -(-shape.expert // layout.expert_tensor)

    def _data_ranks(self) -> tuple[int, int]:
        """Number of replicas of dense parameters, and of experts."""
        devices, layout = len(self.layout.devices), self.layout
        per_expert = layout.expert_tensor * layout.expert * layout.pipeline
        return max(1, devices // (layout.tensor * layout.pipeline)), max(1, devices // per_expert)

    def _logits(self, tokens: MicroBatchTokens, *, copies: int) -> int:
        """A chunk's logits in the compute type and `copies` in float32, of a share of the vocabulary; with
        a backward pass the output matrix's gradient, too."""
        if not self.policy:
            return 4 * tokens.asked
        width = -(-self.shape.vocabulary // self.layout.tensor)
        chunk = min(tokens.asked, head_chunk(self.settings.head_chunk_tokens, width, self.number))
        gradient = self.number * self.shape.embedding // self.layout.tensor if copies > 1 else 0
        return chunk * (self.number + 4 * copies) * width + gradient
