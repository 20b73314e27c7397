"""The report in terminals of several widths: nothing is cut off."""

import io
import re

import pytest
from rich.console import Console

from hydraflow.compose.loading import load_command
from hydraflow.explain.report import make_report
from hydraflow.explain.show import show
from hydraflow.memory.report import size_text
from hydraflow.schema import PPOConfig

FOUR_ROLES = ["trainer.device=cpu", "algorithm.adv_estimator=gae", "algorithm.use_kl_in_reward=true"]


@pytest.mark.parametrize("width", [60, 80, 120])
def test_a_narrow_terminal_cuts_nothing_off(width):
    report = make_report(*load_command("ppo", PPOConfig, FOUR_ROLES, tolerant=True))
    written = io.StringIO()
    show(report, console=Console(file=written, width=width, force_terminal=True, no_color=True))
    text = re.sub(r"\x1b\[[0-9;]*m", "", written.getvalue())
    assert "…" not in text
    assert report.memory is not None
    lines = {
        line.split()[0]: re.sub(r" +", " ", line).strip()
        for line in text.partition("memory of one device")[2].splitlines()
        if line.split()
    }
    assert lines["role"] == "role actor critic ref rollout"
    assert lines["total"] == " ".join(["total", *(size_text(role.total) for role in report.memory.roles)])
