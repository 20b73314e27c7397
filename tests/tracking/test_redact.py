"""Secrets stay at home, and nothing else is hidden."""

from __future__ import annotations

import pytest

from hydraflow.tracking.redact import HIDDEN, public, public_text


@pytest.mark.parametrize(
    "name", ["WANDB_API_KEY", "api_key", "HF_TOKEN", "token", "aws_secret", "db.password", "credentials", "AWS_SECRET_ACCESS_KEY"]
)
def test_secret_values_are_hidden(name: str) -> None:
    assert public({"env_vars": {name: "s3cr3t"}}) == {"env_vars": {name: HIDDEN}}
    assert public({name: {"inner": ["s3cr3t", 12345]}}) == {name: {"inner": [HIDDEN, HIDDEN]}}


@pytest.mark.parametrize("name", ["WANDB_API_KEY", "AWS_SECRET_ACCESS_KEY", "HF_TOKEN", "password"])
@pytest.mark.parametrize(
    "word",
    [
        "+ray_init.runtime_env.env_vars.{}=s3cr3t",
        "{}=s3cr3t and s3cr3t more",
        "++a.{}=[s3cr3t, s3cr3t]",
        "a={{{}:s3cr3t,b:1}}",
        "a={{b: 1, '{}': 's3cr3t and s3cr3t'}}",
        'a={{"{}": "s3cr3t"}}',
        "http://me:s3cr3t@s3cr3t@host/{}",
    ],
)
def test_the_words_of_a_command_say_no_secrets(word: str, name: str) -> None:
    shown = public_text(word.format(name))
    assert "s3cr3t" not in shown and HIDDEN in shown and name in shown


@pytest.mark.parametrize("name", ["prompt_key", "tokenizer", "max_tokens", "monkey", "keep_best", "seed"])
def test_other_values_stay(name: str) -> None:
    assert public({name: "prompt"}) == {name: "prompt"}
    for word in (f"data.{name}=prompt", f"data={{{name}:prompt,a: b}}"):
        assert public_text(word) == word


def test_lists_addresses_and_empty_values() -> None:
    given = {"proxies": ["http://a:b@host:1", "http://host:1"], "token": None, "secret": "", "n": 3}
    assert public(given) == {"proxies": [f"http://{HIDDEN}@host:1", "http://host:1"], "token": None, "secret": "", "n": 3}
