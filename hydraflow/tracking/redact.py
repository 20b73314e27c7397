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
_PASSWORD = re.compile(r"(?P<before>[a-z][a-z0-9+.-]*://)[^/\s@]+@", re.IGNORECASE)
_ASSIGNED = re.compile(r"(?P<name>[\w.+-]*(?:api_?key|token|secret|password|passwd))=(?P<value>[^\s,}\]]+)", re.IGNORECASE)
_SPOKEN_FOR = {"prompt_key", "reward_fn_key", "messages_key", "response_key", "data_source_key", "reward_model_key", "pad_token"}
"""Keys that name a column or a token of a vocabulary."""


def public(value: Any, name: str = "") -> Any:
    """The value as others may see it.

    >>> public({"env_vars": {"WANDB_API_KEY": "abc", "A": "b"}, "wandb_proxy": "http://me:pw@host:3128"})
    {'env_vars': {'WANDB_API_KEY': '(hidden)', 'A': 'b'}, 'wandb_proxy': 'http://(hidden)@host:3128'}
    """
    if isinstance(value, Mapping):
        return {str(key): public(inner, str(key)) for key, inner in value.items()}
    if isinstance(value, str):
        return HIDDEN if value and _is_secret(name) else public_text(value)
    if isinstance(value, Sequence):
        return [public(inner, name) for inner in value]
    return value


def public_text(text: str) -> str:
    """Text without passwords in addresses and without assigned secrets.

    >>> public_text("run +x.WANDB_API_KEY=abc data.prompt_key=prompt")
    'run +x.WANDB_API_KEY=(hidden) data.prompt_key=prompt'
    """
    text = _PASSWORD.sub(lambda found: f"{found['before']}{HIDDEN}@", text)
    return _ASSIGNED.sub(lambda found: f"{found['name']}={HIDDEN}", text)


def _is_secret(name: str) -> bool:
    return name not in _SPOKEN_FOR and _SECRET.search(name) is not None
