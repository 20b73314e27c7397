"""As much of W&B's server as a run talks to: it answers that there is such a project, and keeps the rows that
are sent."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

BUCKET = {"id": "r", "name": "x", "displayName": "x", "sweepName": None, "historyLineCount": 0}
PROJECT = {"id": "p", "name": "sums", "entity": {"id": "e", "name": "me"}}
ANSWER = {
    "viewer": {"id": "v", "entity": "me", "username": "me", "flags": "{}", "teams": {"edges": []}},
    "serverInfo": {"features": []},
    "model": {"bucket": None},
    "upsertBucket": {"bucket": {**BUCKET, "project": PROJECT}, "inserted": True},
    "createRunFiles": {"runID": "r", "uploadHeaders": [], "files": []},
}
"""To every query: W&B takes what it asked for."""


class Server(ThreadingHTTPServer):
    """Listens on 127.0.0.1."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.rows: list[dict[str, Any]] = []
        self.exit_code: int | None = None

    @property
    def address(self) -> str:
        """As WANDB_BASE_URL has it."""
        return f"http://127.0.0.1:{self.server_port}"

    def take(self, path: str, body: dict[str, Any]) -> None:
        """Keeps what a run streams."""
        if path.endswith("/file_stream"):
            lines = body.get("files", {}).get("wandb-history.jsonl", {}).get("content", [])
            self.rows += [json.loads(line) for line in lines]
            self.exit_code = body.get("exitcode", self.exit_code)


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_POST(self) -> None:
        """Answers a query, or a piece of a run's stream."""
        assert isinstance(self.server, Server)
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        if not self.path.startswith("/graphql"):
            self.server.take(self.path, json.loads(body or b"{}"))
        answer = json.dumps({"data": ANSWER} if self.path.startswith("/graphql") else {"limits": {}}).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(answer)))
        self.end_headers()
        self.wfile.write(answer)

    def log_message(self, format: str, *args: Any) -> None:
        """Says nothing."""


@contextmanager
def serving() -> Iterator[Server]:
    """A server, in a thread of this process."""
    server = Server()
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()
