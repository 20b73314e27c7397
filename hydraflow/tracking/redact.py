"""A configuration without its secrets, for those with whom a run is shared: trackers' servers and reports.

In: plain values. Out: the same, with values hidden whose key says that they are secret, and passwords taken out of addresses.
Left out on purpose: config.yaml of the run folder, which must run again as it is.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

HIDDEN = "(hidden)"
_SECRET = re.compile(r"(^|[_.-])(api_?key|key|token|secret|password|passwd|credentials?)$", re.IGNORECASE)
_PASSWORD = re.compile(r"(?P<before>[a-z][a-z0-9+.-]*://)[^/\s]+@", re.IGNORECASE)
_IN_QUOTES = r"""'(?:[^'\\]|\\.)*'|"(?:[^"\\]|\\.)*\""""
_WORD = re.compile(r"(?P<before>(?P<name>[\w.+~-]+)=)(?P<value>.+)", re.DOTALL)
"""A whole override, key=value."""
_INSIDE = re.compile(rf"(?P<before>['\"]?(?P<name>[\w.+-]+)['\"]?(?:=|:\s*))(?P<value>{_IN_QUOTES}|[^\s,\[\]{{}}()'\"]+)")
"""key=value or key: value anywhere in a text."""
_SPOKEN_FOR = {"prompt_key", "reward_fn_key", "messages_key", "response_key", "data_source_key", "reward_model_key", "pad_token"}
"""Keys that name a column or a token of a vocabulary."""


def public(value: Any, name: str = "") -> Any:
    """The value as others may see it.

    >>> public({"env_vars": {"WANDB_API_KEY": "abc", "A": "b"}, "wandb_proxy": "http://me:pw@host:3128"})
    {'env_vars': {'WANDB_API_KEY': '(hidden)', 'A': 'b'}, 'wandb_proxy': 'http://(hidden)@host:3128'}
    """
    secret = _is_secret(name)
    if isinstance(value, Mapping):
        return {str(key): public(inner, name if secret else str(key)) for key, inner in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, str):
        return [public(inner, name) for inner in value]
    if secret and value not in (None, "", True, False):
        return HIDDEN
    return public_text(value) if isinstance(value, str) else value


def public_text(text: str) -> str:
    """Text, such as one word of a command line, without passwords in addresses and without assigned secrets.

    >>> public_text("+x.WANDB_API_KEY=a b"), public_text("data.prompt_key=prompt"), public_text("env_vars={HF_TOKEN:abc,A:b}")
    ('+x.WANDB_API_KEY=(hidden)', 'data.prompt_key=prompt', 'env_vars={HF_TOKEN:(hidden),A:b}')
    """
    text = _PASSWORD.sub(lambda found: f"{found['before']}{HIDDEN}@", text)
    if (whole := _WORD.fullmatch(text)) and _is_secret(_last_part(whole["name"])):
        return f"{whole['before']}{HIDDEN}"
    return _INSIDE.sub(lambda found: f"{found['before']}{HIDDEN}" if _is_secret(_last_part(found["name"])) else found[0], text)


def _last_part(key: str) -> str:
    return key.rpartition(".")[2].lstrip("+~-")


def _is_secret(name: str) -> bool:
    return name not in _SPOKEN_FOR and _SECRET.search(name) is not None
