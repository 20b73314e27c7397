"""A name on the hub is refused within seconds where nothing can be downloaded."""

from __future__ import annotations

import socket
import time
from pathlib import Path

import huggingface_hub.constants
import pytest
from transformers import LlamaConfig

from hydraflow.errors import ConfigError
from hydraflow.models import cache
from hydraflow.models.config import ModelConfig
from hydraflow.models.loading import load_config, load_tokenizer

NAME = "nobody/no-such-model-anywhere"


@pytest.fixture(autouse=True)
def no_network_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (*cache.PROXIES, "HF_HUB_OFFLINE", "HF_ENDPOINT"):
        monkeypatch.delenv(name, raising=False)
    cache._unreachable.cache_clear()


def closed_port() -> int:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        return int(taken.getsockname()[1])


def test_a_hub_that_cannot_be_reached_is_said_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{closed_port()}")
    began = time.monotonic()
    with pytest.raises(ConfigError) as raised:
        load_config(ModelConfig(path=NAME))
    assert time.monotonic() - began < 10
    [problem] = raised.value.problems
    assert (problem.field, problem.value) == ("actor_rollout_ref.model.path", NAME)
    assert "127.0.0.1 cannot be reached (Connection refused)" in problem.rule
    assert "<folder with the model>" in problem.remedy and f"hf download {NAME}" in problem.remedy


def test_a_hub_that_does_not_answer_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache, "SECONDS", 0.2)
    monkeypatch.setattr(cache, "unreachable", lambda address, seconds: time.sleep(1))
    assert cache.hub_fault() == "huggingface.co does not answer within 0.2 s"


def test_offline_is_offline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(ConfigError, match="tokenizer_path=nobody.*HF_HUB_OFFLINE is set"):
        load_tokenizer(ModelConfig(path="/nowhere", tokenizer_path=NAME))


def test_a_hub_that_answers_and_a_proxy_are_no_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{server.getsockname()[1]}")
        assert cache.hub_fault() is None
    monkeypatch.setenv("HTTPS_PROXY", "http://proxy.example:8080")
    monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{closed_port()}")
    assert cache.hub_fault() is None


def test_a_cached_model_is_loaded_at_once_where_the_hub_cannot_be_reached(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{closed_port()}")
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    folder = tmp_path / f"models--{NAME.replace('/', '--')}"
    (folder / "refs").mkdir(parents=True)
    (folder / "refs" / "main").write_text("abc")
    LlamaConfig(hidden_size=64).save_pretrained(folder / "snapshots" / "abc")
    began = time.monotonic()
    assert load_config(ModelConfig(path=NAME)).hidden_size == 64
    assert time.monotonic() - began < 10


@pytest.mark.parametrize("address", ["mirror.example.com", "https://mirror:abc", "http://[::1"])
def test_an_endpoint_that_is_no_address_is_named(address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_ENDPOINT", address)
    assert cache.hub_fault() == f"HF_ENDPOINT={address} is not an address"
