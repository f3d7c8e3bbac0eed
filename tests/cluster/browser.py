"""A real Chromium, driven over the DevTools protocol: pages are opened, asked, and photographed.

The protocol is https://chromedevtools.github.io/devtools-protocol/; aiohttp carries it.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import itertools
import json
import os
import shutil
import signal
import subprocess
import tempfile
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp

from torchelastic.processes import dies_with_parent

OPTIONS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-dev-shm-usage",
    "--disable-background-networking", "--disable-component-update", "--disable-sync", "--disable-extensions",
    "--hide-scrollbars", "--mute-audio", "--remote-debugging-port=0",
)  # fmt: skip


def chromium() -> str | None:
    """Where it is; None: it is not installed."""
    return next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)


class Tab:
    """One tab; everything is bounded by `patience_s`.

    Attributes:
        problems: errors of scripts, and what the console has shown as an error.
        requests: every address that was asked for.
        received_bytes: bodies that came over the network, as they came.
    """

    def __init__(self, socket: aiohttp.ClientWebSocketResponse[Any], patience_s: float = 30.0) -> None:
        self._socket, self._patience_s = socket, patience_s
        self._numbers = itertools.count(1)
        self._answers: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self._reader = asyncio.ensure_future(self._read())
        self.problems: list[str] = []
        self.requests: list[str] = []
        self.received_bytes = 0

    async def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        number = next(self._numbers)
        self._answers[number] = asyncio.get_running_loop().create_future()
        await self._socket.send_json({"id": number, "method": method, "params": parameters})
        answer = await asyncio.wait_for(self._answers[number], self._patience_s)
        assert "error" not in answer, (method, answer)
        result: dict[str, Any] = answer["result"]
        return result

    async def open(self, url: str) -> None:
        for domain in ("Page", "Runtime", "Network", "Log"):
            await self.call(f"{domain}.enable")
        await self.call("Page.navigate", url=url)

    async def ask(self, expression: str) -> Any:
        """The value of an expression in the page, which may be a promise."""
        told = await self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in told, (expression, told["exceptionDetails"])
        return told["result"].get("value")

    async def text(self, selector: str) -> str:
        """All text of what the selector finds, as a person sees it."""
        found = f"[...document.querySelectorAll({json.dumps(selector)})].map((one) => one.innerText).join('\\n')"
        return str(await self.ask(found))

    async def wait_for(self, expression: str, timeout_s: float = 30.0) -> Any:
        """Wait until the expression is true in the page; its value."""
        until_s = asyncio.get_running_loop().time() + timeout_s
        while True:
            value = await self.ask(f"(() => {{ try {{ return {expression} }} catch (e) {{ return null }} }})()")
            if value:
                return value
            if asyncio.get_running_loop().time() > until_s:
                shown = await self.ask("document.body ? document.body.innerText : ''")
                raise AssertionError(f"not within {timeout_s:g} s: {expression}; {self.problems}; {shown[:3000]}")
            await asyncio.sleep(0.05)

    async def photograph(self, path: Path, *, width: int, height: int, dark: bool) -> None:
        await self.call(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False
        )
        await self.prefer(dark=dark)
        await asyncio.sleep(1.5)  # the next picture of the run is drawn at this width; for people, no test looks at it
        picture = await self.call("Page.captureScreenshot", format="png")
        path.write_bytes(base64.b64decode(picture["data"]))

    async def prefer(self, *, dark: bool) -> None:
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        await self.call("Emulation.setEmulatedMedia", features=[scheme])

    async def close(self) -> None:
        self._reader.cancel()
        await self._socket.close()

    async def _read(self) -> None:
        async for message in self._socket:
            told = json.loads(message.data)
            if "id" in told:
                self._answers.pop(told["id"]).set_result(told)
                continue
            parameters = told.get("params", {})
            if told["method"] == "Runtime.exceptionThrown":
                self.problems.append(json.dumps(parameters["exceptionDetails"])[:500])
            elif told["method"] == "Log.entryAdded" and parameters["entry"]["level"] == "error":
                self.problems.append(parameters["entry"]["text"][:500])
            elif told["method"] == "Network.requestWillBeSent":
                self.requests.append(parameters["request"]["url"])
            elif told["method"] == "Network.dataReceived":
                self.received_bytes += parameters["dataLength"]


@contextlib.asynccontextmanager
async def browser(command: str) -> AsyncIterator[Tab]:
    """A Chromium with one empty tab, and a home of its own; it is ended with the block."""
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as home:
        line = dies_with_parent([command, *OPTIONS, f"--user-data-dir={home}", "about:blank"])
        quiet = subprocess.DEVNULL
        process = subprocess.Popen(line, stdout=quiet, stderr=quiet, stdin=quiet, start_new_session=True)
        try:
            port = await _port(Path(home) / "DevToolsActivePort", process)
            async with aiohttp.ClientSession() as session:
                async with session.get(f"http://127.0.0.1:{port}/json/list") as answer:
                    [page] = [one for one in await answer.json() if one["type"] == "page"]
                tab = Tab(await session.ws_connect(page["webSocketDebuggerUrl"], max_msg_size=2**26))
                try:
                    yield tab
                finally:
                    await tab.close()
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


async def _port(path: Path, process: subprocess.Popen[bytes]) -> int:
    for _ in range(600):
        if path.exists() and path.read_text().strip():
            return int(path.read_text().split()[0])
        assert process.poll() is None, "Chromium has ended"
        await asyncio.sleep(0.05)
    raise AssertionError("Chromium did not open its DevTools within 30 s")
