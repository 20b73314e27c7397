"""Secrets are hidden wherever they are, and nothing else is."""

from __future__ import annotations

from dataclasses import asdict

import pytest

from hydraflow.redact import HIDDEN, fingerprinted, public, public_command, public_text, public_word
from hydraflow.schema import EvalConfig, GenerateConfig, PPOConfig, SFTConfig

SECRET_NAMES = [
    *(
        "WANDB_API_KEY",
        "api_key",
        "HF_TOKEN",
        "token",
        "aws_secret",
        "password",
        "credentials",
        "AWS_SECRET_ACCESS_KEY",
    ),
    *(
        "MYSQL_PWD",
        "DB_PASS",
        "PASSPHRASE",
        "accessToken",
        "openaiApiKey",
        "HFTOKEN",
        "OPENAI_KEYS",
        "HF_TOKENS",
        "GITHUB_PAT",
    ),
    *(
        "SLURM_JWT",
        "COOKIE",
        "TLS_PEM",
        "CONNECTION_STRING",
        "AWS_ACCESS_KEY_ID",
        "AWS_SESSION_TOKEN",
        "X-Amz-Signature",
        "x-api-key",
    ),
    *("Authorization", "basic_auth", "ssh-private-key", "apikey", "client.secret", "token2"),
]
PUBLIC_NAMES = [
    *(
        "prompt_key",
        "tokenizer",
        "tokenizer_path",
        "max_tokens",
        "monkey",
        "keep_best",
        "seed",
        "eos_token",
        "pad_token_id",
        "stop_tokens",
    ),
    *(
        "num_key_value_heads",
        "keyboard",
        "PWD",
        "OLDPWD",
        "RAY_AUTH_TOKEN_PATH",
        "ssl_keyfile",
        "passes",
        "design",
        "path",
        "author",
    ),
]
LOOK_SECRET = [
    "hf_" + "aB3" * 11,
    "sk-proj-" + "a1B2" * 8,
    "ghp_" + "a1" * 18,
    "github_pat_" + "a1" * 20,
    "AKIA" + "ABCD1234" * 2,
    "eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiIxIn0.c2lnbmF0dXJl",
    "-----BEGIN RSA PRIVATE KEY-----\nMIIabc\n-----END RSA PRIVATE KEY-----",
    "Bearer abc.def-123",
]


@pytest.mark.parametrize("name", SECRET_NAMES)
def test_values_of_secret_names_are_hidden(name: str) -> None:
    assert public("s3cr3t", name) == HIDDEN
    assert public({name: {"inner": ["s3cr3t", "t00"]}}) == {name: {"inner": [HIDDEN, HIDDEN]}}


@pytest.mark.parametrize("name", ["PASSWORD", "HF_TOKEN", "api_key"])
def test_numbers_under_secret_names_are_hidden_too(name: str) -> None:
    assert public({name: 12345}) == {name: HIDDEN}


@pytest.mark.parametrize("name", PUBLIC_NAMES)
def test_other_values_stay(name: str) -> None:
    assert public({name: "prompt" if name != "max_tokens" else 512}) == {
        name: "prompt" if name != "max_tokens" else 512
    }
    value = "512" if name == "max_tokens" else "prompt"
    for word in (f"data.{name}={value}", f"data={{{name}:{value},a: b}}"):
        assert public_word(word) == public_text(word) == word


@pytest.mark.parametrize("schema", [PPOConfig, SFTConfig, GenerateConfig, EvalConfig])
def test_nothing_of_a_default_configuration_is_hidden(schema: type) -> None:
    defaults = asdict(schema())
    assert public(defaults) == defaults == fingerprinted(defaults)


def test_long_words_hide_as_short_ones_do() -> None:
    text = public_text(f"{'x' * 300}_password=hunter2 {'a' * 300}b-api_key=hunter3 {'a:' * 20_000}")
    assert "hunter" not in text


