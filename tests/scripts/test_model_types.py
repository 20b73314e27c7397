"""The list of model types: it has them all, nothing in it is to be mended, and a few are as it says."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from scripts.model_types import (
    BROKEN,
    PADDED,
    PAGE,
    WRONG,
    as_policy,
    engine_of,
    line,
    page,
    trained_once,
    with_adapters,
)
from scripts.tiny_types import TYPES, save_tiny, tiny_config

LINES = PAGE.read_text().partition("|---|---|---|---|---|---|\n")[2].splitlines()
ROWS = {one.split("|")[1].strip(): one for one in LINES}


def test_the_page_is_what_the_script_writes_of_its_rows() -> None:
    (version,) = re.findall(r"with transformers (\S+):", PAGE.read_text())
    assert page(LINES, version) == PAGE.read_text()


def test_every_type_is_listed() -> None:
    assert set(TYPES) <= set(ROWS)
    assert [name for name in TYPES if WRONG in ROWS[name] or BROKEN in ROWS[name]] == []


@pytest.mark.parametrize("model_type", ["exaone4", "ernie4_5_moe", "lfm2", "bart"])
def test_as_the_page_says(model_type: str, one_rank: None, tmp_path: Path) -> None:
    save_tiny(tiny_config(model_type), tmp_path)
    found = as_policy(tmp_path)
    assert line(model_type, {"policy": found}).split("|")[2] == ROWS[model_type].split("|")[2]


def test_adapters_of_a_model_that_writes_into_its_embeddings(one_rank: None, tmp_path: Path) -> None:
    save_tiny(tiny_config("git"), tmp_path)
    assert with_adapters(tmp_path).word == PADDED


@pytest.mark.parametrize("head", ["policy", "value"])
@pytest.mark.parametrize("model_type", ["mamba", "mamba2", "falcon_mamba"])
def test_a_residual_stream_in_float32_with_a_head_in_bf16(
    model_type: str, head: str, one_rank: None, tmp_path: Path
) -> None:
    save_tiny(tiny_config(model_type), tmp_path)
    assert trained_once(engine_of(tmp_path, head=head, dtype="bf16")).word == PADDED
