"""The local cache folder of a model on the Hugging Face hub, and whether the hub is reachable.

In: a name on the hub. Out: a folder, or why it cannot be fetched. Standard library and huggingface_hub, which
is imported only where a name is looked up. Left out on purpose: downloads, and which paths are such names
(`system/paths.py`).
"""

from __future__ import annotations

import os
import threading
from functools import cache
from pathlib import Path
from queue import Empty, SimpleQueue
from urllib.parse import urlsplit

from hydraflow.errors import ConfigError
from hydraflow.system.network import unreachable

SECONDS = 5.0
"""Timeout for the hub in seconds; huggingface_hub itself tries for half a minute."""
PROXIES = ("https_proxy", "HTTPS_PROXY", "all_proxy", "ALL_PROXY")


def cached_snapshot(name: str) -> Path | None:
    """The folder in the hub's cache of an already downloaded model, if any."""
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    try:
        found = try_to_load_from_cache(name, "config.json")
    except HFValidationError:
        return None
    return Path(found).parent if isinstance(found, str) else None


def from_hub(name: str, key: str) -> str:
    """Where to load a model from: its name, or its folder in the cache if the hub cannot be reached
    (transformers itself would try for half a minute). Raises ConfigError if it is not in the cache either."""
    reason = hub_fault()
    if reason is None:
        return name
    snapshot = cached_snapshot(name)
    if snapshot is None:
        remedy = f"{key}=<folder with the model>, or hf download {name} where the hub can be reached"
        rule = f"is neither a folder nor in the Hugging Face cache, and {reason}"
        raise ConfigError.one(key, name, rule, remedy)
    return str(snapshot)


def is_offline() -> bool:
    """Whether Hugging Face must not use the network."""
    return os.environ.get("HF_HUB_OFFLINE", "").lower() in ("1", "true", "yes", "on")


def hub_fault() -> str | None:
    """Why nothing can be downloaded; None: the hub answers, or a proxy is configured."""
    if is_offline():
        return "HF_HUB_OFFLINE is set"
    if any(os.environ.get(name) for name in PROXIES):
        return None
    named = os.environ.get("HF_ENDPOINT") or "https://huggingface.co"
    try:
        address = urlsplit(named)
        host, port = address.hostname, address.port or (80 if address.scheme == "http" else 443)
    except ValueError:
        host, port = None, 0
    return _unreachable(host, port) if host else f"HF_ENDPOINT={named} is not an address"


@cache
def _unreachable(host: str, port: int) -> str | None:
    """Why a host cannot be reached. Runs in a thread: DNS lookup may take longer than a socket timeout."""
    answers: SimpleQueue[str] = SimpleQueue()
    look = threading.Thread(target=lambda: answers.put(unreachable(f"{host}:{port}", SECONDS)), daemon=True)
    look.start()
    try:
        why = answers.get(timeout=SECONDS)
    except Empty:
        return f"{host} does not answer within {SECONDS:g} s"
    return f"{host} cannot be reached ({why})" if why else None
