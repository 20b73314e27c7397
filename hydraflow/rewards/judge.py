"""LLM as a judge: one chat request per row to any OpenAI-compatible endpoint.

In: a row and the section `reward.judge`. Out: the number in the model's answer. If there is none, the row
fails with the reason. Answers with a score may be cached on disk, one file per distinct request; the API key
appears in no file and no message.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import random
import re
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

import httpx2

from hydraflow.redact import HIDDEN, public_text
from hydraflow.rewards.config import JudgeConfig
from hydraflow.rewards.selection import key_of
from hydraflow.system.paths import expanded
from hydraflow.system.whole_files import replacing

FIRST_WAIT, MOST_WAIT = 0.5, 30.0
"""Seconds before the first retry, and maximum wait."""
MOST_SHOWN = 200
"""Characters of an endpoint's answer in messages."""


class JudgeError(Exception):
    """A row could not be judged; the message says why."""


async def judged(
    data_source: str,
    solution_str: str,
    ground_truth: Any,
    extra_info: Mapping[str, Any],
    *,
    judge: JudgeConfig,
) -> float:
    """The last match of `judge.pattern` in the model's answer, as a number. Raises `JudgeError`."""
    row = {"data_source": data_source, "solution_str": solution_str, "ground_truth": ground_truth}
    try:
        prompt = judge.prompt.format(**row, extra_info=extra_info)
    except (LookupError, AttributeError) as error:
        raise JudgeError(f"reward.judge.prompt: the row has no {error}") from error
    request = {"model": judge.model, "messages": [{"role": "user", "content": prompt}], **judge.parameters}
    cache_file = _cache_file(judge, request)
    cached = _cached_answer(cache_file)
    answer = await _ask(judge, request) if cached is None else cached
    if not (found := re.findall(judge.pattern, answer)):
        raise JudgeError(f"the judge's answer has no {judge.pattern}: {answer[-MOST_SHOWN:]!r}")
    score = float(found[-1])
    if cached is None:
        _write_cache(cache_file, request, answer)
    return score


async def _ask(judge: JudgeConfig, request: Mapping[str, Any]) -> str:
    """The model's answer, after at most `judge.max_retries` retries."""
    client, wait = _client(judge.base_url or "", judge.api_key_env, judge.timeout), FIRST_WAIT
    for left in range(judge.max_retries, -1, -1):
        asked_for = None
        try:
            response = await client.post("chat/completions", json=request)
            if response.is_success:
                return _content(judge, response)
            reason = f"{response.status_code} {response.reason_phrase}: {response.text[:MOST_SHOWN]}"
            asked_for = response.headers.get("retry-after")
            final = response.status_code not in (408, 409, 429) and response.status_code < 500
        except httpx2.TransportError as error:
            reason, final = f"{type(error).__name__}: {error}", False
        if final or not left:
            raise JudgeError(_shown(judge, f"the judge at {judge.base_url} did not answer: {reason}"))
        # random, so that rows that failed together do not retry together
        await asyncio.sleep(min(_seconds(asked_for, wait * random.uniform(1.0, 1.25)), MOST_WAIT))
        wait *= 2
    raise AssertionError("the last attempt returns or raises")


def _content(judge: JudgeConfig, response: httpx2.Response) -> str:
    try:
        content = response.json()["choices"][0]["message"]["content"]
    except (ValueError, LookupError, TypeError) as error:
        what = f"the judge's answer is not a chat completion: {response.text[:MOST_SHOWN]}"
        raise JudgeError(_shown(judge, what)) from error
    if not isinstance(content, str):
        raise JudgeError("the judge's answer has no text")
    return content


def _shown(judge: JudgeConfig, text: str) -> str:
    """The text without secrets: some endpoints repeat an unknown key."""
    if judge.api_key_env is not None:
        text = text.replace(key_of(judge.api_key_env), HIDDEN)
    return public_text(text)


def _seconds(asked_for: str | None, otherwise: float) -> float:
    try:
        return max(0.0, float(asked_for or ""))
    except ValueError:  # none, or a date
        return otherwise


@cache
def _client(base_url: str, key_env: str | None, timeout: float) -> httpx2.AsyncClient:
    """One client per process: it keeps connections, and belongs to the process's event loop."""
    headers = {"Authorization": f"Bearer {key_of(key_env)}"} if key_env else {}
    limits = httpx2.Limits(max_connections=None, max_keepalive_connections=None)
    return httpx2.AsyncClient(
        base_url=base_url.rstrip("/") + "/", headers=headers, timeout=timeout, limits=limits
    )


def _cache_file(judge: JudgeConfig, request: Mapping[str, Any]) -> Path | None:
    if judge.cache_dir is None:
        return None
    text = json.dumps([judge.base_url, request], sort_keys=True)
    name = hashlib.sha256(text.encode(errors="surrogatepass")).hexdigest()
    return expanded(judge.cache_dir) / name[:2] / f"{name}.json"


def _cached_answer(path: Path | None) -> str | None:
    try:
        content = json.loads(path.read_text())["answer"] if path else None
    except (OSError, ValueError, LookupError, TypeError):  # missing or incomplete: ask again
        return None
    return content if isinstance(content, str) else None


def _write_cache(path: Path | None, request: Mapping[str, Any], answer: str) -> None:
    if path is None:
        return
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with replacing(path) as unfinished:
            unfinished.write_text(json.dumps({"request": request, "answer": answer}))
    except OSError as error:
        raise JudgeError(f"reward.judge.cache_dir: {path} cannot be written: {error.strerror}") from error
