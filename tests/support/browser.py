"""Headless Chromium for tests of pages: it opens files from disk and is driven over its debugging pipe.

A machine without a browser skips such tests and says what to install; where NEARFAR_BROWSER=required is set, as
`.ci/run` does, they fail.
"""

from __future__ import annotations

import base64
import io
import json
import os
import select
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import NoReturn

import pytest
from PIL import Image

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
FLAGS = (
    "--headless=new",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--disable-dev-shm-usage",
    "--hide-scrollbars",
    "--remote-debugging-pipe",
)
# The pipe must be descriptors 3 and 4 of the browser; a second interpreter moves them there and then becomes it.
LAUNCH = """
import os, sys
ears, mouth = int(sys.argv[1]), int(sys.argv[2])
held = os.dup(mouth) if mouth == 3 else mouth
os.dup2(ears, 3)
os.dup2(held, 4)
os.execv(sys.argv[3], sys.argv[3:])
"""


def missing() -> NoReturn:
    """No browser is here: a test to skip, or a failure where one was demanded."""
    words = "No browser is here to open the page in; install one, such as with apt-get install chromium."
    if os.environ.get("NEARFAR_BROWSER") == "required":
        pytest.fail(f"{words} NEARFAR_BROWSER=required demands one.")
    pytest.skip(words)


class Browser:
    """A tab of a headless Chromium."""

    def __init__(self, folder: Path, width: int = 1280, height: int = 900) -> None:
        path = next((found for name in NAMES if (found := shutil.which(name))), None)
        if path is None:
            missing()
        from_us, to_us = os.pipe(), os.pipe()
        command = [sys.executable, "-c", LAUNCH, str(from_us[0]), str(to_us[1]), path, *FLAGS]
        command += [f"--user-data-dir={folder}", f"--window-size={width},{height}", "about:blank"]
        self._log = (folder.parent / f"{folder.name}.log").open("wb")
        self._process = subprocess.Popen(
            command, pass_fds=(from_us[0], to_us[1]), stdout=self._log, stderr=self._log, stdin=subprocess.DEVNULL
        )
        os.close(from_us[0])
        os.close(to_us[1])
        self._out, self._in = from_us[1], to_us[0]
        self._buffer, self._number, self._session = b"", 0, None
        self.problems: list[str] = []
        self.requests: list[str] = []
        tabs = self.call("Target.getTargets")["targetInfos"]
        tab = next(info["targetId"] for info in tabs if info["type"] == "page")
        self._session = self.call("Target.attachToTarget", targetId=tab, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")

    def call(self, method: str, seconds: float = 60, **settings: object) -> dict:
        self._number += 1
        message = {"id": self._number, "method": method, "params": settings}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._out, json.dumps(message).encode() + b"\0")
        end = time.monotonic() + seconds
        while True:
            answer = self._read(end, method)
            if answer.get("id") == self._number:
                assert "error" not in answer, f"{method}: {answer['error']}"
                return answer["result"]
            self._note(answer)

    def _read(self, end: float, waiting_for: str) -> dict:
        while b"\0" not in self._buffer:
            ready, _, _ = select.select([self._in], [], [], max(0.0, end - time.monotonic()))
            assert ready, f"the browser did not answer {waiting_for} in time"
            part = os.read(self._in, 1 << 16)
            assert part, f"the browser ended before it answered {waiting_for}; its log: {self._log.name}"
            self._buffer += part
        line, _, self._buffer = self._buffer.partition(b"\0")
        return json.loads(line)

    def _note(self, event: dict) -> None:
        method, found = event.get("method"), event.get("params", {})
        if method == "Runtime.exceptionThrown":
            self.problems.append(json.dumps(found["exceptionDetails"])[:500])
        elif method == "Runtime.consoleAPICalled" and found["type"] in ("error", "warning", "assert"):
            self.problems.append(json.dumps(found["args"])[:500])
        elif method == "Log.entryAdded" and found["entry"]["level"] in ("error", "warning"):
            self.problems.append(found["entry"]["text"])
        elif method == "Network.requestWillBeSent":
            self.requests.append(found["request"]["url"])

    def window(self, width: int, height: int) -> None:
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)

    def open(self, path: Path, shows: str = "body") -> None:
        """Opens a file and waits until it is there, with something that a selector finds."""
        self.call("Page.navigate", url=path.as_uri())
        self.wait(f"document.readyState === 'complete' && document.querySelector({json.dumps(shows)}) !== null")

    def ask(self, script: str) -> object:
        """The value of an expression, or of what a promise gives."""
        answer = self.call("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in answer, f"{script}: {answer['exceptionDetails']}"
        return answer["result"].get("value")

    def wait(self, script: str, seconds: float = 20) -> None:
        end = time.monotonic() + seconds
        while not self.ask(script):
            assert time.monotonic() < end, f"not so within {seconds} s: {script}"
            time.sleep(0.05)

    def mouse(self, kind: str, x: float, y: float, **more: object) -> None:
        self.call("Input.dispatchMouseEvent", type=kind, x=x, y=y, **more)

    def click(self, selector: str) -> None:
        x, y = self.middle(selector)
        self.mouse("mouseMoved", x, y)
        for kind in ("mousePressed", "mouseReleased"):
            self.mouse(kind, x, y, button="left", clickCount=1)

    def middle(self, selector: str) -> tuple[float, float]:
        self.ask(
            f"document.querySelector({json.dumps(selector)}).scrollIntoView({{block: 'center', behavior: 'instant'}})"
        )
        box = self.ask(
            f"(() => {{ const b = document.querySelector({json.dumps(selector)}).getBoundingClientRect();"
            " return [b.x + b.width / 2, b.y + b.height / 2]; })()"
        )
        return box[0], box[1]

    def key(self, name: str, text: str = "") -> None:
        codes = {"Enter": 13, "Escape": 27, "ArrowLeft": 37, "ArrowUp": 38, "ArrowRight": 39, "ArrowDown": 40, "Tab": 9}
        down = {"key": name, "code": name, "windowsVirtualKeyCode": codes.get(name, 0)}
        text = "\r" if name == "Enter" else text
        self.call("Input.dispatchKeyEvent", type="keyDown", **down, **({"text": text} if text else {}))
        self.call("Input.dispatchKeyEvent", type="keyUp", **down)

    def screenshot(self, whole: bool = False) -> Image.Image:
        shot = self.call("Page.captureScreenshot", format="png", captureBeyondViewport=whole)
        return Image.open(io.BytesIO(base64.b64decode(shot["data"]))).convert("RGB")

    def close(self) -> None:
        try:
            self._session = None
            self.call("Browser.close", seconds=5)
        except (AssertionError, OSError):
            pass
        try:
            self._process.wait(timeout=10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        for descriptor in (self._out, self._in):
            os.close(descriptor)
        self._log.close()
