"""The devices that a `device_mapping` names.

In: a list or text as configured. Out: ranges of device numbers; or ValueError with the reason.
Expressions such as ROLL's `list(range(0,8))` are recognised, never evaluated.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from hydraflow.batch_plan.layout import Devices

FORMS = "a list of numbers and ranges such as [0,1,2], 0-7 or [0-3,8-11]"
_RANGE = re.compile(r"(?:list\()?range\((\d+)(?:,(\d+))?(?:,(\d+))?\)\)?")
_ITEM = re.compile(r"(\d+)(?:-(\d+))?")
_LAST = 10**9
"""Maximum device number."""
_MOST_STEPS = 10**6
"""Maximum number of devices in a range whose step is not 1."""


def parse(value: object) -> tuple[Devices, Devices]:
    """The devices of a mapping, and those that it names twice. Raises ValueError for text that names none.

    >>> str(parse("list(range(0,4)) + list(range(8,12))")[0]), str(parse([3, 0, 1])[0])
    ('0-3,8-11', '0-1,3')
    >>> [str(devices) for devices in parse("0-3,2-5")]
    ['0-5', '2-3']
    """
    parts = sorted(_parts(value), key=lambda part: part.start)
    if not parts:
        raise ValueError("names no device")
    return Devices.of(parts), _twice(parts)


def text_of(devices: Devices) -> object:
    """A mapping to write into an override: 0-7, or the list [0-3,8-11], which needs no quotes."""
    parts = devices.parts()
    return parts[0] if len(parts) == 1 else parts


def _twice(parts: list[range]) -> Devices:
    found, end = [], 0
    for part in parts:
        if part.start < end:
            found.append(range(part.start, min(end, part.stop)))
        end = max(end, part.stop)
    return Devices.of(found)


def _parts(value: object) -> Iterator[range]:
    if isinstance(value, bool) or not isinstance(value, int | str | list | tuple):
        raise ValueError(f"must be {FORMS}")
    if isinstance(value, int):
        yield _checked(value, value)
    elif isinstance(value, str):
        yield from _text_parts(value)
    else:
        for item in value:
            yield from _parts(item)


def _text_parts(text: str) -> Iterator[range]:
    for term in re.sub(r"\s", "", text).split("+"):
        if found := _RANGE.fullmatch(term):
            first, last, step = (int(number) if number else None for number in found.groups())
            start, stop = (0, first) if last is None else (first or 0, last)
            yield from _stepped(start, stop or 0, 1 if step is None else step)
            continue
        for item in term.removeprefix("[").removesuffix("]").split(","):
            number = _ITEM.fullmatch(item)
            if number is None:
                raise ValueError(f"must be {FORMS}; {item!r} is neither")
            yield _checked(int(number[1]), int(number[2] or number[1]))


def _stepped(start: int, stop: int, step: int) -> Iterator[range]:
    if step == 0:
        raise ValueError("has a range with steps of 0")
    if step == 1 or stop <= start:
        yield _checked(start, stop - 1)
    elif (stop - start) // step > _MOST_STEPS:
        raise ValueError(f"has a range with more than {_MOST_STEPS} steps")
    else:
        yield from (_checked(number, number) for number in range(start, stop, step))


def _checked(first: int, last: int) -> range:
    if first < 0 or last < first:
        raise ValueError(f"must ascend and have no negative numbers; the range {first}-{last} does not")
    if last > _LAST:
        raise ValueError(f"names a device beyond {_LAST}")
    return range(first, last + 1)
