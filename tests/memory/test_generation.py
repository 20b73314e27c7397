"""Key-value caches: the formulas against the native engine's own classes, and vLLM's share by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hydraflow.generation import cache
from hydraflow.memory.activations import RowSizes
from hydraflow.memory.generation import (
    CPU_BLOCK,
    NativeEngineMemory,
    ServingEngineMemory,
    cache_room,
    kv_numbers,
)
from hydraflow.memory.shape import ModelShape

SHAPE = ModelShape("llama", 1000, 64, 3, 8, 2, 8, 128, tied=True, dense_at=range(3))


@given(st.integers(1, 70), st.integers(1, 90))
def test_the_cache_grows_as_the_engines(prompt: int, new: int) -> None:
    layer = cache.GrowingLayer()
    states = torch.zeros(1, 1, prompt, 1)
    layer.update(states, states)
    layer.reorder_cache(torch.tensor([0]))
    for _ in range(new):
        layer.update(states[:, :, :1], states[:, :, :1])
    assert layer.keys.shape[-2] == cache_room(prompt, prompt + new)


def test_native_by_hand() -> None:
    """3 layers of keys and values, 16 wide; 32 rows whose prompts of 30 are padded to 32, and 10 tokens, the
    last of which never runs."""
    assert kv_numbers(SHAPE) == 2 * 3 * 16
    rows = RowSizes(30, 10, samples=4, packed=True)
    parts = NativeEngineMemory(SHAPE, 4).sample(rows, 32)
    assert parts.weights == SHAPE.parameters * 4
    assert parts.kv_cache == 32 * (33 + 16) * 96 * 4
    assert parts.logits == 2 * 32 * 1000 * 4 + 32 * 1000 * 15
    filtered = NativeEngineMemory(SHAPE, 4, top_p=True).sample(rows, 32)
    assert filtered.logits == 2 * 32 * 1000 * 4 + 32 * 1000 * (15 + 43)
    assert parts.activations == 2 * 32 * 41 * 64 * 4  # one layer's keys and values, for every query head


def test_copies_of_weights_by_hand() -> None:
    """3 layers of attention and MLP, and the head; in float32 no narrow matrix and no very large one by
    oneDNN, by MKL none whose inner dimension it would split otherwise."""
    rows = RowSizes(30, 10, samples=4, packed=True)

    def copied(shape: ModelShape, number: int, by_mkl: bool = False) -> int:
        copies = "all" if number == 2 else "MKL's" if by_mkl else "oneDNN's"
        both = [NativeEngineMemory(shape, number, copies=kept) for kept in (copies, None)]
        with_copies, without = [engine.sample(rows, 32).weights for engine in both]
        return with_copies - without

    layers = 3 * (2 * 64 * (64 + 16) + 3 * 64 * 128)
    assert copied(SHAPE, 2) == 2 * (layers + 1000 * 64)
    assert copied(SHAPE, 4) == 4 * 3 * 64 * 128, "the matrices with an inner dimension of 128"
    wide = replace(SHAPE, hidden=128, vocabulary=2**18)
    layers = 3 * (128 * (64 + 2 * 16) + 3 * 128 * 128)  # the output of attention is 64 wide
    assert copied(wide, 4) == 4 * (layers + 2**25)
    assert copied(replace(wide, vocabulary=2**18 + 1), 4) == 4 * layers
    assert copied(SHAPE, 4, by_mkl=True) == 2 * copied(SHAPE, 2)
    split = replace(SHAPE, intermediate=769)
    assert copied(split, 4, by_mkl=True) == 4 * (3 * (2 * 64 * (64 + 16) + 2 * 64 * 769) + 1000 * 64)
    assert copied(replace(SHAPE, intermediate=1152), 4, by_mkl=True) == 2 * copied(
        replace(SHAPE, intermediate=1152), 2
    )
    experts = dict(experts=4, experts_per_token=2, expert_intermediate=32, dense_at=())
    assert copied(replace(SHAPE, **experts), 2) == 2 * (3 * 2 * 64 * (64 + 16) + 1000 * 64)


def test_few_rows_are_repeated() -> None:
    rows = RowSizes(8, 8, samples=1, packed=True)
    assert (
        NativeEngineMemory(SHAPE, 2).sample(rows, 3).kv_cache
        == NativeEngineMemory(SHAPE, 2).sample(rows, 16).kv_cache
    )


def test_vllm_takes_its_share() -> None:
    engine = ServingEngineMemory(SHAPE, 2, tensor=2, pipeline=1, share=0.5, device_bytes=10**9, shared=True)
    parts = engine.sample(4, 100)
    assert parts.weights == SHAPE.parameters
    assert parts.total == 500_000_000
    assert engine.resting.total == 0
    alone = ServingEngineMemory(SHAPE, 2, tensor=2, pipeline=1, share=0.5, device_bytes=10**9, shared=False)
    assert alone.resting == parts


def test_the_fullest_stage_is_planned() -> None:
    """Of three layers, the first of two stages has two and the embedding; the last has one, the output matrix
    and the last norm."""
    layer, ends = SHAPE.dense_layer, SHAPE.embedding
    assert SHAPE.layers == 3
    stages = [2 * layer + ends, layer + ends + SHAPE.hidden]
    engine = ServingEngineMemory(SHAPE, 2, tensor=2, pipeline=2, share=0.5, device_bytes=10**9, shared=True)
    assert engine.weights == max(stages)
    three = ServingEngineMemory(SHAPE, 2, tensor=1, pipeline=3, share=0.5, device_bytes=10**9, shared=True)
    assert three.weights == 2 * (layer + ends + SHAPE.hidden)
    assert three.row_bytes(10) == engine.row_bytes(10)  # one layer whole, or two layers' halves
    mixed = replace(SHAPE, experts=8, expert_intermediate=64, dense_at=(0, 1))
    divided = ServingEngineMemory(mixed, 2, tensor=1, pipeline=2, share=0.5, device_bytes=10**9, shared=True)
    last = mixed.sparse_layer + mixed.embedding + mixed.hidden
    assert mixed.sparse_layer > 2 * mixed.dense_layer and divided.weights == last * 2


def test_vllms_cache_on_a_cpu_is_whole_blocks_within_its_share() -> None:
    engine = ServingEngineMemory(SHAPE, 4, tensor=1, pipeline=1, share=0.5, device_bytes=None, shared=True)
    blocks = 10 * 2 + 1  # two for a row of 200 tokens, one is never used
    whole = blocks * CPU_BLOCK * kv_numbers(SHAPE) * 4
    assert engine.sample_on_cpu(10, 200, None).kv_cache == whole
    assert engine.sample_on_cpu(10, 200, whole + 1).kv_cache == whole
    assert engine.sample_on_cpu(10, 200, 1000).kv_cache == 1000
    assert engine.sample_on_cpu(10, 200, 1000).weights == 2 * SHAPE.parameters * 4  # and a packed copy


@pytest.mark.parametrize(("tensor", "width"), [(1, 16), (2, 8), (4, 8)])
def test_vllm_of_unknown_devices_needs_what_its_rows_need(tensor: int, width: int) -> None:
    """More devices than key-value heads hold heads twice."""
    engine = ServingEngineMemory(
        SHAPE, 2, tensor=tensor, pipeline=1, share=0.5, device_bytes=None, shared=True
    )
    assert engine.sample(4, 100).kv_cache == 4 * 100 * 2 * 3 * width * 2
