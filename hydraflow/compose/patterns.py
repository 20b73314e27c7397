"""Patterns over dotted keys: `{a,b}` matches either, `*` one name, `**` one or more."""

from __future__ import annotations

import re
from functools import cache


@cache
def expand(pattern: str) -> list[str]:
    """Every form of a pattern, with one choice from each pair of braces; braces may be nested.

    >>> expand("{a,b{1,2}}.c")
    ['a.c', 'b1.c', 'b2.c']
    """
    before, brace, rest = pattern.partition("{")
    if not brace:
        return [pattern]
    depth, choices, after = 1, [""], iter(rest)
    for letter in after:
        depth += (letter == "{") - (letter == "}")
        if depth == 0:
            break
        if depth == 1 and letter == ",":
            choices.append("")
        else:
            choices[-1] += letter
    tails = expand("".join(after))
    return [before + form + tail for choice in choices for form in expand(choice) for tail in tails]


@cache
def fits(pattern: str, key: str) -> bool:
    """Whether a key matches a pattern.

    >>> fits("critic.**", "critic.optim.lr"), fits("critic.{lr,*}", "critic.optim.lr")
    (True, False)
    """
    return any(_regex(form).fullmatch(key) for form in expand(pattern))


@cache
def _regex(form: str) -> re.Pattern[str]:
    return re.compile(re.escape(form).replace(r"\*\*", ".+").replace(r"\*", "[^.]+"))
