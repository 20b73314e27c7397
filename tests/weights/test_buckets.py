"""Weights in buckets and back: bit by bit, of bounded size, and with a checksum that notices any change."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch

from hydraflow.weights.buckets import Bucket, Cut, FlatBucket, NamedTensor, buckets, cut

NAMES = ["embed", "scale", "matrix", "transposed", "nothing", "counts"]


def model() -> dict[str, torch.Tensor]:
    draw = torch.Generator().manual_seed(0)
    return {
        "embed": torch.randn(64, 8, generator=draw),
        "scale": torch.tensor(float("nan")),
        "matrix": torch.randn(8, 8, generator=draw),
        "transposed": torch.randn(8, 4, generator=draw).T,
        "nothing": torch.empty(0, 3),
        "counts": torch.arange(5),
    }


def made(max_bytes: int = 600, dtype: torch.dtype = torch.float32) -> list[Bucket]:
    return [one for one in buckets(model().items(), Cut(7, max_bytes, dtype, checked=True)) if one]


def made_flat(max_bytes: int) -> list[FlatBucket]:
    parts = cut(model().items(), Cut(7, max_bytes, torch.float32, checked=True))
    return [FlatBucket.of(header, tensors) for header, tensors in parts if header]


def back(some: Sequence[Bucket | FlatBucket]) -> dict[str, torch.Tensor]:
    return dict(pair for bucket in some for pair in bucket.tensors())


def bits(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


@pytest.mark.parametrize("make", [made, made_flat])
@pytest.mark.parametrize("max_bytes", [1, 600, 10**6])
def test_every_bit_comes_back_in_order(
    max_bytes: int, make: Callable[[int], Sequence[Bucket | FlatBucket]]
) -> None:
    some, given = make(max_bytes), model()
    found = back(some)
    assert list(found) == NAMES
    for name, tensor in given.items():
        assert found[name].shape == tensor.shape and bits(found[name]) == bits(tensor), name
    assert [bucket.header.number for bucket in some] == list(range(len(some)))
    assert [bucket.header.last for bucket in some] == [False] * (len(some) - 1) + [True]
    assert {bucket.header.version for bucket in some} == {7}


def test_a_bucket_holds_no_more_than_it_may_but_for_a_tensor_that_is_larger() -> None:
    sizes = [[entry.nbytes for entry in bucket.header.entries] for bucket in made()]
    assert sizes[0] == [64 * 8 * 4]
    assert all(sum(some) <= 600 for some in sizes[1:])
    assert len(sizes) == 2, "small tensors share a bucket"


def test_floating_point_weights_are_sent_in_the_receivers_type() -> None:
    found = back(made(dtype=torch.bfloat16))
    assert {name: tensor.dtype for name, tensor in found.items() if name != "counts"} == dict.fromkeys(
        NAMES[:-1], torch.bfloat16
    )
    assert found["counts"].dtype == torch.int64
    assert bits(found["matrix"]) == bits(model()["matrix"].bfloat16())


def test_a_checksum_is_of_what_the_receiver_holds() -> None:
    (bucket,) = made(10**6, torch.bfloat16)
    held = {name: tensor.clone() for name, tensor in model().items()}
    assert bucket.header.arrived_as({name: tensor.bfloat16().to(tensor) for name, tensor in held.items()})
    held["matrix"][3, 3] += 1
    assert not bucket.header.arrived_as(held)


def test_a_changed_byte_is_noticed() -> None:
    (bucket,) = made(10**6)
    arrays = [array.copy() for array in bucket.arrays]
    arrays[2][5] ^= np.uint8(1)
    changed = replace(bucket, arrays=tuple(arrays))
    assert bucket.header.arrived_as(back([bucket])) and not changed.header.arrived_as(back([changed]))


def test_ranks_that_send_nothing_make_as_many_buckets() -> None:
    elsewhere: list[NamedTensor] = [(name, torch.empty_like(t, device="meta")) for name, t in model().items()]
    none = list(buckets(elsewhere, Cut(7, 600, torch.float32, checked=True)))
    assert none == [None] * len(made())
