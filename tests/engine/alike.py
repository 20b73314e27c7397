"""Compares tensors by name."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch


def assert_same(
    got: Mapping[str, torch.Tensor], wanted: Mapping[str, torch.Tensor], atol: float = 0.0
) -> None:
    """The same names, types and shapes, and numbers that are off by at most `atol`."""
    assert got.keys() == wanted.keys()
    for name, value in wanted.items():
        torch.testing.assert_close(
            got[name], value.detach(), rtol=0, atol=atol, msg=lambda text, name=name: f"{name}: {text}"
        )


def assert_sent(
    sent: Sequence[Sequence[Mapping[str, torch.Tensor]]],
    receivers: Sequence[int | None],
    wanted: Mapping[str, torch.Tensor],
) -> None:
    """What each rank got of weights that were sent to each receiver, or to all: there the wanted ones,
    elsewhere their shapes; everywhere in the same order."""
    for rank, of_rank in enumerate(sent):
        for to, got in zip(receivers, of_rank, strict=True):
            assert list(got) == list(sent[0][0])
            if to in (None, rank):
                assert_same(got, wanted)
                continue
            for name, tensor in wanted.items():
                assert got[name].is_meta
                assert (got[name].shape, got[name].dtype) == (tensor.shape, tensor.dtype)
