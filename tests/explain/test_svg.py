"""The picture is well-formed, says the numbers, and fits its frame."""

import re
from xml.etree import ElementTree

from hypothesis import given
from hypothesis import strategies as st
from role_plans import simple_plan

from hydraflow.batch_plan.layout import Cluster
from hydraflow.batch_plan.parts import MicroPlan
from hydraflow.batch_plan.sft import SFTPlan
from hydraflow.explain.svg import BAR, LEFT, WIDTH, PictureBar, StepPicture, draw, sft_step

SVG = "{http://www.w3.org/2000/svg}"


def words(picture: str) -> list[str]:
    return [text.text or "" for text in ElementTree.fromstring(picture).iter(f"{SVG}text")]


def parts(picture: str) -> list[ElementTree.Element]:
    return [
        rect
        for rect in ElementTree.fromstring(picture).iter(f"{SVG}rect")
        if rect.get("class") in ("part", "first")
    ]


def test_supervised_step_says_its_numbers() -> None:
    role = simple_plan(data_ranks=4, mini_batch_trajectories=64, micro=MicroPlan(rows=8, max_tokens=None))
    plan = SFTPlan(64, role, Cluster(()), {}, steps_per_epoch=10, total_steps=20, quantities=(), notes=())
    picture = draw(sft_step(plan, "conversation"))
    found = words(picture)
    assert {
        "64 conversations",
        "on 4 data ranks",
        "16 rows on one data rank",
        "8 rows",
        "20 training steps in the run = 20 optimizer steps",
    } <= set(found)
    assert found.count("16 rows") == 4 and found.count("8 rows") == 2
    assert len(parts(picture)) == 4 + 2


def test_of_many_parts_some_are_drawn_and_the_rest_is_a_gap() -> None:
    picture = draw(StepPicture("many", (PictureBar("1000", "Q", "key", 1000, "1"),), ()))
    assert len(parts(picture)) == 7 and words(picture).count("…") == 1


def test_what_the_user_wrote_is_escaped() -> None:
    assert "a < b & c" in words(draw(StepPicture("a < b & c", (), ())))


def test_light_and_dark_pages_have_colours_of_their_own() -> None:
    picture = draw(StepPicture("title", (), ()))
    light, _, dark = picture.partition("prefers-color-scheme: dark")
    colours = [set(re.findall(r"\.(\w+) \{[^}]*fill: #\w+", half)) for half in (light, dark)]
    assert colours[0] == colours[1] == {"key", "page", "part", "first", "zoom"}


@given(count=st.integers(1, 10_000), part=st.text("abc ", min_size=1, max_size=25))
def test_cells_stand_in_a_row_inside_the_frame(count: int, part: str) -> None:
    cells = [
        (int(rect.get("x", "")), int(rect.get("width", "")))
        for rect in parts(draw(StepPicture("t", (PictureBar("x", "y", "", count, part),), ())))
    ]
    assert cells[0][0] == LEFT and cells[-1][0] + cells[-1][1] <= LEFT + BAR < WIDTH
    assert all(left + width < right for (left, width), (right, _) in zip(cells, cells[1:], strict=False))
