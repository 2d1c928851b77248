"""Headless Chromium over the DevTools protocol: pages opened from a file, everything they say and ask for recorded."""

from __future__ import annotations

import base64
import itertools
import json
import os
import shutil
import subprocess
from pathlib import Path
from types import TracebackType
from typing import Any

BINARY = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome", "chrome"))), None)


class Chromium:
    """One browser with one page. The protocol runs over two pipes, messages end with NUL; no port, no package."""

    def __init__(self, profile: Path) -> None:
        assert BINARY is not None
        commands, self._out = os.pipe()
        self._in, replies = os.pipe()
        # Chromium reads commands from descriptor 3 and answers on 4; `sh` puts the pipes there.
        script = f'exec "$0" "$@" 3<&{commands} 4>&{replies}'
        arguments = ["--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--remote-debugging-pipe",
                     "--no-first-run", "--disable-background-networking", "--hide-scrollbars", f"--user-data-dir={profile}"]  # fmt: skip
        self._process = subprocess.Popen(
            ["bash", "-c", script, BINARY, *arguments, "about:blank"],
            pass_fds=(commands, replies), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        )  # fmt: skip
        os.close(commands)
        os.close(replies)
        self._buffer, self._ids = b"", itertools.count(1)
        self._session: str | None = None
        self.events: list[dict[str, Any]] = []
        target = next(each for each in self.call("Target.getTargets")["targetInfos"] if each["type"] == "page")
        attached = self.call("Target.attachToTarget", targetId=target["targetId"], flatten=True)
        self._session = attached["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")

    def __enter__(self) -> Chromium:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        os.close(self._out)
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        os.close(self._in)

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        """The command's result. Raises RuntimeError with Chromium's message where it refuses."""
        number = next(self._ids)
        message = {"id": number, "method": method, "params": parameters}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._out, json.dumps(message).encode() + b"\0")
        while (reply := self._read()).get("id") != number:
            self.events.append(reply)
        if "error" in reply:
            raise RuntimeError(f"{method}: {reply['error']['message']}")
        found: dict[str, Any] = reply["result"]
        return found

    def open(self, path: Path, width: int, dark: bool = False) -> None:
        """Show a file `width` CSS pixels wide; `events` begins anew."""
        self.call(
            "Emulation.setDeviceMetricsOverride", width=width, height=900, deviceScaleFactor=1, mobile=width < 600
        )
        scheme = [{"name": "prefers-color-scheme", "value": "dark" if dark else "light"}]
        self.call("Emulation.setEmulatedMedia", features=scheme)
        self.events.clear()
        self.call("Page.navigate", url=path.as_uri())
        while not any(event.get("method") == "Page.loadEventFired" for event in self.events):
            self.events.append(self._read())

    def ask(self, script: str) -> Any:
        """The value of an expression in the page."""
        found = self.call("Runtime.evaluate", expression=script, returnByValue=True)
        assert "exceptionDetails" not in found, found
        return found["result"].get("value")

    def pdf(self) -> bytes:
        return base64.b64decode(self.call("Page.printToPDF", printBackground=True)["data"])

    def screenshot(self) -> bytes:
        """PNG of the whole page."""
        return base64.b64decode(self.call("Page.captureScreenshot", captureBeyondViewport=True)["data"])

    def _read(self) -> dict[str, Any]:
        while b"\0" not in self._buffer:
            more = os.read(self._in, 1 << 20)
            if not more:
                raise RuntimeError("Chromium ended; run it by hand to see why")
            self._buffer += more
        line, self._buffer = self._buffer.split(b"\0", 1)
        found: dict[str, Any] = json.loads(line)
        return found
