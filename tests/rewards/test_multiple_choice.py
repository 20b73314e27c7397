"""The letter that a response settles on."""

from __future__ import annotations

from typing import Any

import pytest

from hydraflow.rewards.multiple_choice import mcq


@pytest.mark.parametrize(
    ("response", "truth", "right"),
    [
        ("C", "C", True),
        ("(c).", "C", True),
        ("I think\n**B**", "B", True),
        (r"\boxed{A}, no: \boxed{\text{D}}", "D", True),
        (r"\boxed{A}, no: \boxed{\text{D}}", "A", False),
        ("A is wrong, so the answer is (B) because A is wrong.", "B", True),
        ("Answer: C", 2, True),
        ("**Answer:** C", "C", True),
        ("The answer is option B.", "B", True),
        ("The correct answer is\nb", "B", True),
        ("<answer>\n(A)\n</answer>", "A", True),
        ("The answer is a number.", "A", False),
        ("The answer is A's cousin", "A", False),
        ("A or B or C", "C", False),
        ("", "A", False),
        ("Answer: A", "(A)", True),
    ],
)
def test_mcq(response: str, truth: Any, right: bool) -> None:
    assert mcq(response, truth) == {"score": float(right), "acc": float(right)}


def test_a_truth_that_is_no_choice_fails() -> None:
    with pytest.raises(ValueError, match="'Paris' is neither a letter nor the number of a choice"):
        mcq("A", "Paris")
