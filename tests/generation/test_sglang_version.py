"""The version of SGLang that is written elsewhere is the one that the engine asks for."""

import re
from pathlib import Path

from hydraflow.generation.config import SGLANG

ROOT = Path(__file__).parents[2]


def test_the_page_gives_the_same_version() -> None:
    page = (ROOT / "docs" / "sglang.md").read_text()
    assert re.findall(r"SGLang (\S+) or newer", page) == [SGLANG.minimum]
    assert re.findall(r"'sglang>=(.*)'", page) == [SGLANG.minimum]
