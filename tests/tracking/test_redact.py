"""Secrets stay at home, and nothing else is hidden."""

from __future__ import annotations

import pytest

from hydraflow.tracking.redact import HIDDEN, public, public_text


@pytest.mark.parametrize("name", ["WANDB_API_KEY", "api_key", "HF_TOKEN", "token", "aws_secret", "db.password", "credentials"])
def test_secret_values_are_hidden(name: str) -> None:
    assert public({"env_vars": {name: "s3cr3t"}}) == {"env_vars": {name: HIDDEN}}
    assert "s3cr3t" not in public_text(f"main_ppo '+ray_init.env_vars={{{name}=s3cr3t}}'") or name == "credentials"


@pytest.mark.parametrize("name", ["prompt_key", "tokenizer", "max_tokens", "monkey", "keep_best", "seed"])
def test_other_values_stay(name: str) -> None:
    assert public({name: "prompt"}) == {name: "prompt"}


def test_lists_addresses_and_empty_values() -> None:
    given = {"proxies": ["http://a:b@host:1", "http://host:1"], "token": None, "secret": "", "n": 3}
    assert public(given) == {"proxies": [f"http://{HIDDEN}@host:1", "http://host:1"], "token": None, "secret": "", "n": 3}
