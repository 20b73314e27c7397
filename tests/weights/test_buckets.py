"""Weights in buckets and back: bit by bit, of bounded size, and with checksums that notice any change."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hydraflow.weights.buckets import (
    BucketMemory,
    BucketOptions,
    FlatBucket,
    Header,
    NamedTensor,
    Part,
    into_buckets,
)

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


def made(
    max_bytes: int = 600,
    dtype: torch.dtype = torch.float32,
    weights: dict[str, torch.Tensor] | None = None,
) -> list[FlatBucket]:
    parts = into_buckets((weights or model()).items(), BucketOptions(7, max_bytes, dtype, checked=True))
    memory = partial(BucketMemory, torch.device("cpu"))
    return [FlatBucket.of(header, numbers, memory()) for header, numbers in parts if header]


def back(some: Sequence[FlatBucket]) -> dict[str, torch.Tensor]:
    """The weights; parts are joined in the order in which they come."""
    found: dict[str, list[torch.Tensor]] = {}
    shapes: dict[str, torch.Size] = {}
    for bucket in some:
        for name, sent in bucket.weights():
            whole = not isinstance(sent, Part)
            found.setdefault(name, []).append(sent.reshape(-1) if whole else sent.numbers)
            shapes[name] = sent.shape
    return {name: torch.cat(numbers).view(shapes[name]) for name, numbers in found.items()}


def bits(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


@pytest.mark.parametrize("max_bytes", [1, 100, 600, 10**6])
def test_every_bit_comes_back_in_order(max_bytes: int) -> None:
    some, given = made(max_bytes), model()
    found = back(some)
    assert list(found) == NAMES
    for name, tensor in given.items():
        assert found[name].shape == tensor.shape and bits(found[name]) == bits(tensor), name
    assert [bucket.header.number for bucket in some] == list(range(len(some)))
    assert [bucket.header.last for bucket in some] == [False] * (len(some) - 1) + [True]
    assert {bucket.header.version for bucket in some} == {7}


def test_a_weight_that_is_larger_than_a_bucket_comes_in_parts() -> None:
    some = made()
    assert [[one.nbytes for one in bucket.header.entries] for bucket in some] == [
        [600],  # of 64 * 8 * 4 bytes
        [600],
        [600],
        [248, 4, 256],
        [128, 0, 40],
    ]
    (first,) = some[1].weights()
    assert first[0] == "embed" and isinstance(first[1], Part)
    part = first[1]
    assert (part.start, part.end, part.shape, part.is_last) == (150, 300, (64, 8), False)
    assert torch.equal(part.place_in(model()["embed"]), part.numbers)
    assert [list(bucket.header.checksums) for bucket in some[:4]] == [[], [], [], NAMES[:3]]


@given(
    sizes=st.lists(st.integers(0, 40), min_size=1, max_size=6),
    max_bytes=st.integers(8, 100),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
)
def test_no_bucket_is_larger_than_it_may_be(sizes: list[int], max_bytes: int, dtype: torch.dtype) -> None:
    sent = {f"w{i}": torch.arange(float(size)) for i, size in enumerate(sizes)}
    some = made(max_bytes, dtype, sent)
    assert all(sum(one.nbytes for one in bucket.header.entries) <= max_bytes for bucket in some)
    found = back(some)
    assert list(found) == list(sent)
    assert all(torch.equal(found[name], tensor.to(dtype)) for name, tensor in sent.items())
    assert not any(bucket.header.differing(sent) for bucket in some)


def test_floating_point_weights_are_sent_in_the_receivers_type() -> None:
    found = back(made(dtype=torch.bfloat16))
    assert {name: tensor.dtype for name, tensor in found.items() if name != "counts"} == dict.fromkeys(
        NAMES[:-1], torch.bfloat16
    )
    assert found["counts"].dtype == torch.int64
    assert bits(found["matrix"]) == bits(model()["matrix"].bfloat16())


@pytest.mark.parametrize("max_bytes", [50, 10**6])
def test_a_checksum_is_of_what_the_receiver_holds(max_bytes: int) -> None:
    headers = [bucket.header for bucket in made(max_bytes, torch.bfloat16)]
    held = {name: tensor.bfloat16().to(tensor) for name, tensor in model().items()}
    assert differing(headers, held) == []
    held["matrix"][3, 3] += 1
    held["embed"][0, 0] += 1
    assert differing(headers, held) == ["embed", "matrix"]


def differing(headers: Sequence[Header], held: dict[str, torch.Tensor]) -> list[str]:
    return [name for header in headers for name in header.differing(held)]


def test_a_changed_byte_is_noticed() -> None:
    (bucket,) = made(10**6)
    flat = bucket.flat.clone()
    flat[2048 + 16 + 5] ^= 1  # behind `embed` and `scale`, which begin at multiples of 16
    changed = replace(bucket, flat=flat)
    assert bucket.header.differing(back([bucket])) == []
    assert changed.header.differing(back([changed])) == ["matrix"]


def test_ranks_that_send_nothing_make_as_many_buckets() -> None:
    elsewhere: list[NamedTensor] = [(name, torch.empty_like(t, device="meta")) for name, t in model().items()]
    headers = [
        header for header, _ in into_buckets(elsewhere, BucketOptions(7, 600, torch.float32, checked=True))
    ]
    assert headers == [None] * len(made())


def test_biases_of_routers_are_never_rounded() -> None:
    biases = ("gate.e_score_correction_bias", "feed_forward.expert_bias")
    weights = dict.fromkeys(("layer.weight", *biases), torch.tensor([7.0051]))
    found = back(made(dtype=torch.bfloat16, weights=weights))
    assert found["layer.weight"].dtype == torch.bfloat16
    assert all(found[name].equal(weights[name]) for name in biases)


def test_the_rest_of_a_divided_weight_does_not_keep_all_of_it() -> None:
    weights = {"large": torch.zeros(250), "next": torch.zeros(10)}
    options = BucketOptions(1, 600, torch.float32, checked=False)
    for _, numbers in into_buckets(weights.items(), options):
        for one in numbers:
            assert one.untyped_storage().nbytes() <= 600 or one.storage_offset() == 0
    assert [one.untyped_storage().nbytes() for one in numbers] == [400, 40]


def test_only_the_rest_of_a_divided_weight_is_copied() -> None:
    """Copies would fragment the sender's heap, which would grow with every transfer, by up to the size of the
    model."""
    weights = {"large": torch.zeros(400), "next": torch.zeros(10)}
    options = BucketOptions(1, 600, torch.float32, checked=False)
    sent = [one for _, numbers in into_buckets(weights.items(), options) for one in numbers]
    sources = {weight.untyped_storage().data_ptr() for weight in weights.values()}
    assert [len(one) for one in sent] == [150, 150, 100, 10]
    assert [one.untyped_storage().data_ptr() in sources for one in sent] == [True, True, False, True]
