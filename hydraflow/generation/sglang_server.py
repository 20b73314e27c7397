"""Runs an SGLang server for this process, and calls its HTTP API.

In: arguments of `python -m sglang.launch_server`, and JSON for its endpoints. Out: JSON, or an error that
contains the request, the answer, and the server's last lines. The server listens on 127.0.0.1 only and ends
with this process, however that ends. Some endpoints unpickle what they are sent, so the server requires a
key, which is in a private file because anyone can read command lines. Paths, fields and answers are those of
SGLang 0.5.23 (`http_server.py` of `sglang/srt/entrypoints/`, `io_struct.py` of `sglang/srt/managers/`,
`auth.py` of `sglang/srt/utils/`).
Left out on purpose: streams of tokens.
"""

from __future__ import annotations

import http.client
import json
import os
import secrets
import socket
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

from hydraflow.errors import EnvironmentFault
from hydraflow.redact import HIDDEN
from hydraflow.system.tether import Tethered

ADDRESS = "127.0.0.1"
HEALTH = "/health"
"""Answers 200 once the server has warmed up, and while its scheduler responds: it generates a token, or sees
that others are generated."""
HEALTH_SECONDS = 30.0
"""Timeout of one health check, in seconds; the server itself gives up after 20."""
POLL_SECONDS = 0.2
ENVIRONMENT = {
    # log-probabilities before the temperature, where it is set (`sglang/srt/layers/sampler.py`)
    "SGLANG_RETURN_ORIGINAL_LOGPROB": "false",
    # broken weights must show: otherwise logits that are not numbers are replaced
    "SGLANG_SANITIZE_NAN_LOGITS": "false",
    # its context is two tokens longer than the longest row (SPARE_TOKENS), perhaps longer than the model's
    "SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN": "true",
}
_DYING_SECONDS = 5.0
"""Seconds to wait for the server to exit after a broken connection."""
_TAIL_BYTES, _TAIL_LINES = 8192, 25


class RequestRefused(RuntimeError):
    """The server answered a request with an error."""


class SglangServer:
    """The server's process and its address."""

    def __init__(self, arguments: Sequence[str], *, folder: Path, start_seconds: float):
        """Starts it and waits until it is healthy. folder: for its log and its key, private to this user;
        removed with the server.

        EnvironmentFault: it has ended, or is not healthy after `start_seconds`.
        """
        self.over = False
        """Whether it was ended."""
        with socket.create_server((ADDRESS, 0)) as listening:
            self._port: int = listening.getsockname()[1]
        # kept open, because it is read after the folder is removed
        self._log = os.open(folder / "server.log", os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
        self._key, with_key = secrets.token_hex(32), folder / "server.yaml"
        with_key.touch(mode=0o600)
        with_key.write_text(f'api-key: "{self._key}"\n')
        command = [sys.executable, "-m", "sglang.launch_server", "--host", ADDRESS, "--port", str(self._port)]
        self._process = Tethered(
            [*command, "--config", str(with_key), *arguments],
            folder=folder,
            log=self._log,
            env=os.environ | ENVIRONMENT,
        )
        try:
            self._await_health(start_seconds)
        except BaseException:
            self.end()
            raise

    def post(self, path: str, body: Mapping[str, Any], *, seconds: float | None = None) -> Any:
        """The answer to a request; None if it is not JSON. seconds: the time limit; None: no limit.

        RequestRefused: with the server's message. EnvironmentFault: it gave no answer, or has ended.
        """
        try:
            status, content, kind = self._exchange("POST", path, json.dumps(body), seconds)
        except TimeoutError:
            self.give_up(f"gave no answer to {path} within {seconds:g} seconds")
        except (OSError, http.client.HTTPException) as error:
            if how := self._process.ended(_DYING_SECONDS):
                self.give_up(f"ended ({how}) before it answered {path}")
            self.give_up(f"closed the connection before it answered {path}: {error}")
        if status != http.client.OK:
            raise RequestRefused(f"SGLang refused {path} ({status}): {_error_text(content)}")
        return json.loads(content) if kind.startswith("application/json") else None

    def is_healthy(self) -> bool:
        """Whether it answers. EnvironmentFault: it has ended."""
        if how := self._process.ended():
            self.give_up(f"ended ({how})")
        return self._health_answer(HEALTH_SECONDS) == "200"

    def give_up(self, why: str) -> NoReturn:
        """Ends the server, and raises EnvironmentFault with what it printed last."""
        self.end()
        lines = self._last_lines()
        printed = f"; it printed last:\n{lines}" if lines else "; it printed nothing"
        raise EnvironmentFault(f"SGLang's server {why}{printed}")

    def end(self) -> None:
        """Ends it and all of its processes."""
        self.over = True
        self._process.end()

    def _await_health(self, seconds: float) -> None:
        deadline, answer = time.monotonic() + seconds, ""
        while (left := deadline - time.monotonic()) > 0:
            if how := self._process.ended():
                self.give_up(f"ended ({how}) before it was healthy")
            if (answer := self._health_answer(min(left, HEALTH_SECONDS))) == "200":
                return
            time.sleep(POLL_SECONDS)
        url = f"http://{ADDRESS}:{self._port}{HEALTH}"
        self.give_up(
            f"was not healthy within {seconds:g} seconds, the limit from trainer.start_timeout; the last"
            f" answer of {url} was {answer or 'none'}"
        )

    def _health_answer(self, seconds: float) -> str:
        """What its health endpoint says: a status, or why it does not answer."""
        try:
            return str(self._exchange("GET", HEALTH, None, seconds)[0])
        except (OSError, http.client.HTTPException) as error:
            return str(error)

    def _exchange(
        self, method: str, path: str, body: str | None, seconds: float | None
    ) -> tuple[int, bytes, str]:
        """Status, content and its type."""
        connection = http.client.HTTPConnection(ADDRESS, self._port, timeout=seconds)
        try:
            headers = {"Content-Type": "application/json", "Authorization": f"Bearer {self._key}"}
            connection.request(method, path, body, headers)
            answer = connection.getresponse()
            return answer.status, answer.read(), answer.getheader("Content-Type", "")
        finally:
            connection.close()

    def _last_lines(self) -> str:
        start = max(0, os.fstat(self._log).st_size - _TAIL_BYTES)
        text = os.pread(self._log, _TAIL_BYTES, start).decode(errors="replace").replace(self._key, HIDDEN)
        return "\n".join(f"  {line}" for line in text.strip().splitlines()[-_TAIL_LINES:])


def flags(arguments: Mapping[str, Any]) -> list[str]:
    """Arguments of a command line. None and false leave one out; a mapping is written as JSON.

    >>> flags({"tp_size": 2, "enable_memory_saver": True, "quantization": None, "lora_paths": ["a", "b"]})
    ['--tp-size', '2', '--enable-memory-saver', '--lora-paths', 'a', 'b']
    """
    found: list[str] = []
    for name, value in arguments.items():
        if value is None or value is False:
            continue
        found.append(f"--{name.replace('_', '-')}")
        if isinstance(value, Mapping):
            found.append(json.dumps(value))
        elif value is not True:
            found += map(str, value if isinstance(value, list | tuple) else [value])
    return found


def _error_text(content: bytes) -> str:
    """The message of an error response: {"error": {"message": ...}}, {"error": ...}, {"message": ...},
    {"detail": ...}, or text."""
    text = content.decode(errors="replace").strip()
    try:
        parsed = json.loads(text)
    except json.JSONDecodeError:
        return text
    for name in ("error", "message", "detail"):
        if isinstance(parsed, dict) and name in parsed:
            parsed = parsed[name]
    return str(parsed)
