"""Memory of a generation engine on one device: weights, key-value cache, and one decoding step.

In: a model's shape, sequences and their lengths, the engine's settings. Out: `MemoryParts` per phase. The
native engine is modelled on the allocations of `generation/cache.py`, `groups.py`, `reordered.py` and
`sampling.py`; vLLM and SGLang take the configured share of the device.
"""

from __future__ import annotations

from dataclasses import dataclass

from hydraflow.batch_plan.layout import layers_of_stages
from hydraflow.memory.activations import RowSizes
from hydraflow.memory.report import MemoryParts, fullest
from hydraflow.memory.shape import ModelShape
from hydraflow.models.decoding_sizes import (
    COPIED,
    FILTERED_LOGITS,
    LEAST_ROWS,
    PREFILL_TOKENS,
    padded_width,
    with_room,
)

CPU_BLOCK = 128
"""Tokens in a block of vLLM's cache on a CPU."""
_SAMPLING_BYTES = 15
"""Bytes per logit that is turned into a probability, in float32: after the temperature, as a weight, and
filtered by top-k. Measured."""
_TOP_P_BYTES = 43
"""Further bytes per logit that top-p sorts, if probability is spread over many tokens. Measured."""


@dataclass(frozen=True)
class NativeEngineMemory:
    """The engine in the trainer's process: every device holds the whole model."""

    shape: ModelShape
    number: int
    """Bytes of a number."""
    top_p: bool = False
    """Whether top-p filters."""
    copies: str | None = None
    """Which weights of linear layers it copies while it decodes (`COPIED`); None: none."""

    @property
    def resting(self) -> MemoryParts:
        """Its weights; caches exist only while it samples."""
        return MemoryParts(weights=self.shape.parameters * self.number)

    def sample(self, rows: RowSizes, sequences: int) -> MemoryParts:
        """The peak with `sequences` rows of maximum length in one wave."""
        return self.resting + fullest(self._prefill(rows, sequences), self._decode(rows, sequences))

    def _prefill(self, rows: RowSizes, sequences: int) -> MemoryParts:
        """Every prompt once: its cache, and the layers' intermediates of one forward."""
        shape, width = self.shape, padded_width(rows.prompt)
        prompts = -(-sequences // rows.samples)
        together = min(prompts, max(1, PREFILL_TOKENS // width))
        inside = 2 * shape.hidden + max(3 * shape.intermediate, 3 * shape.q_width)
        mask = together * width * width
        return MemoryParts(
            kv_cache=prompts * width * kv_numbers(shape) * self.number,
            activations=(together * width * inside + mask) * self.number,
            logits=prompts * shape.vocabulary * self.number,
        )

    def _decode(self, rows: RowSizes, sequences: int) -> MemoryParts:
        """The last tokens: the cache at its longest, one layer's keys and values repeated for every query
        head, logits twice. Up to 8 MiB of keys and values that are converted to float32 are left out
        (`generation/attention.py`)."""
        shape, batch = self.shape, max(sequences, LEAST_ROWS)
        width = padded_width(rows.prompt)
        last = width + rows.response - 1
        repeated = 2 * batch * last * shape.q_width * (shape.heads > shape.kv_heads)
        filtered = min(batch, max(1, FILTERED_LOGITS // shape.vocabulary)) * shape.vocabulary
        return MemoryParts(
            weights=self._copied() * self.number,
            kv_cache=batch * cache_room(width, last) * kv_numbers(shape) * self.number,
            activations=repeated * self.number,
            logits=2 * batch * shape.vocabulary * self.number
            + filtered * (_SAMPLING_BYTES + _TOP_P_BYTES * self.top_p),
        )

    def _copied(self) -> int:
        """Numbers in copies."""
        if self.copies is None:
            return 0
        is_copied = COPIED[self.copies]
        return sum(
            count * outer * inner for count, outer, inner in self.shape.matrices if is_copied(outer, inner)
        )


@dataclass(frozen=True)
class ServingEngineMemory:
    """vLLM or SGLang on `tensor` times `pipeline` devices."""

    shape: ModelShape
    number: int
    tensor: int
    pipeline: int
    share: float
    """rollout.gpu_memory_utilization"""
    device_bytes: int | None
    shared: bool
    """Whether it sleeps, holding no memory, while training roles on the same devices work."""

    @property
    def weights(self) -> int:
        """Bytes of the weights on each device; those of the fullest pipeline stage."""
        return max(self._stages()) * self.number // self.tensor

    def _stages(self) -> list[int]:
        """Parameters of each stage. The first has the embedding, the last the output matrix, or a copy of the
        embedding that it is tied to."""
        shape, stages = self.shape, self.pipeline
        if stages == 1:
            return [shape.parameters]
        layers = [shape.sparse_layer] * shape.layers
        for dense in shape.dense_at:
            layers[dense] = shape.dense_layer
        found = [sum(layers[of.start : of.stop]) for of in layers_of_stages(shape.layers, stages)]
        found[0] += shape.embedding
        found[-1] += shape.embedding + shape.hidden
        return found

    @property
    def resting(self) -> MemoryParts:
        """Nothing if it sleeps; what it reserved if it has its own devices."""
        return MemoryParts() if self.shared else self.reserved(0)

    def reserved(self, demand: int, *, least: int = 0) -> MemoryParts:
        """Weights and cache: the device's share, or `demand` bytes of cache if its size is not known. The
        engine starts only on a device whose share has room for `least` bytes of cache."""
        if self.device_bytes is None:
            return MemoryParts(weights=self.weights, kv_cache=demand)
        room = int(self.share * self.device_bytes)
        if room < self.weights + least:
            room = int((self.weights + least) / self.share)
        return MemoryParts(weights=self.weights, kv_cache=max(0, room - self.weights))

    def sample(self, sequences: int, length: int) -> MemoryParts:
        """With `sequences` rows of `length` tokens at a time."""
        return self.reserved(sequences * self.row_bytes(length), least=self.row_bytes(length))

    def sample_on_cpu(self, max_num_seqs: int, length: int, most: int | None) -> MemoryParts:
        """On a CPU: cache for `max_num_seqs` rows in whole blocks, and one unused block, at most `most`
        bytes; and a packed copy of the weights."""
        demand = (max_num_seqs * -(-length // CPU_BLOCK) + 1) * self.row_bytes(CPU_BLOCK)
        reserved = self.reserved(demand if most is None else min(demand, most))
        return reserved + MemoryParts(weights=self.weights)

    def row_bytes(self, length: int) -> int:
        """Cache of one row on each device; key-value heads fewer than devices are held several times."""
        heads = max(self.shape.kv_width // self.tensor, self.shape.head_dim)
        layers = -(-self.shape.layers // self.pipeline)
        return 2 * layers * heads * self.number * length


def kv_numbers(shape: ModelShape) -> int:
    """Keys and values of one token in all layers."""
    return 2 * shape.layers * shape.kv_width


def cache_room(width: int, last: int) -> int:
    """Tokens for which a row's cache has room when `last` are in it, `width` of them the prompt's
    (`generation/cache.py`): room is made with the first token, and again when it is used up.

    >>> cache_room(100, 120), cache_room(100, 130)
    (126, 158)
    """
    room = with_room(width + 1)
    while room < last:
        room = with_room(room + 1)
    return room
