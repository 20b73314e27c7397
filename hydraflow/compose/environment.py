"""Resolves `${oc.env:NAME}` to its own text, so that values of environment variables reach no file."""

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


class ResolvedReferences:
    """The resolved references, each under a unique marker that no value contains by chance."""

    def __init__(self) -> None:
        self._mark = f"environment_{secrets.token_hex(8)}_"
        self._texts: list[str] = []

    def resolve(self, name: str, default: Any = _NO_DEFAULT) -> str:
        """Replaces OmegaConf's `oc.env`."""
        return self._named(f"{RESOLVER}:{name}" + ("" if default is _NO_DEFAULT else f",{_quoted(default)}"))

    def decode(self, text: str | None, _parent_: Container, _node_: Node) -> Any:
        """Replaces `oc.decode`: text that contains a marker is not decoded."""
        if text is None or self._mark not in text:
            return oc.decode(text, _parent_, _node_)
        return self._named(f"{DECODER}:{_quoted(text)}")

    def _named(self, reference: str) -> str:
        self._texts.append(f"${{{self.put_back(reference)}}}")
        return f"{self._mark}{len(self._texts) - 1}_"

    def put_back(self, value: Any) -> Any:
        """The value with each marker replaced by its reference."""
        if isinstance(value, Mapping):
            return {name: self.put_back(inner) for name, inner in value.items()}
        if isinstance(value, list):
            return [self.put_back(inner) for inner in value]
        if not isinstance(value, str):
            return value
        return re.sub(rf"{self._mark}(\d+)_", lambda found: self._texts[int(found[1])], value)


@contextmanager
def unread_environment() -> Iterator[ResolvedReferences]:
    """Within the context, OmegaConf resolves references to the environment as markers."""
    named = ResolvedReferences()
    OmegaConf.register_new_resolver(RESOLVER, named.resolve, replace=True)
    OmegaConf.register_new_resolver(DECODER, named.decode, replace=True)
    try:
        yield named
    finally:
        OmegaConf.register_new_resolver(RESOLVER, oc.env, replace=True)
        OmegaConf.register_new_resolver(DECODER, oc.decode, replace=True)


def _quoted(default: Any) -> str:
    """Quotes the text so that OmegaConf's grammar parses it back."""
    if default is None:
        return "null"
    text = str(default).replace("\\", "\\\\").replace("'", "\\'")
    return f"'{text}'"
