"""Patterns over dotted keys: `{a,b}` stands for either, `*` for one name, `**` for one or more.

In: a pattern. Out: its forms without braces, and whether a key fits one.
"""

from __future__ import annotations

import re
from functools import cache
from itertools import product


@cache
def expand(pattern: str) -> list[str]:
    """Every form of a pattern, one choice from each pair of braces; braces may stand in braces.

    >>> expand("{a,b{1,2}}.c")
    ['a.c', 'b1.c', 'b2.c']
    """
    return ["".join(choice) for choice in product(*(_choices(part) for part in _split(pattern, at="{}")))]


@cache
def fits(pattern: str, key: str) -> bool:
    """Whether a key fits a pattern.

    >>> fits("critic.**", "critic.optim.lr"), fits("critic.{lr,*}", "critic.optim.lr")
    (True, False)
    """
    return any(_regex(form).fullmatch(key) for form in expand(pattern))


def _choices(part: str) -> list[str]:
    if not part.startswith("{"):
        return [part]
    return [form for choice in _split(part[1:-1], at=",") for form in expand(choice)]


def _split(text: str, *, at: str) -> list[str]:
    """The text cut where no braces are open: at commas, or around outermost braces, which stay with what they
    hold."""
    parts, depth = [""], 0
    for letter in text:
        depth -= letter == "}"
        if depth == 0 and letter == at:
            parts.append("")
        elif depth == 0 and at == "{}" and letter == "{":
            parts.append(letter)
        elif depth == 0 and at == "{}" and letter == "}":
            parts[-1] += letter
            parts.append("")
        else:
            parts[-1] += letter
        depth += letter == "{"
    return [part for part in parts if part or at == ","]


@cache
def _regex(form: str) -> re.Pattern[str]:
    return re.compile(re.escape(form).replace(r"\*\*", ".+").replace(r"\*", "[^.]+"))
