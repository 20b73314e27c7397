"""The built-in reward functions, on answers that a person can judge."""

from __future__ import annotations

import pytest

from hydraflow.errors import ConfigError
from hydraflow.rewards.functions import by_source


@pytest.mark.parametrize(
    ("response", "score"), [("042", 1.0), (" 042\n", 1.0), ("42", 0.0), ("0420", 0.0), ("", 0.0)]
)
def test_arithmetic_is_an_exact_match(response: str, score: float) -> None:
    assert by_source("arithmetic", response, "042") == score


@pytest.mark.parametrize(
    ("response", "truth", "strict", "flexible"),
    [
        ("6 * 7 = 42\n#### 42", "42", 1, 1),
        ("#### 41 no: #### 42", "42", 1, 1),
        ("#### $1,200.00.", "1200", 1, 1),
        ("#### -3", "-3", 1, 1),
        ("####42", "1,042", 0, 0),
        ("The answer is 42.", "42", 0, 1),
        ("42 apples, 41 pears", "42", 0, 0),
        ("#### 41\nwell, 42", "42", 0, 0),
        ("#### many", "42", 0, 0),
        ("none", "42", 0, 0),
    ],
)
def test_gsm8k(response: str, truth: str, strict: float, flexible: float) -> None:
    assert by_source("openai/gsm8k", response, truth) == {
        "score": strict,
        "acc": strict,
        "acc_flexible": flexible,
    }


@pytest.mark.parametrize(
    "source",
    [
        "lighteval/MATH",
        "DigitalLearningGmbH/MATH-lighteval",
        "HuggingFaceH4/MATH-500",
    ],
)
def test_mathematics_is_compared_by_value(source: str) -> None:
    assert by_source(source, r"So \boxed{\frac{1}{2}}.", "0.5") == {"score": 1.0, "acc": 1.0}
    assert by_source(source, r"So \boxed{\frac{1}{3}}.", "0.5") == {"score": 0.0, "acc": 0.0}
    assert by_source(source, "I do not know.", "0.5") == {"score": 0.0, "acc": 0.0}


@pytest.mark.parametrize(
    ("response", "truth", "score"),
    [
        ("...\nAnswer: 34", "34", 1.0),
        (r"\boxed{(x+1)^2}", "x^2+2x+1", 1.0),
        (r"\boxed{7}. Wait, no: it is \boxed{8}.", "8", 1.0),
        (r"$x = 5$", "$5$", 1.0),
        (r"\boxed{18.90}", r"\$18.90", 1.0),
        (r"\boxed{\$32,\!348}", r"\$32,\!348", 1.0),
        (r"\boxed{\$18.90}", r"\$18.91", 0.0),
        (r"\boxed{1,000}", "1000", 1.0),
        (r"\boxed{[1,2)}", "[1,2]", 0.0),
        (r"\boxed{50\%}", "50", 1.0),
        (r"\boxed{50\%}", r"50\%", 1.0),
        (r"\boxed{50\%}", "5", 0.0),
    ],
)
def test_forms_of_mathematical_answers(response: str, truth: str, score: float) -> None:
    assert by_source("lighteval/MATH", response, truth)["score"] == score  # type: ignore[index]


@pytest.mark.parametrize("source", ["math_dapo", "aime24", "aime_2025"])
@pytest.mark.parametrize(
    ("response", "right"),
    [
        ("Answer:34", True),
        (r"It was \boxed{7}.\n\nAnswer: 34", True),
        (r"Answer: 7? No.\nAnswer: $\boxed{34}$.", True),
        ("**Answer: 34**.", True),
        (r"**Answer:**\n$$\boxed{34}$$", True),
        (r"Answer: 7 no.\n\nAnswer:\n34", True),
        (r"So \boxed{34}. That is my answer:", True),
        (r"So \boxed{34}.", True),
        (r"So \boxed{34}.\nAnswer: 35", False),
        ("I do not know.", False),
        ("It is 34, or 35. I guess 34.", False),
        (r"It is 34: \boxed{34", False),
        (r"So \boxed{34}, or \boxed{3", True),
        ("Answer: $34", True),
        ("Answer: 34 dollars", True),
        ("Answer: $34$ dollars", True),
        ("Answer: 34 ways", True),
        ("Answer: The answer is $34$.", True),
        ("Answer: $34$, as shown", True),
        ("Answer: $$34$$ dollars", True),
        ("Answer: $x$ = 34", True),
        ("Answer: 2$\\cdot$17", True),
        ("Answer: $33$, $34$", False),
        ("Answer: 33, $34$", False),
        ("Answer: -$34$", False),
        ("Answer: 2$34$", False),
        ("Answer: $34$/7", False),
        ("Answer: $34$ or 35", False),
        ("Answer: $34$ million", False),
        ("Answer: 34 million", False),
        ("Answer: .34", False),
    ],
)
def test_answers_of_dapo(source: str, response: str, right: bool) -> None:
    found = by_source(source, response.replace(r"\n", "\n"), "34")
    assert found == {"score": 1.0 if right else -1.0, "acc": float(right)}


def test_an_unreadable_ground_truth_is_not_a_wrong_answer() -> None:
    with pytest.raises(ValueError, match="ground truth '' cannot be read as mathematics"):
        by_source("lighteval/MATH", r"\boxed{1}", "")


def test_an_unknown_data_source_lists_the_known_ones() -> None:
    with pytest.raises(ConfigError) as caught:
        by_source("my/task", "1", "1")
    message = str(caught.value)
    assert (
        "data_source=my/task" in message
        and "arithmetic, openai/gsm8k, lighteval/MATH" in message
        and "aime*" in message
    )
    assert "reward.custom_reward_function.path" in message
