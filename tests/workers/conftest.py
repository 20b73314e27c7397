"""Workers with an engine need a process group."""

import pytest


@pytest.fixture(autouse=True)
def always_one_rank(one_rank: None) -> None: ...
