"""The character tokenizer: ids are pad 0, end 1, then the characters of "0123456789+-*= " from 2."""

from __future__ import annotations

import pytest
from transformers import PreTrainedTokenizerFast

from hydraflow.models.tiny import make_tokenizer


@pytest.fixture
def tokenizer() -> PreTrainedTokenizerFast:
    """A fresh one, since tests change its template."""
    return make_tokenizer()