def test_ordinary_keys_with_ordinary_values_stay() -> None:
    config = PPOConfig()
    config.actor_rollout_ref.model.path, config.data.train_files = (
        "Qwen/Qwen3-8B",
        ["/data/a.parquet", "s3://bucket/b"],
    )
    config.trainer.wandb_proxy, config.trainer.keep_best = (
        "http://proxy:3128",
        "val-core/arithmetic/acc/mean@1",
    )
    config.actor_rollout_ref.actor.checkpoint.save_contents = ["model", "hf_model"]
    config.actor_rollout_ref.model.override_config = {
        "pad_token_id": 0,
        "bos_token": "<s>",
        "num_key_value_heads": 2,
    }
    config.reward.custom_reward_function.reward_kwargs = {
        "max_tokens": 512,
        "sort_keys": True,
        "tokens": [1, 2],
    }
    assert public(asdict(config)) == asdict(config)


def test_below_environment_variables_everything_is_hidden() -> None:
    given = {"runtime_env": {"env_vars": {"NCCL_DEBUG": "INFO", "A": 1, "B": ""}}}
    assert public(given) == {"runtime_env": {"env_vars": {"NCCL_DEBUG": HIDDEN, "A": HIDDEN, "B": ""}}}
    assert public("INFO", "ray_init.runtime_env.env_vars.NCCL_DEBUG") == HIDDEN
    assert (
        public_word("+ray_init.runtime_env.env_vars.A=two words")
        == f"+ray_init.runtime_env.env_vars.A={HIDDEN}"
    )
    assert public("abc", "hydra.job.env_set.A") == HIDDEN


@pytest.mark.parametrize("value", LOOK_SECRET)
@pytest.mark.parametrize(
    "form", ["{}", "+reward.kwargs.judge={}", "failed with {} at once", "a={{b: {}}}", "https://host/{}/x"]
)
def test_what_looks_like_a_credential_is_hidden_under_any_name(value: str, form: str) -> None:
    for shown in (
        public_text(form.format(value)),
        public_word(form.format(value)),
        public({"judge": form.format(value)})["judge"],
    ):
        assert HIDDEN in shown and value[8:] not in shown


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("x.url=https://h/?token=S3", f"x.url=https://h/?token={HIDDEN}"),
        ("x.url=https://h/?n=1&sig=S3", f"x.url=https://h/?n=1&sig={HIDDEN}"),
        ("https://h/b?n=1&key=S3", f"https://h/b?n=1&key={HIDDEN}"),
        ("https://h/b?X-Amz-Signature=S3", f"https://h/b?X-Amz-Signature={HIDDEN}"),
        ("reward_kwargs={url:https://h/?api_key=S3}", f"reward_kwargs={{url:https://h/?api_key={HIDDEN}}}"),
        ("x={PASSWORD: two words}", f"x={{PASSWORD: {HIDDEN}}}"),
        ("x={DB_PASSWORD:ab'cd}", f"x={{DB_PASSWORD:{HIDDEN}}}"),
        ("x={HF_TOKEN : S3,a: b}", f"x={{HF_TOKEN : {HIDDEN},a: b}}"),
        (r"x={PASSWORD:a\,b,c:d}", f"x={{PASSWORD:{HIDDEN},c:d}}"),
        ('{"HF_TOKEN": "a, b", "n": 1}', f'{{"HF_TOKEN": {HIDDEN}, "n": 1}}'),
        ("http://user:pa/ss@host:1/x", f"http://{HIDDEN}@host:1/x"),
        ("http://me:s3@s3@host", f"http://{HIDDEN}@host"),
        ("proxy user:pass@host:3128", f"proxy {HIDDEN}@host:3128"),
        ("Authorization: Bearer abcdef", f"Authorization: {HIDDEN}"),
        ("--export=ALL,HF_TOKEN=S3", f"--export=ALL,HF_TOKEN={HIDDEN}"),
        ("PermissionError: api_key='S3' is not known", f"PermissionError: api_key={HIDDEN} is not known"),
    ],
)
def test_secrets_inside_of_text(text: str, shown: str) -> None:
    assert public_text(text) == shown == public_word(text)


