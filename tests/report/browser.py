"""A real Chromium without a window, spoken to over its debugging port: opens a page, runs expressions in it,
hears its console."""

from __future__ import annotations

import asyncio
import json
import re
import shutil
import subprocess
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import aiohttp

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
BROWSER = next((found for name in NAMES if (found := shutil.which(name))), None)
FLAGS = (
    "--headless=new",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--no-first-run",
    "--remote-debugging-port=0",
)
START_SECONDS, ANSWER_SECONDS = 120.0, 60.0


def visit(page: Path, expressions: Sequence[str]) -> tuple[list[Any], list[str]]:
    """The value of each expression in the page once it has drawn, and everything that the console said
    meanwhile."""
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as home:
        command = [str(BROWSER), *FLAGS, f"--user-data-dir={home}", "--window-size=1400,1000", "about:blank"]
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        try:
            port = _port(Path(home) / "DevToolsActivePort", process)
            return asyncio.run(_talk(port, page.as_uri(), expressions))
        finally:
            process.kill()
            process.wait()


def _port(file: Path, process: subprocess.Popen[bytes]) -> int:
    """The port on which the browser listens, once it has written it."""
    deadline = time.monotonic() + START_SECONDS
    while time.monotonic() < deadline and process.poll() is None:
        if file.exists() and re.match(r"\d+\n", text := file.read_text()):
            return int(text.split()[0])
        time.sleep(0.05)
    raise AssertionError(
        f"the browser did not open its debugging port within {START_SECONDS} s (exit code {process.poll()})"
    )


async def _talk(port: int, address: str, expressions: Sequence[str]) -> tuple[list[Any], list[str]]:
    async with aiohttp.ClientSession() as session:
        async with session.get(f"http://127.0.0.1:{port}/json/list") as answer:
            target = next(one for one in await answer.json() if one["type"] == "page")
        async with session.ws_connect(target["webSocketDebuggerUrl"], max_msg_size=0) as socket:
            tab = Tab(socket)
            for domain in ("Page", "Runtime", "Log"):
                await tab.call(f"{domain}.enable")
            await tab.call("Page.navigate", url=address)
            await tab.evaluate(
                "new Promise(done => document.readyState === 'complete' ? done() : addEventListener('load',"
                " done))"
            )
            return [await tab.evaluate(expression) for expression in expressions], tab.console


class Tab:
    """One page's end of the conversation."""

    def __init__(self, socket: aiohttp.ClientWebSocketResponse):
        self._socket, self._last = socket, 0
        self.console: list[str] = []

    async def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        """The answer to a command; what the console says before it is kept."""
        self._last += 1
        await self._socket.send_json({"id": self._last, "method": method, "params": parameters})
        while True:
            message = json.loads((await asyncio.wait_for(self._socket.receive(), ANSWER_SECONDS)).data)
            if message.get("method") in (
                "Runtime.exceptionThrown",
                "Runtime.consoleAPICalled",
                "Log.entryAdded",
            ):
                self.console.append(json.dumps(message["params"])[:500])
            if message.get("id") == self._last:
                assert "error" not in message, message
                return dict(message["result"])

    async def evaluate(self, expression: str) -> Any:
        """The value of a JavaScript expression in the page."""
        found = await self.call(
            "Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True
        )
        assert "exceptionDetails" not in found, (expression, found["exceptionDetails"])
        return found["result"].get("value")
