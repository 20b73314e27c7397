"""Memory of one rank of the FSDP2 engine at the peak of each pass.

In: a model's shape, how it is sharded, a micro-batch. Out: `MemoryParts` per phase. Follows `engine/fsdp/`
and torch's fully_shard: units are the layers (those below `min_num_params` belong to the root) and the root
(embedding, output matrix, last norm), which stays gathered after its first use. A rank that accumulates
gradients holds them unsharded until the last micro-batch. Left out on purpose: index tensors and columns of
the batch, which are small beside the model.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from hydraflow.engine.config import WINDOW_BYTES, FSDPConfig
from hydraflow.memory.activations import (
    LayerCosts,
    MicroBatchTokens,
    around_layers,
    head_backward,
    head_forward,
    layer_costs,
)
from hydraflow.memory.limits import BytesPerNumber
from hydraflow.memory.report import MemoryParts, fullest
from hydraflow.memory.shape import ModelShape


@dataclass(frozen=True)
class FSDPUnits:
    """Parameters by FSDP unit, and how many of them are trained."""

    root: int
    layer: int
    """The largest layer that is a unit of its own; 0: all belong to the root."""
    every: int
    """The whole model."""
    trained_root: int
    trained_layer: int
    trained: int
    embedding: int
    """Trained parameters of the embedding; 0: it is frozen."""
    head: int
    """Trained parameters of an untied output matrix; 0: tied or frozen."""


@dataclass(frozen=True)
class FSDPModelMemory:
    """Memory of a model on one rank of the FSDP2 engine, pass by pass."""

    shape: ModelShape
    units: FSDPUnits
    types: BytesPerNumber
    ranks: int
    """Ranks among which a copy of the model is divided."""
    device_type: str
    """On a CPU, the other ranks' parts of gradients arrive in a buffer before they are summed, and the head
    computes a few tokens at a time."""
    settings: FSDPConfig
    """Without offloading where it has no effect."""
    checkpointing: bool
    policy: bool
    """Whether the output is the vocabulary; a critic has one value."""

    @property
    def held(self) -> MemoryParts:
        """While the role works: shards of weights and optimizer state, and what ranks exchange tensors in."""
        weights, moments = self._share(self.units.every), self._share(2 * self.units.trained)
        window = WINDOW_BYTES if self.device_type == "cpu" and self.ranks > 1 else 0
        if self.settings.offload_policy:
            return MemoryParts(gathered=window, host=weights + moments + self._share(self.units.trained))
        if self.settings.optimizer_offload:
            return MemoryParts(weights=weights, gathered=window, host=moments)
        return MemoryParts(weights=weights, gathered=window, optimizer=moments)

    @property
    def resting(self) -> MemoryParts:
        """Held while other roles use the device: with offloading, the weights are in host memory."""
        held = self.held
        if not self.settings.param_offload:
            return held
        return replace(held, weights=0, host=held.host + held.weights)

    def forward(self, tokens: MicroBatchTokens) -> MemoryParts:
        """A forward-only pass: the larger of a layer's and the head's computation."""
        around, logits = self._around(tokens), self._head(tokens)
        layer = MemoryParts(gathered=self._gathered(3), activations=around + self._costs(tokens).forward)
        head = MemoryParts(gathered=self._gathered(1), activations=around, logits=logits)
        return self.held + fullest(self._arriving(), layer, head)

    def update(
        self, tokens: MicroBatchTokens, micro_batches: int, *, trained_entropy: bool = False
    ) -> MemoryParts:
        """The fullest moment of an optimizer step of `micro_batches` micro-batches."""
        accumulates = micro_batches > 1
        moments = [
            *self._head_moments(tokens, accumulates, trained_entropy=trained_entropy),
            *self._layer_moments(tokens, accumulates),
            *self._last_moments(tokens, accumulates),
        ]
        trained, settings = self.units.trained, self.settings
        moved = settings.optimizer_offload and not settings.offload_policy
        step = MemoryParts(
            gradients=0 if settings.offload_policy else self._share(trained),
            optimizer=self._share(2 * trained) if moved else 0,
        )
        return self.held + fullest(step, *moments)

    def _head_moments(
        self, tokens: MicroBatchTokens, accumulates: bool, *, trained_entropy: bool
    ) -> list[MemoryParts]:
        """The head's forward and backward pass, with the activations of all layers."""
        gradients = self.types.reduced * self.units.trained if accumulates else 0
        full = MemoryParts(activations=self._stored(tokens) + self._around(tokens), gradients=gradients)
        arriving = self._arriving() + MemoryParts(gradients=gradients)
        forward = full + MemoryParts(gathered=self._gathered(1), logits=self._head(tokens))
        if not self.policy:
            return [arriving, forward]
        logits = head_backward(
            self.shape.vocabulary,
            tokens.asked,
            self.settings.head_chunk_tokens,
            self.types.compute,
            trained_entropy=trained_entropy,
            post=self.shape.logit_copies,
            device_type=self.device_type,
        )
        backward = MemoryParts(gradients=self._output_gradient, gathered=self._gathered(2), logits=logits)
        return [arriving, forward, full + backward]

    def _layer_moments(self, tokens: MicroBatchTokens, accumulates: bool) -> list[MemoryParts]:
        """The backward pass at its first layer, where most activations are left, and at its last, where most
        gradients are summed. The layer, the next one being gathered, and the buffers in which the previous
        layer's gradients arrive and are summed exist at the same time."""
        units, costs, waiting = self.units, self._costs(tokens), self._output_gradient
        working = self._around(tokens) + (costs.saved if self.checkpointing else 0) + costs.backward
        summing = self.types.reduced * units.trained_layer
        gathered = self._gathered(3 if self.device_type == "cpu" else 2) + summing
        activations = self._stored(tokens) + working
        if accumulates:
            # a layer's unsharded gradients are freed once they have been summed over ranks
            gradients = self.types.reduced * (units.trained - units.trained_layer)
            gradients += self._share(units.trained_layer) + (waiting if self.shape.tied else 0)
            return [MemoryParts(gradients=gradients, gathered=gathered, activations=activations)]
        gradients = waiting + self.types.compute * units.trained_layer
        first = MemoryParts(gradients=gradients, gathered=gathered, activations=activations)
        last = MemoryParts(
            gradients=gradients + self._share(units.trained - units.trained_root),
            gathered=self._gathered(1) + summing,
            activations=working + (costs.entry if self.checkpointing else costs.saved),
        )
        return [first, last]

    def _last_moments(self, tokens: MicroBatchTokens, accumulates: bool) -> list[MemoryParts]:
        """The end of the backward pass: the embedding's gradient is made, then the root's are summed."""
        units, types = self.units, self.types
        if not units.trained_root:
            return []
        summed, buffer = self._share(units.trained - units.trained_root), types.reduced * units.trained_root
        # a tied matrix gets two gradients, and their sum is a third tensor
        tied = 2 * units.embedding if self.shape.tied and self.policy else 0
        fresh = types.compute * (tied + (units.embedding if accumulates else units.trained_root))
        making = MemoryParts(
            gradients=summed + fresh + (buffer if accumulates else 0),
            gathered=types.compute * units.root + types.reduced * units.trained_layer,
            activations=self._around(tokens),
        )
        number = types.reduced if accumulates else types.compute
        copied = MemoryParts(gradients=summed + number * units.trained_root, gathered=buffer)
        # a loop variable in torch still holds the last gradient (an untied output matrix's) during the sum
        output = number * units.head + types.reduced * -(-units.trained_root // self.ranks)
        # where ranks cannot share memory, the parts of the others arrive in a second buffer
        copies = 2 if self.device_type == "cpu" and self.ranks > 1 else 1
        return [making, copied, MemoryParts(gradients=summed + output, gathered=buffer * copies)]

    def _arriving(self) -> MemoryParts:
        """The gathered root before it is split into tensors."""
        return MemoryParts(gathered=self.types.compute * self.units.root * min(2, self.ranks))

    def _gathered(self, layers: int) -> int:
        """Bytes of the root and of `layers` layers: in use, arriving, and the previous one not freed yet."""
        units, number = self.units, self.types.compute
        copies = min(layers, 1) if self.ranks == 1 else layers
        if not self.settings.reshard_after_forward:
            return number * (units.every + max(0, copies - 1) * units.layer)
        return number * (units.root + copies * units.layer)

    def _stored(self, tokens: MicroBatchTokens) -> int:
        """What all layers keep for the backward pass."""
        costs = self._costs(tokens)
        return self.shape.layers * (costs.entry if self.checkpointing else costs.saved)

    def _head(self, tokens: MicroBatchTokens) -> int:
        if not self.policy:
            return 4 * tokens.asked
        return head_forward(
            self.shape.vocabulary,
            tokens.asked,
            self.settings.head_chunk_tokens,
            self.types.compute,
            post=self.shape.logit_copies,
            device_type=self.device_type,
        )

    def _costs(self, tokens: MicroBatchTokens) -> LayerCosts:
        return layer_costs(self.shape, tokens, self.types.compute)

    def _around(self, tokens: MicroBatchTokens) -> int:
        return around_layers(self.shape, tokens, self.types.compute)

    def _share(self, numbers: int) -> int:
        """Bytes of a rank's shard."""
        return self.types.kept * -(-numbers // self.ranks)

    @property
    def _output_gradient(self) -> int:
        """Bytes of the output matrix's gradient, unsharded: it waits for the embedding's (tied), or for the
        end of the pass."""
        tied = self.units.embedding if self.shape.tied and self.policy else 0
        return self.types.compute * (self.units.head + tied)


def units_of(shape: ModelShape, *, policy: bool, least: int, trained: bool, adapters: int) -> FSDPUnits:
    """The model cut into units.

    `least`: see `WrapPolicyConfig`. `adapters`: parameters of low-rank adapters in one layer; 0: no
    adapters.

    >>> shape = ModelShape("llama", 100, 8, 2, 2, 2, 4, 16, tied=True, dense_at=range(2))
    >>> units_of(shape, policy=True, least=0, trained=True, adapters=0).root == 100 * 8 + 8
    True
    """
    kinds = [(shape.dense_layer, shape.dense_layers), (shape.sparse_layer, shape.sparse_layers)]
    layers = [(size + adapters, count) for size, count in kinds if count and size + adapters >= least]
    every = (shape.parameters if policy else shape.value_parameters) + adapters * shape.layers
    in_layers = sum(size * count for size, count in layers)
    layer = max((size for size, _ in layers), default=0)
    root = every - in_layers
    if adapters:
        apart = sum(count for _, count in layers)
        in_root, in_layer = adapters * (shape.layers - apart), adapters if apart else 0
        return FSDPUnits(root, layer, every, in_root, in_layer, adapters * shape.layers, 0, 0)
    if not trained:
        return FSDPUnits(root, layer, every, 0, 0, 0, 0, 0)
    own_head = 0 if policy and shape.tied else shape.embedding if policy else shape.hidden
    return FSDPUnits(root, layer, every, root, layer, every, shape.embedding, own_head)


def adapter_numbers(shape: ModelShape, rank: int, targets: object) -> int:
    """Parameters of one layer's adapters: rank · (inputs + outputs) of each adapted matrix. The output matrix
    has no adapter."""
    h, q, kv, wide = shape.hidden, shape.q_width, shape.kv_width, shape.intermediate
    sizes = {"q_proj": h + q, "k_proj": h + kv, "v_proj": h + kv, "o_proj": h + q}
    if shape.dense_layers:
        sizes |= {"gate_proj": h + wide, "up_proj": h + wide, "down_proj": h + wide}
    named = list(targets) if isinstance(targets, list | tuple) else []
    chosen = sizes if isinstance(targets, str) else [str(name).rsplit(".", 1)[-1] for name in named]
    return rank * sum(sizes.get(name, 0) for name in chosen)
