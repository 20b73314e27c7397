"""Programs and their tests, in the forms in which data sets have them."""

from __future__ import annotations

import json
from typing import Any

import pytest

from hydraflow.rewards.code import passed_tests, program
from hydraflow.rewards.config import RewardConfig, SandboxConfig
from hydraflow.rewards.pool import RewardPool, RewardRow
from hydraflow.rewards.selection import check_sources

SUMS = {"inputs": ["1 2\n", "3 4\n", "5 6\n", "7 8\n"], "outputs": ["3\n", "7\n", "11\n", "15\n"]}
ADDS = "Here it is:\n```python\na, b = map(int, input().split())\nprint(a + b)\n```\nGood luck."


def judged(response: str, truth: Any, seconds: float = 3.0, **options: Any) -> tuple[float, float]:
    """seconds: for one test."""
    sandbox = SandboxConfig(timeout=seconds, memory=0.25)
    found = passed_tests(response, truth, sandbox=sandbox, timeout=20.0, **options)
    return found["score"], found["acc"]


def test_the_last_block_is_run_on_all_tests() -> None:
    assert judged("```\nprint(0)\n```\n" + ADDS, json.dumps(SUMS)) == (1.0, 1.0)
    wrong = ADDS.replace("a + b", "a + b if a < 4 else 0")
    assert judged(wrong, SUMS) == (0.5, 0.0)
    assert judged(wrong, SUMS, partial=False) == (0.0, 0.0)
    assert judged("I cannot.", SUMS) == (0.0, 0.0)


@pytest.mark.parametrize(
    ("response", "found"),
    [
        ("```text\n6\n```\nBy\n```python\nprint(6)\n```\nit is 6.\n", "print(6)\n"),
        ("```Python3\nprint(6)\n```\nRun it:\n```bash\npython a.py\n```\nIt prints 6.", "print(6)\n"),
        ('```cpp\nint x;\n```\n```python title="a.py"\nprint(6)\n```', "print(6)\n"),
        ("```python\r\nprint(6)\r\n```\r\n", "print(6)\r\n"),
        ("```\nprint(5)\n```\n``` py\nprint(6)", "print(6)"),
        ("```pytb\nError\n```\n```\nprint(6)\n```\n```pycon\n>>> 6\n```", "print(6)\n"),
        ("```cpp\nint x;\n```", "int x;\n"),
        ("```python\nprint(6)\n```\nOutput:\n```\n6\n```", "print(6)\n"),
        ("```py\nprint(6)\n```\n```python-traceback\nE\n```", "print(6)\n"),
        ("Use ```sort()``` to sort.\n```python\nprint(6)\n```\nIt is ```O(n)```.\n", "print(6)\n"),
        ("print(6)", "print(6)"),
    ],
)
def test_blocks_of_other_languages_are_not_the_program(response: str, found: str) -> None:
    assert program(response) == found


@pytest.mark.slow(short=True)
def test_no_test_is_run_after_one_that_exceeded_a_limit() -> None:
    assert judged(ADDS.replace("print", "while a == 3: pass\nprint"), SUMS, seconds=1.5) == (0.25, 0.0)


@pytest.mark.parametrize(
    "inputs",
    [[[1, 2], [3, 4]], ["1\n2", "3\n4"]],
)
@pytest.mark.parametrize("outputs", [[[3], [7]], [3, 7], ["3", "7"]])
def test_functions(inputs: list[Any], outputs: list[Any]) -> None:
    truth = {"inputs": inputs, "outputs": outputs, "fn_name": "add"}
    assert judged("class Solution:\n    def add(self, a, b):\n        return a + b", truth) == (1.0, 1.0)
    assert judged("def add(a, b):\n    return [a, b]", truth) == (0.0, 0.0)


@pytest.mark.parametrize(
    ("returned", "wanted", "right"),
    [
        ("'21'", "21", True),
        ("'21'", '"21"', True),
        ("'21'", ["21"], True),
        ("'21'", 21, False),
        ("'ab'", "ab", True),
        ("{'x': [0.1 + 0.2]}", {"x": [0.3]}, True),
        ("0.1 + 0.2", "[0.3]", True),
        ("0.31", 0.3, False),
        ("3.0", 3, True),
        ("10 ** 400", 0.3, False),
        ("[1, 2]", [1], False),
    ],
)
def test_what_a_function_returns(returned: str, wanted: Any, right: bool) -> None:
    truth = {"inputs": [[]], "outputs": [wanted], "fn_name": "f"}
    assert judged(f"def f():\n    return {returned}", truth) == (right, right)


def test_an_answer_that_cannot_be_read_is_wrong() -> None:
    """Nested too deep for a reader of JSON, or no JSON."""
    source = (
        "import os\ndef f(text):\n    for file in range(3, 20):\n        try: os.write(file, text.encode())"
    )
    source += "\n        except OSError: pass\n    os._exit(0)"
    for text in ("[" * 9000, "no"):
        assert judged(source, {"inputs": [[text]], "outputs": [1], "fn_name": "f"}) == (0.0, 0.0)


@pytest.mark.parametrize(
    ("printed", "wanted", "right"),
    [
        ("1  2 \n\n", "1 2", True),
        ("1\n\n2\n", "1\n2\n", True),
        ("1\n2", "1 2", False),
        ("0.333333331", "0.3333333", True),
        ("0.334", "0.3333333", False),
        ("1000000008", "1000000007", False),
        ("3.0", "3", False),
        ("nan", "0.5", False),
        ("yes", "YES", False),
    ],
)
def test_what_is_printed_is_compared_word_by_word(printed: str, wanted: str, right: bool) -> None:
    assert judged(f"print({printed!r})", {"inputs": [""], "outputs": [wanted]}) == (right, right)


@pytest.mark.parametrize(
    "truth", [{"inputs": []}, {"inputs": [], "outputs": []}, {"inputs": ["1"], "outputs": []}, "[]"]
)
def test_a_truth_without_tests_fails_its_row(truth: Any) -> None:
    with pytest.raises(ValueError, match="the ground truth"):
        judged(ADDS, truth)


def test_a_pool_scores_the_data_sources_of_programs() -> None:
    """Also where a program takes all the time that it has."""
    config = RewardConfig(timeout=5.0, sandbox=SandboxConfig(timeout=1.0))
    check_sources(config, ["apps", "taco"])
    with RewardPool(config) as pool:
        right, endless = pool.score(
            [RewardRow("apps", ADDS, json.dumps(SUMS), {}), RewardRow("taco", "while True: pass", SUMS, {})]
        )
    assert (right.score, right.extra, right.failed) == (1.0, {"acc": 1.0}, None)
    assert (endless.score, endless.failed) == (0.0, None)
