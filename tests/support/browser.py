"""A page in Chromium without a window, by the DevTools protocol over a pipe; a visible skip where it is not there."""

from __future__ import annotations

import base64
import fcntl
import json
import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

# Without these it asks its maker's hosts at each start.
OPTIONS = ("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-sync")
OPTIONS += ("--disable-background-networking", "--disable-component-update", "--remote-debugging-pipe")


class Tab:
    """One page."""

    def __init__(self, send: int, receive: int):
        self._send, self._received, self._number = send, os.fdopen(receive, "rb"), 0
        target = self("Target.createTarget", url="about:blank")["targetId"]
        self._session = self("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        self("Page.enable")
        self("Runtime.enable")

    _session: str | None = None

    def __call__(self, method: str, **params: Any) -> dict[str, Any]:
        self._number += 1
        message = {"id": self._number, "method": method, "params": params}
        if self._session is not None:
            message["sessionId"] = self._session
        os.write(self._send, json.dumps(message).encode() + b"\0")
        while True:
            answer = json.loads(self._read())
            if answer.get("id") == self._number:
                assert "error" not in answer, (method, answer)
                return answer["result"]

    def _read(self) -> bytes:
        found = bytearray()
        while (byte := self._received.read(1)) != b"\0":
            assert byte, "the browser has ended"
            found += byte
        return bytes(found)

    def run(self, program: str) -> Any:
        """The value of an expression, awaited."""
        done = self("Runtime.evaluate", expression=program, awaitPromise=True, returnByValue=True)
        assert "exceptionDetails" not in done, done["exceptionDetails"]
        return done["result"].get("value")

    def open(self, path: Path) -> None:
        """Returns when the page has said that it is ready (data-ready), and has drawn."""
        self("Page.navigate", url=path.resolve().as_uri())
        self.run(
            "new Promise(done => { const look = () => document.documentElement?.dataset.ready &&"
            " [...document.querySelectorAll('section:has(canvas)')].every(s => s.dataset.drawn)"
            " ? done(1) : setTimeout(look, 5); look(); })"
        )

    def key(self, name: str) -> None:
        for kind in ("rawKeyDown", "keyUp"):
            self("Input.dispatchKeyEvent", type=kind, key=name, code=name)

    def look(self, width: int, height: int, scheme: str) -> None:
        """The size of the window, and "light" or "dark"."""
        self("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=width < 600)
        self("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])

    def picture(self, path: Path) -> None:
        path.write_bytes(base64.b64decode(self("Page.captureScreenshot", captureBeyondViewport=True)["data"]))


@contextmanager
def tab(folder: Path) -> Iterator[Tab]:
    """`folder`: where the browser keeps its files."""
    program = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if program is None:
        pytest.skip("there is no Chromium")
    # It reads commands from descriptor 3 and answers on 4: those of the pipes must be others until then.
    (command, send), (receive, answer) = (map(_high, os.pipe()) for _ in range(2))

    def descriptors() -> None:
        os.dup2(command, 3)
        os.dup2(answer, 4)

    process = subprocess.Popen(
        [program, *OPTIONS, f"--user-data-dir={folder}"],
        preexec_fn=descriptors,
        pass_fds=(3, 4),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    os.close(command)
    os.close(answer)
    try:
        yield Tab(send, receive)
    finally:
        process.kill()
        process.wait()
        os.close(send)


def _high(descriptor: int) -> int:
    moved = fcntl.fcntl(descriptor, fcntl.F_DUPFD_CLOEXEC, 10)
    os.close(descriptor)
    return moved
