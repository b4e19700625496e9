"""A headless chromium, driven by its own remote protocol over a websocket; no driver, no library.

Protocol: https://chromedevtools.github.io/devtools-protocol/
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import itertools
import os
import shutil
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from dashboard_kit import Imagined

from node.monitor.api import ApiServer, make_app

PATIENCE_S = 60.0
CHROMIUM = next(
    (
        path
        for name in ("chromium", "chromium-browser", "google-chrome")
        if (path := shutil.which(name))
    ),
    "",
)


IN_A_BROWSER = [
    pytest.mark.browser,
    pytest.mark.timeout(240),
    pytest.mark.skipif(not CHROMIUM, reason="no chromium on this machine"),
]
FILLED = "document.documentElement.dataset.filled"
UPDATES = "Number(document.documentElement.dataset.updates ?? 0)"


class Page:
    """One tab. ``errors`` collects what its console and its network complain of."""

    def __init__(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        self.errors: list[str] = []
        self._socket = socket
        self._numbers = itertools.count(1)
        self._waiting: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self._loaded = asyncio.Event()

    async def listen(self) -> None:
        """Take answers and events until the tab is gone."""
        async for message in self._socket:
            if message.type is not aiohttp.WSMsgType.TEXT:
                break
            said = message.json()
            if "id" in said:
                if not (answer := self._waiting.pop(said["id"])).done():
                    answer.set_result(said)
            else:
                self._note(said["method"], said["params"])

    def _note(self, method: str, params: dict[str, Any]) -> None:
        if method == "Page.loadEventFired":
            self._loaded.set()
        elif method == "Runtime.exceptionThrown":
            details = params["exceptionDetails"]
            self.errors.append(str(details.get("exception", details)))
        elif method == "Runtime.consoleAPICalled" and params["type"] in ("error", "warning"):
            self.errors.append(str(params["args"]))
        elif method == "Log.entryAdded" and params["entry"]["level"] in ("error", "warning"):
            self.errors.append(f"{params['entry']['text']} {params['entry'].get('url', '')}")

    async def send(self, method: str, **params: Any) -> dict[str, Any]:
        """One command; its result."""
        number = next(self._numbers)
        self._waiting[number] = asyncio.get_running_loop().create_future()
        await self._socket.send_json({"id": number, "method": method, "params": params})
        answer = await asyncio.wait_for(self._waiting[number], PATIENCE_S)
        assert "error" not in answer, (method, answer)
        result: dict[str, Any] = answer["result"]
        return result

    async def go(self, url: str) -> None:
        """Load a page, its scripts included."""
        self._loaded.clear()
        answer = await self.send("Page.navigate", url=url)
        assert "errorText" not in answer, answer
        await asyncio.wait_for(self._loaded.wait(), PATIENCE_S)

    async def evaluate(self, expression: str) -> Any:
        """The value of an expression in the page; promises are awaited."""
        answer = await self.send(
            "Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True
        )
        assert "exceptionDetails" not in answer, answer
        return answer["result"].get("value")

    async def until(self, expression: str, timeout: float = PATIENCE_S) -> Any:
        """The first true value of an expression."""
        end = time.monotonic() + timeout
        while not (value := await self.evaluate(expression)):
            assert time.monotonic() < end, f"waited for {expression}; {self.errors}"
            await asyncio.sleep(0.05)
        return value

    async def press(self, key: str, *, shift: bool = False) -> None:
        """A key, as from a keyboard."""
        codes = {"Tab": 9, "Enter": 13, "ArrowLeft": 37, "ArrowRight": 39, " ": 32}
        common = {"key": key, "windowsVirtualKeyCode": codes[key], "modifiers": 8 if shift else 0}
        text = {"Enter": "\r", " ": " "}.get(key)
        await self.send(
            "Input.dispatchKeyEvent", type="keyDown", **common, **({"text": text} if text else {})
        )
        await self.send("Input.dispatchKeyEvent", type="keyUp", **common)

    async def shape(self, width: int, height: int, *, dark: bool = False, scale: float = 1) -> None:
        """The window's size, and which colours the system prefers."""
        await self.send(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=scale,
            mobile=width < 600,
        )
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        await self.send("Emulation.setEmulatedMedia", features=[scheme])

    async def picture(self, *, whole: bool = True) -> bytes:
        """A PNG of the page as it is."""
        shot = await self.send("Page.captureScreenshot", format="png", captureBeyondViewport=whole)
        return base64.b64decode(shot["data"])


@contextlib.asynccontextmanager
async def browser(profile: Path) -> AsyncIterator[Page]:
    """A tab of a chromium that lives as long as the block."""
    process = await asyncio.create_subprocess_exec(
        CHROMIUM,
        *("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"),
        *("--remote-debugging-port=0", f"--user-data-dir={profile}", "--no-first-run"),
        *("--disable-background-networking", "--disable-component-update", "about:blank"),
        stdout=asyncio.subprocess.DEVNULL,
        stderr=asyncio.subprocess.DEVNULL,
        env={**os.environ, "HOME": str(profile)},
        start_new_session=True,
    )
    try:
        port = await _port(profile / "DevToolsActivePort", process)
        async with aiohttp.ClientSession() as session:
            async with session.get(f"http://127.0.0.1:{port}/json/list") as answer:
                tabs = [tab for tab in await answer.json() if tab["type"] == "page"]
            async with session.ws_connect(
                tabs[0]["webSocketDebuggerUrl"], max_msg_size=64 * 1024 * 1024
            ) as socket:
                page = Page(socket)
                async with asyncio.TaskGroup() as group:
                    listening = group.create_task(page.listen())
                    for domain in ("Page", "Runtime", "Log", "Network"):
                        await page.send(f"{domain}.enable")
                    try:
                        yield page
                    finally:
                        listening.cancel()
    finally:
        process.kill()
        await process.wait()


async def _port(file: Path, process: asyncio.subprocess.Process) -> int:
    end = time.monotonic() + PATIENCE_S
    while True:
        with contextlib.suppress(OSError, ValueError, IndexError):
            return _first_number(file)
        assert process.returncode is None, "chromium did not start"
        assert time.monotonic() < end, "chromium did not open its port"
        await asyncio.sleep(0.05)


def _first_number(file: Path) -> int:
    return int(file.read_text().splitlines()[0])


def text(selector: str) -> str:
    return f"document.querySelector({selector!r}).textContent"


@contextlib.asynccontextmanager
async def served(swarm: Imagined, key: str = "") -> AsyncIterator[str]:
    app = make_app(swarm.state, swarm.log, swarm.history, key=key)
    server = ApiServer(app, "127.0.0.1:0")
    try:
        yield f"http://{await server.start()}/"
    finally:
        await server.aclose()
