"""A headless Chromium, driven by the DevTools protocol over a pipe."""

from __future__ import annotations

import base64
import contextlib
import json
import os
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
_FLAGS = (
    "--headless=new",
    "--no-sandbox",  # the pages are our own, and containers have no user namespaces
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--disable-extensions",
    "--no-first-run",
    "--hide-scrollbars",
    "--force-color-profile=srgb",
    "--remote-debugging-pipe",
)


def find() -> str | None:
    """Return the path of a Chromium; None where none is installed."""
    return next((path for name in NAMES if (path := shutil.which(name))), None)


class Tab:
    """A page of the browser, and its console messages."""

    def __init__(self, browser: Browser, session: str) -> None:
        self._browser = browser
        self._session = session
        self.problems: list[str] = []  # errors and warnings, and requests to the network
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        """Send a command, and return its result."""
        return self._browser.call(method, params, self._session)

    def run(self, script: str) -> Any:
        """Evaluate an expression, a promise's value where it is one; return it as JSON has it."""
        done = self.call(
            "Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True
        )
        if "exceptionDetails" in done:
            raise RuntimeError(f"{script}: {done['exceptionDetails']}")
        return done["result"].get("value")

    def open(self, path: Path) -> None:
        """Load a file, and wait until it has loaded and drawn."""
        self._browser.loaded.discard(self._session)
        self.call("Page.navigate", url=path.resolve().as_uri())
        while self._session not in self._browser.loaded:
            self._browser.receive()
        self.call("Page.bringToFront")
        self.settle()

    def settle(self) -> None:
        """Wait for two frames."""
        self.run("new Promise(r => requestAnimationFrame(() => requestAnimationFrame(() => r(1))))")

    def size(self, width: int, height: int, *, phone: bool = False) -> None:
        """Set the size of the window; a phone has touch and two pixels for one."""
        self.call(
            "Emulation.setDeviceMetricsOverride",
            width=width, height=height, deviceScaleFactor=2 if phone else 1, mobile=phone,
        )  # fmt: skip
        self.call("Emulation.setTouchEmulationEnabled", enabled=phone)

    def theme(self, name: str) -> None:
        """Prefer a colour scheme: light or dark."""
        feature = {"name": "prefers-color-scheme", "value": name}
        self.call("Emulation.setEmulatedMedia", features=[feature])

    def key(self, key: str, *, shift: bool = False) -> None:
        """Press and release a key."""
        text = key if len(key) == 1 else None
        params = {"key": key, "modifiers": 8 if shift else 0} | ({"text": text} if text else {})
        self.call("Input.dispatchKeyEvent", type="keyDown", **params)
        self.call("Input.dispatchKeyEvent", type="keyUp", key=key)
        self.settle()

    def mouse(self, kind: str, x: float, y: float, **more: Any) -> None:
        """Dispatch a mouse event: Moved, Pressed, Released or Wheel."""
        self.call("Input.dispatchMouseEvent", type=f"mouse{kind}", x=x, y=y, **more)

    def picture(self, path: Path, *, whole: bool = False) -> None:
        """Write a PNG of the window, or of the whole page."""
        shot = self.call("Page.captureScreenshot", format="png", captureBeyondViewport=whole)
        path.write_bytes(base64.b64decode(shot["data"]))


class Browser:
    """A started Chromium."""

    def __init__(self, path: str, folder: Path) -> None:
        own_read, child_write = os.pipe()
        child_read, own_write = os.pipe()
        # It reads from descriptor 3 and writes to 4, and so do its own children.
        script = 'exec "$0" "$@" 3<&"$IN" 4>&"$OUT"'
        self._process = subprocess.Popen(
            ["/bin/bash", "-c", script, path, *_FLAGS, f"--user-data-dir={folder}", "about:blank"],
            pass_fds=(child_read, child_write),
            env={**os.environ, "IN": str(child_read), "OUT": str(child_write)},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        os.close(child_read)
        os.close(child_write)
        self._in = os.fdopen(own_read, "rb")
        self._out = os.fdopen(own_write, "wb", buffering=0)
        self._number = 0
        self._tabs: dict[str, Tab] = {}
        self._answers: dict[int, dict[str, Any]] = {}
        self._buffer = b""
        self.loaded: set[str] = set()

    def tab(self) -> Tab:
        """Open an empty page."""
        target = self.call("Target.createTarget", {"url": "about:blank"})["targetId"]
        attached = self.call("Target.attachToTarget", {"targetId": target, "flatten": True})
        session = attached["sessionId"]
        self._tabs[session] = tab = Tab.__new__(Tab)
        tab.problems = []
        tab.__init__(self, session)  # type: ignore[misc]
        return tab

    def call(self, method: str, params: dict[str, Any], session: str = "") -> dict[str, Any]:
        """Send a command, and return its result.

        Raises:
            RuntimeError: the browser refused it, or has ended.
        """
        self._number += 1
        number = self._number
        message = {"id": number, "method": method, "params": params}
        if session:
            message["sessionId"] = session
        self._out.write(json.dumps(message).encode() + b"\0")
        while number not in self._answers:
            self.receive()
        answer = self._answers.pop(number)
        if "error" in answer:
            raise RuntimeError(f"{method}: {answer['error']}")
        result: dict[str, Any] = answer["result"]
        return result

    def receive(self) -> None:
        """Take the next message."""
        while b"\0" not in self._buffer:
            part = os.read(self._in.fileno(), 1 << 20)
            if not part:
                raise RuntimeError("the browser has ended")
            self._buffer += part
        line, _, self._buffer = self._buffer.partition(b"\0")
        message = json.loads(line)
        if "id" in message:
            self._answers[message["id"]] = message
        else:
            self._event(message)

    def close(self) -> None:
        """End the browser and what it started."""
        self._out.close()
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGTERM)
        try:
            self._process.wait(timeout=10)
        except subprocess.TimeoutExpired:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
        self._in.close()

    def _event(self, message: dict[str, Any]) -> None:
        session, params = message.get("sessionId", ""), message.get("params", {})
        tab = self._tabs.get(session)
        method = message["method"]
        if method == "Page.loadEventFired":
            self.loaded.add(session)
        if tab is None:
            return
        if method == "Runtime.exceptionThrown":
            tab.problems.append(json.dumps(params["exceptionDetails"]))
        elif method == "Runtime.consoleAPICalled" and params["type"] in ("error", "warning"):
            tab.problems.append(json.dumps(params["args"]))
        elif method == "Log.entryAdded" and params["entry"]["level"] in ("error", "warning"):
            tab.problems.append(json.dumps(params["entry"]))
        elif method == "Network.requestWillBeSent":
            url = params["request"]["url"]
            if not url.startswith(("file:", "data:", "about:")):
                tab.problems.append(f"a request to {url}")


@contextlib.contextmanager
def started(path: str) -> Iterator[Browser]:
    """Start a browser with an empty profile, and end it."""
    folder = tempfile.mkdtemp(prefix="umem-chromium-")
    browser = Browser(path, Path(folder))
    try:
        yield browser
    finally:
        browser.close()
        for _ in range(20):  # its children write until they have ended
            shutil.rmtree(folder, ignore_errors=True)
            if not os.path.exists(folder):
                break
            time.sleep(0.1)
