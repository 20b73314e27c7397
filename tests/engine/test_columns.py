"""The columns of a micro-batch that a loss gets."""

from __future__ import annotations

import torch

from hydraflow.engine.base import columns_of
from hydraflow.protocol import ragged
from hydraflow.protocol.batch import DataProto

CPU = torch.device("cpu")


def of_lengths(*lengths: int) -> torch.Tensor:
    """A ragged column that counts from one in each row."""
    return ragged.from_rows([torch.arange(1, length + 1) for length in lengths])


def test_a_loss_gets_columns_of_responses_and_rows() -> None:
    """Padded to the width of the responses; not those of prompts or of the tokens that the model reads."""
    data = DataProto.from_dict(
        {
            "prompts": of_lengths(4, 2),
            "responses": of_lengths(1, 3),
            "routed_experts": of_lengths(4, 4),
            "live": torch.tensor([True, False]),
            "custom_ragged": of_lengths(1, 3),
            "custom_of_rows": torch.tensor([0.5, 1.5]),
        },
        {"uid": ["a", "b"]},
    )
    found = columns_of(data, 3, CPU)
    assert found.keys() == {"responses", "live", "custom_ragged", "custom_of_rows"}
    assert found["responses"].tolist() == found["custom_ragged"].tolist() == [[1, 0, 0], [1, 2, 3]]
    assert found["live"].tolist() == [True, False]
    assert found["custom_of_rows"].tolist() == [0.5, 1.5]