@pytest.mark.parametrize(
    "text",
    [
        "unknown key: foo",
        "the tokenizer has no pad token: name one",
        "KeyError: 'prompt'",
        "is not key=value; submit --multirun ... -- key=a,b",
        "http://host:8080/a@b and git@github.com:org/repo",
        "val-core/arithmetic/acc/mean@1 at 12:30",
        "pyxis:nvcr.io#nvidia/pytorch:23.10@sha256:0123abcd",
        "task-specific-1234-heads hf_model hf_modules",
        "set ray_init.runtime_env.env_vars={NCCL_DEBUG: INFO}",
        "WANDB_API_KEY=... or HF_TOKEN=${oc.env:HF_TOKEN}",
        (
            "python -m hydraflow.main_ppo data.train_batch_size=64 'trainer.logger=[console,wandb]' +a.b={c:"
            " 1, d: [e, f]}"
        ),
    ],
)
def test_ordinary_text_stays(text: str) -> None:
    assert public_text(text) == text


@pytest.mark.parametrize("name", ["WANDB_API_KEY", "password", "openaiApiKey"])
@pytest.mark.parametrize(
    "word",
    [
        "+a.{}=s3cr3t",
        "{}=s3cr3t and s3cr3t more",
        "++a.{}=[s3cr3t, s3cr3t]",
        "a={{b: 1, '{}': 's3cr3t and s3cr3t'}}",
    ],
)
def test_the_words_of_a_command_say_no_secrets(word: str, name: str) -> None:
    shown = public_word(word.format(name))
    assert "s3cr3t" not in shown and HIDDEN in shown and name in shown


def test_lists_addresses_references_and_empty_values() -> None:
    given = {
        "proxies": ["http://a:b@host:1", "http://host:1"],
        "token": None,
        "secret": "",
        "n": 3,
        "api_key": "${oc.env:KEY}",
    }
    assert public(given) == given | {"proxies": [f"http://{HIDDEN}@host:1", "http://host:1"]}
    assert public("${oc.env:KEY,s3cr3t}", "api_key") == HIDDEN, "a default may be one"
    assert public("http://me:it's s3/cr@et@host:1", "wandb_proxy") == f"http://{HIDDEN}@host:1"
    assert public("http://host:1/a b@c") == "http://host:1/a b@c"


def test_a_command_of_an_earlier_version() -> None:
    assert (
        public_command("main 'x.PASSWORD=two words' data.seed=1") == f"main 'x.PASSWORD={HIDDEN}' data.seed=1"
    )
    assert public_command("main 'x.PASSWORD=two") == f"main 'x.PASSWORD={HIDDEN}", "what no shell takes"


def test_fingerprints_tell_secrets_apart_and_give_none_away() -> None:
    one, other = (
        fingerprinted({"api_key": value, "seed": 1, "url": f"http://u:{value}@h"}, "judge")
        for value in ("s3cr3t", "t00")
    )
    assert one["api_key"] != other["api_key"] and one["url"] != other["url"] and one["seed"] == 1
    assert "s3cr3t" not in str(one) and one["url"].startswith(f"http://{HIDDEN}@h #")
    assert fingerprinted(one, "judge") == one, "once is enough"
    assert public(one, "judge") == {"api_key": HIDDEN, "seed": 1, "url": f"http://{HIDDEN}@h"}


@pytest.mark.parametrize("text", ["a.api_key=(hidden)", "api_key=(hidden), b=1", "{api_key: (hidden)}"])
def test_what_is_hidden_stays_as_it_is(text: str) -> None:
    assert public_text(text) == text


def test_long_secrets_of_addresses_are_hidden_and_long_texts_take_no_quadratic_time() -> None:
    secret = "s" * 5000
    assert secret not in public_text(f"see https://user:{secret}@host/x and https://{secret}@host/y")
    public_text("x://a:" * 20_000)
