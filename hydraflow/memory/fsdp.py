"""Memory of one rank of the FSDP2 engine at the peak of each pass.

In: a model's shape, how it is sharded, a micro-batch. Out: `MemoryParts` per phase. Follows `engine/fsdp/`
and torch's fully_shard: units are the layers (those below `min_num_params` belong to the root) and the root
(embedding, output matrix, last norm), which stays gathered from its first use on. A rank that accumulates
gradients holds them unsharded until the last micro-batch. Left out on purpose: index tensors and columns of
the batch, which are small beside the model.
"""

from __future__ import annotations

from dataclasses import dataclass

from hydraflow.memory.activations import (
    MicroBatchTokens,
    around_layers,
    head_backward,
    head_forward,
    layer_costs,
)
from hydraflow.memory.limits import BytesPerNumber
from hydraflow.memory.report import MemoryParts
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
    """Trained numbers of the embedding; 0: it is frozen."""
    head: int
    """Trained numbers of an output matrix of its own; 0: tied or frozen."""


@dataclass(frozen=True)
class FSDPModelMemory:
    """Memory of a model on one rank of the FSDP2 engine, pass by pass."""

    shape: ModelShape
    units: FSDPUnits
    types: BytesPerNumber
    ranks: int
    """Ranks among which a copy of the model is divided."""
    host_copies: bool
    """Collectives of host tensors copy once more inside (gloo)."""
    reshard: bool
    """fsdp_config.reshard_after_forward"""
    param_offload: bool
    optimizer_offload: bool
    checkpointing: bool
    chunk: int
    """fsdp_config.head_chunk_tokens"""
    policy: bool
    """Has a vocabulary as output; a critic has one number."""

    @property
    def resting(self) -> MemoryParts:
        """Shards of weights and optimizer state."""
        weights, moments = (
            self._share(self.units.every, self.types.kept),
            self._share(2 * self.units.trained, self.types.kept),
        )
        if self.param_offload:
            return MemoryParts(host=weights + moments + self._share(self.units.trained, self.types.kept))
        if self.optimizer_offload:
            return MemoryParts(weights=weights, host=moments)
        return MemoryParts(weights=weights, optimizer=moments)

    def forward(self, tokens: MicroBatchTokens, *, entropy: bool) -> MemoryParts:
        """A forward-only pass: the larger of a layer's and the head's computation."""
        costs = layer_costs(self.shape, tokens, self.types.compute)
        around = around_layers(self.shape, tokens, self.types.compute)
        layer = MemoryParts(gathered=self._gathered(3), activations=around + costs.forward)
        head = MemoryParts(
            gathered=self._gathered(1), activations=around, logits=self._head(tokens, entropy=entropy)
        )
        return self.resting + _fullest(self._arriving(), layer, head)

    def update(
        self, tokens: MicroBatchTokens, *, accumulates: bool, trained_entropy: bool, entropy: bool
    ) -> MemoryParts:
        """The fullest moment of an optimizer step with one or with several micro-batches."""
        moments = [
            *self._head_moments(
                tokens, accumulates=accumulates, trained_entropy=trained_entropy, entropy=entropy
            ),
            *self._layer_moments(tokens, accumulates=accumulates),
            *self._last_moments(tokens, accumulates=accumulates),
        ]
        offloaded = self.optimizer_offload and not self.param_offload
        step = MemoryParts(
            gradients=self._sharded_gradients,
            optimizer=self._share(2 * self.units.trained, self.types.kept) if offloaded else 0,
        )
        return self.resting + _fullest(step, *moments)

    def _head_moments(
        self, tokens: MicroBatchTokens, *, accumulates: bool, trained_entropy: bool, entropy: bool
    ) -> list[MemoryParts]:
        """Every layer's activations are there, and logits on top."""
        activations = self._stored(tokens) + around_layers(self.shape, tokens, self.types.compute)
        gradients = self._unsharded(self.units.trained) if accumulates else 0
        logits = self._head(tokens, entropy=entropy)
        forward = MemoryParts(
            gradients=gradients, gathered=self._gathered(1), activations=activations, logits=logits
        )
        arriving = self._arriving() + MemoryParts(gradients=gradients)
        if not self.policy:
            return [arriving, forward]
        logits = head_backward(
            self.shape.vocabulary,
            tokens.asked,
            self.chunk,
            self.types.compute,
            entropy=entropy,
            trained_entropy=trained_entropy,
        )
        backward = MemoryParts(
            gradients=gradients + self._output_gradient,
            gathered=self._gathered(2),
            activations=activations,
            logits=logits,
        )
        return [arriving, forward, backward]

    def _layer_moments(self, tokens: MicroBatchTokens, *, accumulates: bool) -> list[MemoryParts]:
        """The backward pass at its first layer, where most activations are left, and at its last, where most
        gradients are summed.

        The layer, the next one on its way, and the buffer in which the previous layer's gradients are summed
        exist together.
        """
        units, costs = self.units, layer_costs(self.shape, tokens, self.types.compute)
        around = around_layers(self.shape, tokens, self.types.compute)
        working = (costs.saved if self.checkpointing else 0) + costs.backward
        gathered = self._gathered(3 if self.host_copies else 2)
        summing = self.types.reduced * units.trained_layer
        waiting = self._output_gradient
        if accumulates:
            # a layer's unsharded gradients go when they have been summed
            gradients = self._unsharded(units.trained - units.trained_layer) + (
                waiting if self.shape.tied else 0
            )
            gradients += self._share(units.trained_layer, self.types.kept)
            return [
                MemoryParts(
                    gradients=gradients,
                    gathered=gathered + summing,
                    activations=around + self._stored(tokens) + working,
                )
            ]
        gradients = waiting + self.types.compute * units.trained_layer
        first = MemoryParts(
            gradients=gradients,
            gathered=gathered + summing,
            activations=around + self._stored(tokens) + working,
        )
        summed = self._share(units.trained - units.trained_root, self.types.kept)
        left = costs.entry if self.checkpointing else costs.saved
        last = MemoryParts(
            gradients=gradients + summed,
            gathered=self._gathered(1) + summing,
            activations=around + left + working,
        )
        return [first, last]

    def _last_moments(self, tokens: MicroBatchTokens, *, accumulates: bool) -> list[MemoryParts]:
        """The gradient of the embedding is made, then the root's gradients are summed over ranks."""
        units, types = self.units, self.types
        if not units.trained_root:
            return []
        summed = self._share(units.trained - units.trained_root, types.kept)
        held = self._unsharded(units.trained_root) if accumulates else 0
        # a tied matrix gets two gradients, and their sum is a third tensor
        tied = self.shape.tied and self.policy
        fresh = types.compute * (
            units.embedding * (3 if tied else 1)
            if accumulates
            else units.trained_root + 2 * tied * units.embedding
        )
        around = around_layers(self.shape, tokens, types.compute)
        making = MemoryParts(
            gradients=summed + held + fresh,
            gathered=types.compute * units.root + types.reduced * units.trained_layer,
            activations=around,
        )
        buffer = types.reduced * units.trained_root
        unsharded = held or types.compute * units.trained_root
        copied = MemoryParts(gradients=summed + unsharded, gathered=buffer)
        # torch's loop over the gradients still names the last one while they are summed: an output matrix of
        # its own
        kept = (types.reduced if accumulates else types.compute) * units.head
        output = self._share(units.trained_root, types.reduced)
        reduced = MemoryParts(gradients=summed + kept + output, gathered=buffer * (2 if self._copies else 1))
        return [making, copied, reduced]

    def _arriving(self) -> MemoryParts:
        """The root as it arrives, before it is taken apart into tensors."""
        return MemoryParts(gathered=self.types.compute * self.units.root * min(2, self.ranks))

    def _gathered(self, layers: int) -> int:
        """The root and that many copies of a layer: in use, arriving, and the previous one not freed yet."""
        units, number = self.units, self.types.compute
        copies = min(layers, 1) if self.ranks == 1 else layers
        if not self.reshard:
            return number * (units.every + max(0, copies - 1) * units.layer)
        return number * (units.root + copies * units.layer)

    def _stored(self, tokens: MicroBatchTokens) -> int:
        """What all layers keep for the backward pass."""
        costs = layer_costs(self.shape, tokens, self.types.compute)
        return self.shape.layers * (costs.entry if self.checkpointing else costs.saved)

    def _head(self, tokens: MicroBatchTokens, *, entropy: bool) -> int:
        if not self.policy:
            return 4 * tokens.asked
        return head_forward(
            self.shape.vocabulary, tokens.asked, self.chunk, self.types.compute, entropy=entropy
        )

    def _unsharded(self, numbers: int) -> int:
        """Accumulated gradients, in the type in which they will be summed."""
        return self.types.reduced * numbers

    def _share(self, numbers: int, number: int) -> int:
        return number * -(-numbers // self.ranks)

    @property
    def _sharded_gradients(self) -> int:
        return 0 if self.param_offload else self._share(self.units.trained, self.types.kept)

    @property
    def _output_gradient(self) -> int:
        """Of the output matrix, unsharded: it waits for the embedding's (tied), or for the end of the
        backward pass."""
        tied = self.units.embedding if self.shape.tied and self.policy else 0
        return self.types.compute * (self.units.head + tied)

    @property
    def _copies(self) -> bool:
        return self.host_copies and self.ranks > 1


def units_of(shape: ModelShape, *, policy: bool, least: int, trained: bool, adapters: int) -> FSDPUnits:
    """The model cut into units.

    `least`: fsdp_config.wrap_policy.min_num_params. `adapters`: trained numbers of low-rank adapters in one
    layer; 0: without.

    >>> shape = ModelShape("llama", 100, 8, 2, 2, 2, 4, 16, tied=True, dense_layers=2)
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
        return FSDPUnits(
            root,
            layer,
            every,
            adapters * (shape.layers - apart),
            adapters if apart else 0,
            adapters * shape.layers,
            0,
            0,
        )
    if not trained:
        return FSDPUnits(root, layer, every, 0, 0, 0, 0, 0)
    own_head = 0 if policy and shape.tied else shape.embedding if policy else shape.hidden
    return FSDPUnits(root, layer, every, root, layer, every, shape.embedding, own_head)


def adapter_numbers(shape: ModelShape, rank: int, targets: object) -> int:
    """Numbers of one layer's adapters: rank · (inputs + outputs) of each matrix that gets one. The output
    matrix gets none."""
    h, q, kv, wide = shape.hidden, shape.q_width, shape.kv_width, shape.intermediate
    sizes = {"q_proj": h + q, "k_proj": h + kv, "v_proj": h + kv, "o_proj": h + q}
    if shape.dense_layers:
        sizes |= {"gate_proj": h + wide, "up_proj": h + wide, "down_proj": h + wide}
    chosen = (
        sizes
        if targets == "all-linear" or isinstance(targets, str)
        else [str(name).rsplit(".", 1)[-1] for name in _listed(targets)]
    )
    return rank * sum(sizes.get(name, 0) for name in chosen)


def _listed(targets: object) -> list[object]:
    return list(targets) if isinstance(targets, (list, tuple)) else []


def _fullest(*moments: MemoryParts) -> MemoryParts:
    return max(moments, key=lambda parts: parts.total)
