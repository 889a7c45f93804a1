"""A real headless Chromium, driven over its debugging port. `find()` None: there is none on this machine."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import itertools
import json
import shutil
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome", "headless_shell")
START_S = 60.0
ANSWER_S = 30.0


def find() -> str | None:
    return next(filter(None, map(shutil.which, NAMES)), None)


class Browser:
    """One tab. Messages that came of the page are in `logged`: errors, violations of its policy, console lines."""

    def __init__(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        self._socket = socket
        self._ids = itertools.count(1)
        self._loads = 0
        self.logged: list[str] = []

    async def call(self, method: str, **params: Any) -> dict[str, Any]:
        number = next(self._ids)
        await self._socket.send_json({"id": number, "method": method, "params": params})
        async with asyncio.timeout(ANSWER_S):
            while True:
                answer = await self._next()
                if answer.get("id") == number:
                    assert "error" not in answer, answer["error"]
                    return answer["result"]

    async def _next(self) -> dict[str, Any]:
        message = await self._socket.receive_json()
        if message.get("method") in ("Runtime.exceptionThrown", "Runtime.consoleAPICalled", "Log.entryAdded"):
            self.logged.append(json.dumps(message["params"]))
        self._loads += message.get("method") == "Page.loadEventFired"
        return message

    async def run(self, script: str) -> Any:
        """The value of a JavaScript expression, of a promise once it is there."""
        found = await self.call("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in found, found["exceptionDetails"]
        return found["result"].get("value")

    async def open(self, url: str) -> None:
        """Returns when it has loaded."""
        loads = self._loads
        await self.call("Page.navigate", url=url)
        async with asyncio.timeout(ANSWER_S):
            while self._loads == loads:
                await self._next()

    async def until(self, script: str) -> None:
        """Until the page says that this is true: looked at when it draws."""
        async with asyncio.timeout(ANSWER_S):
            while not await self.run(script):
                await self.run("new Promise((done) => setTimeout(done, 50))")

    async def screenshot(self) -> bytes:
        """PNG."""
        shot = await self.call("Page.captureScreenshot", format="png", captureBeyondViewport=True)
        return base64.b64decode(shot["data"])


@contextlib.asynccontextmanager
async def browsing(program: str, profile: Path, width: int = 1280, height: int = 860) -> AsyncIterator[Browser]:
    """`profile`: an empty folder for it."""
    process = await asyncio.create_subprocess_exec(
        program,
        *("--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run"),
        *("--disable-background-networking", "--disable-extensions", "--disable-sync", "--remote-debugging-port=0"),
        *(f"--user-data-dir={profile}", f"--window-size={width},{height}", "about:blank"),
        stdout=asyncio.subprocess.DEVNULL,
        stderr=asyncio.subprocess.PIPE,
    )
    try:
        assert process.stderr is not None
        async with asyncio.timeout(START_S):
            while not (line := await process.stderr.readline()).startswith(b"DevTools listening on "):
                assert line, "the browser ended"
        reading = asyncio.create_task(process.stderr.read())
        base = "http://" + line.split()[-1].decode().removeprefix("ws://").split("/")[0]
        async with aiohttp.ClientSession() as session:
            async with session.put(f"{base}/json/new?about:blank") as response:
                address = (await response.json(content_type=None))["webSocketDebuggerUrl"]
            async with session.ws_connect(address, max_msg_size=0) as socket:
                browser = Browser(socket)
                for domain in ("Page", "Runtime", "Log"):
                    await browser.call(f"{domain}.enable")
                yield browser
        reading.cancel()
        await asyncio.gather(reading, return_exceptions=True)
    finally:
        if process.returncode is None:
            process.terminate()
        await process.wait()
