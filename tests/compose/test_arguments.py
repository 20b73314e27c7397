"""Options on the command line: Hydra's, and those of an entry point's own."""

import pytest

from hydraflow.compose.arguments import CommandLineOption, split
from hydraflow.compose.launch import help_text
from hydraflow.schema import EvalConfig

SWITCHES = (
    CommandLineOption("--json", doc="Print JSON."),
    CommandLineOption("--svg", value="FILE", doc="Draw."),
    CommandLineOption("--job", value="NAME", choices=("ppo", "sft"), doc="Which."),
)


def test_own_options_are_taken_out():
    found = split(["--json", "data.shuffle=false", "--svg", "a.svg", "--job=sft", "--cfg", "job"], SWITCHES)
    assert found.switches == {"--json": True, "--svg": "a.svg", "--job": "sft"}
    assert (found.options, found.overrides, found.problems) == (["--cfg", "job"], ["data.shuffle=false"], [])


@pytest.mark.parametrize(
    ("words", "remedy"),
    [
        (["--svg"], "--svg FILE"),
        (["--svg", "--json"], "--svg FILE"),
        (["--svg="], "--svg FILE"),
        (["--json=yes"], "--json"),
        (["--job", "rl"], "--job ppo or --job sft"),
        (["--jsn"], "--json"),
    ],
)
def test_mistakes_in_own_options_are_named(words, remedy):
    [problem] = split(words, SWITCHES).problems
    assert problem.remedy == remedy


def test_own_options_are_unknown_to_others():
    assert [problem.field for problem in split(["--json"]).problems] == ["--json"]


def test_a_value_can_be_read_before_anything_is_composed():
    assert split(["--job", "sft", "no=key", "--jsn"], SWITCHES).switches == {"--job": "sft"}
    assert split(["data.shuffle=false"], SWITCHES).switches == {}


def test_the_help_lists_own_options():
    text = help_text("eval", EvalConfig, SWITCHES)
    assert "--svg FILE  Draw." in text and "--json  Print JSON." in text


@pytest.mark.parametrize("word", ["--info", "-i"])
def test_info_shows_where_values_come_from_unless_another_kind_is_named(word):
    assert split([word, "data.shuffle=false"]).options == [word, "config"]
    assert split([word, "plugins"]).options == [word, "plugins"]


def test_taking_an_option_leaves_the_others():
    found = split(["--cfg", "job", "--package=data", "--resolve"])
    assert (
        found.take("--resolve"),
        found.take("--package", "-p"),
        found.take("--cfg"),
        found.take("--cfg"),
    ) == ("", "data", "job", None)
    assert found.options == []
