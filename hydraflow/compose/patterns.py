"""Patterns over dotted keys: `{a,b}` matches either, `*` one name, `**` one or more.

In: a pattern. Out: its forms without braces, and whether a key matches.
"""

from __future__ import annotations

import re
from functools import cache
from itertools import product


@cache
def expand(pattern: str) -> list[str]:
    """Every form of a pattern, with one choice from each pair of braces; braces may be nested.

    >>> expand("{a,b{1,2}}.c")
    ['a.c', 'b1.c', 'b2.c']
    """
    return ["".join(choice) for choice in product(*(_choices(part) for part in _split(pattern, at="{}")))]


@cache
def fits(pattern: str, key: str) -> bool:
    """Whether a key matches a pattern.

    >>> fits("critic.**", "critic.optim.lr"), fits("critic.{lr,*}", "critic.optim.lr")
    (True, False)
    """
    return any(_regex(form).fullmatch(key) for form in expand(pattern))


def _choices(part: str) -> list[str]:
    if not part.startswith("{"):
        return [part]
    return [form for choice in _split(part[1:-1], at=",") for form in expand(choice)]


def _split(text: str, *, at: str) -> list[str]:
    """Splits the text outside of braces: at commas, or around the outermost braces, which are kept with their
    contents."""
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
