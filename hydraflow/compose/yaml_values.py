"""Loads YAML with numbers as Hydra reads them: 1e-6 is a float."""

from __future__ import annotations

import re
from typing import Any

import yaml


class _Loader(getattr(yaml, "CSafeLoader", yaml.SafeLoader)):  # type: ignore[misc]
    pass


_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"[-+]?\d+[eE][-+]?\d+$"), list("-+0123456789")
)


def load(text: str) -> Any:
    """The value of a YAML text. Raises yaml.YAMLError.

    >>> load("1e-6"), yaml.safe_load("1e-6")
    (1e-06, '1e-6')
    """
    return yaml.load(text, _Loader)
