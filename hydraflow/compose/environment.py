"""`${oc.env:NAME}` that gives its own text back, so that what the environment holds need not be written down.

In: values that are resolved while this is in force. Out: the same with `${oc.env:NAME}` where something from
the environment would be.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from omegaconf import Container, Node, OmegaConf
from omegaconf.resolvers import oc

RESOLVER, DECODER = "oc.env", "oc.decode"
_NO_DEFAULT: Any = object()


class Named:
    """The references that were resolved, each under a name that no value holds by chance."""

    def __init__(self) -> None:
        self._mark = f"environment_{secrets.token_hex(8)}_"
        self._texts: list[str] = []

    def resolve(self, name: str, default: Any = _NO_DEFAULT) -> str:
        """In place of OmegaConf's own `oc.env`."""
        return self._named(f"{RESOLVER}:{name}" + ("" if default is _NO_DEFAULT else f",{_quoted(default)}"))

    def decode(self, text: str | None, _parent_: Container, _node_: Node) -> Any:
        """In place of `oc.decode`, where what is to be decoded is not known."""
        if text is None or self._mark not in text:
            return oc.decode(text, _parent_, _node_)
        return self._named(f"{DECODER}:{_quoted(text)}")

    def _named(self, reference: str) -> str:
        self._texts.append(f"${{{self.put_back(reference)}}}")
        return f"{self._mark}{len(self._texts) - 1}_"

    def put_back(self, value: Any) -> Any:
        """The value with references in place of their names."""
        if isinstance(value, Mapping):
            return {name: self.put_back(inner) for name, inner in value.items()}
        if isinstance(value, list):
            return [self.put_back(inner) for inner in value]
        if not isinstance(value, str):
            return value
        return re.sub(rf"{self._mark}(\d+)_", lambda found: self._texts[int(found[1])], value)


@contextmanager
def unread_environment() -> Iterator[Named]:
    """While it lasts, OmegaConf resolves references to the environment to their names."""
    named = Named()
    OmegaConf.register_new_resolver(RESOLVER, named.resolve, replace=True)
    OmegaConf.register_new_resolver(DECODER, named.decode, replace=True)
    try:
        yield named
    finally:
        OmegaConf.register_new_resolver(RESOLVER, oc.env, replace=True)
        OmegaConf.register_new_resolver(DECODER, oc.decode, replace=True)


def _quoted(default: Any) -> str:
    """As OmegaConf's grammar reads it back."""
    if default is None:
        return "null"
    text = str(default).replace("\\", "\\\\").replace("'", "\\'")
    return f"'{text}'"
