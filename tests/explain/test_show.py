"""The report at several widths: no word is split, nothing is truncated."""

import pytest

from hydraflow.compose.loading import load_command
from hydraflow.explain.report import make_report
from hydraflow.explain.show import report_lines
from hydraflow.memory.report import size_text
from hydraflow.schema import PPOConfig

FOUR_ROLES = ["trainer.device=cpu", "algorithm.adv_estimator=gae", "algorithm.use_kl_in_reward=true"]


def report(*overrides):
    return make_report(*load_command("ppo", PPOConfig, [*FOUR_ROLES, *overrides], tolerant=True))


def lines_of(found, width, *, everything=True):
    return "\n".join(report_lines(found, everything=everything, width=width)).splitlines()


@pytest.mark.parametrize("width", [70, 80, 120])
def test_a_narrow_terminal_cuts_nothing_off(width):
    made = report()
    lines = lines_of(made, width)
    assert max(map(len, lines)) <= width
    assert made.memory is not None
    rows = {line.split()[0]: line.split() for line in lines if line.split()}
    assert rows["role"] == ["role", "actor", "critic", "ref", "rollout"]
    assert " ".join(rows["total"]) == " ".join(
        ["total", *(size_text(role.total) for role in made.memory.roles)]
    )


@pytest.mark.parametrize("width", [70, 80, 120])
@pytest.mark.parametrize("everything", [True, False])
def test_words_are_the_same_at_every_width(width, everything):
    """Whatever a line is broken at, no word is."""
    made = report()
    wide, narrow = (
        {word.rstrip(";,") for line in lines_of(made, one, everything=everything) for word in line.split()}
        for one in (1000, width)
    )
    assert {word for word in narrow - wide if set(word) != {"-"}} <= {"formula", "or", "where", "it", "is"}


def test_a_short_report_shows_what_was_given():
    """The devices of a machine are left out of the short one, unless the command line sets them."""
    name = "trainer: devices per machine"
    assert not [line for line in lines_of(report(), 200, everything=False) if name in line]
    assert [line for line in lines_of(report(), 200) if name in line]
    given = report("trainer.n_gpus_per_node=2")
    assert [line for line in lines_of(given, 200, everything=False) if name in line]
