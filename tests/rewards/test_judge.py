"""The judge, asked over HTTP: a server of the standard library answers as an endpoint does, good or bad."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from hydraflow.errors import ConfigError
from hydraflow.rewards.config import JudgeConfig, RewardConfig
from hydraflow.rewards.pool import RewardPool, RewardResult, RewardRow, check_function

KEY = "judge-key-f00f"


class Endpoint(ThreadingHTTPServer):
    """Fails as often as `fails` has statuses, then gives each answer its score."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.asked: list[dict[str, Any]] = []
        self.keys: list[str | None] = []
        self.fails: list[int] = []
        self.under_way = self.most = 0
        self.lock = threading.Lock()


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Endpoint

    def do_POST(self) -> None:
        request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        with self.server.lock:
            status = self.server.fails.pop(0) if self.server.fails else 200
            self.server.asked.append({"path": self.path, **request})
            self.server.keys.append(self.headers["Authorization"])
            self.server.under_way += 1
            self.server.most = max(self.server.most, self.server.under_way)
        time.sleep(0.1)
        with self.server.lock:
            self.server.under_way -= 1
        text = request["messages"][0]["content"]
        answer = f"Fine. Score: 0. No: Score: {text.split()[-1]}" if "?" not in text else "Well"
        body = json.dumps({"choices": [{"message": {"role": "assistant", "content": answer}}]})
        if status != 200:
            body = f"no {KEY} no"
        self.send_response(status)
        self.send_header("Retry-After", "0.05")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body.encode())

    def log_message(self, *arguments: object) -> None:
        """Says nothing."""


@pytest.fixture
def endpoint() -> Iterator[Endpoint]:
    with Endpoint() as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield server
        server.shutdown()


def config(endpoint: Endpoint, **values: Any) -> RewardConfig:
    address = f"http://127.0.0.1:{endpoint.server_port}/v1"
    prompt = "{extra_info[question]} {ground_truth} {solution_str}"
    judge = JudgeConfig(**{"base_url": address, "model": "judge-7b", "prompt": prompt} | values)
    return RewardConfig(functions=[{"name": "judge"}], judge=judge, timeout=15.0, max_failed_share=1.0)


def scored(config: RewardConfig, *texts: str) -> list[RewardResult]:
    with RewardPool(config) as pool:
        pool.require_loaded()
        return pool.score([RewardRow("any", text, "truth", {"question": "6 * 7"}) for text in texts])


def test_the_last_score_of_the_answer_counts(endpoint: Endpoint) -> None:
    half, none = scored(config(endpoint, parameters={"max_tokens": 64}), "0.5", "What?")
    assert (half.score, half.extra) == (0.5, {"judge": 0.5, "acc": 0.5})
    assert "the judge's answer has no Score:" in str(none.failed) and "'Well'" in str(none.failed)
    asked = next(one for one in endpoint.asked if "0.5" in one["messages"][0]["content"])
    assert asked == {
        "path": "/v1/chat/completions",
        "model": "judge-7b",
        "max_tokens": 64,
        "messages": [{"role": "user", "content": "6 * 7 truth 0.5"}],
    }


def test_two_failures_then_an_answer(endpoint: Endpoint) -> None:
    endpoint.fails = [503, 429]
    (result,) = scored(config(endpoint), "1")
    assert (result.score, result.failed, len(endpoint.asked)) == (1.0, None, 3)


def test_what_stays_unanswered_fails_its_row_and_shows_no_key(
    endpoint: Endpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MY_JUDGE", KEY)
    endpoint.fails = [500, 500, 401]
    first, second = (
        scored(config(endpoint, max_retries=retries, api_key_env="MY_JUDGE"), "1")[0] for retries in (1, 5)
    )
    assert "did not answer: 500 Internal Server Error: no (hidden) no" in str(first.failed)
    assert "did not answer: 401 Unauthorized" in str(second.failed)  # asking again would not help
    assert KEY not in str(first.failed) + str(second.failed)
    assert endpoint.keys == [f"Bearer {KEY}"] * 3
    dead = config(endpoint, base_url="http://127.0.0.1:9/v1", max_retries=0)
    assert "did not answer: ConnectError" in str(scored(dead, "1")[0].failed)


def test_rows_are_asked_at_the_same_time(endpoint: Endpoint) -> None:
    settings = config(endpoint)
    settings.max_concurrent = 4
    results = scored(settings, *map(str, range(12)))
    assert [result.score for result in results] == list(range(12))
    assert endpoint.most == 4


def test_answers_are_kept_by_request(
    endpoint: Endpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MY_JUDGE", KEY)
    kept = {"cache_dir": str(tmp_path / "kept"), "api_key_env": "MY_JUDGE"}
    for _ in range(2):
        assert [one.score for one in scored(config(endpoint, **kept), "1", "2")] == [1.0, 2.0]
    assert len(endpoint.asked) == 2
    scored(config(endpoint, parameters={"temperature": 1.0}, **kept), "1")
    assert len(endpoint.asked) == 3
    for asked in (4, 5):  # an answer without a score is asked for again
        assert scored(config(endpoint, **kept), "What?")[0].failed and len(endpoint.asked) == asked
    words = {"pattern": r"Score: (\w+)", **kept}
    for asked in (6, 7):  # so is one whose score is no number
        assert scored(config(endpoint, **words), "high")[0].failed and len(endpoint.asked) == asked
    files = [path.read_text() for path in tmp_path.rglob("*.json")]
    assert len(files) == 3 and KEY not in "".join(files)
    for path in tmp_path.rglob("*.json"):
        path.write_text("{")
    assert scored(config(endpoint, **kept), "1")[0].score == 1.0


def test_a_row_without_what_the_prompt_names(endpoint: Endpoint) -> None:
    (result,) = scored(config(endpoint, prompt="{extra_info[level]} {solution_str}"), "1")
    assert "reward.judge.prompt: the row has no 'level'" in str(result.failed) and endpoint.asked == []


def test_a_key_that_is_nowhere_is_reported_before_the_start(endpoint: Endpoint) -> None:
    with pytest.raises(ConfigError, match="reward.judge.api_key_env=NOT_THERE: the environment has no such"):
        check_function(config(endpoint, api_key_env="NOT_THERE"))
