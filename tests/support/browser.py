"""A page in a headless Chromium, spoken with by the DevTools protocol."""

from __future__ import annotations

import base64
import json
import os
import shutil
import socket
import struct
import subprocess
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

PATIENCE_S = 30.0


def chromium() -> str:
    """The program. Skips the test where there is none, or HEADWAY_BARE hides it."""
    if "HEADWAY_BARE" in os.environ:
        pytest.skip("Chromium is hidden by HEADWAY_BARE")
    found = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if found is None:
        pytest.skip("no Chromium on this machine")
    return found


class Page:
    """One page, over a WebSocket (RFC 6455) of the few frames that are needed."""

    def __init__(self, address: str) -> None:
        parts = urlsplit(address)
        assert parts.hostname and parts.port
        self._socket = socket.create_connection((parts.hostname, parts.port), timeout=PATIENCE_S)
        key = base64.b64encode(os.urandom(16)).decode()
        self._socket.sendall(
            f"GET {parts.path} HTTP/1.1\r\nHost: {parts.netloc}\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
            f"Sec-WebSocket-Key: {key}\r\nSec-WebSocket-Version: 13\r\n\r\n".encode()
        )
        self._file = self._socket.makefile("rb")
        assert b"101" in self._file.readline()
        while self._file.readline().strip():
            pass
        self._num = 0

    def call(self, method: str, **params: Any) -> Any:
        """A command's result."""
        self._num += 1
        data = json.dumps({"id": self._num, "method": method, "params": params}).encode()
        mask = os.urandom(4)
        length = bytes([0x80 | len(data)]) if len(data) < 126 else struct.pack("!BQ", 0xFF, len(data))
        masked = bytes(byte ^ mask[i % 4] for i, byte in enumerate(data))
        self._socket.sendall(b"\x81" + length + mask + masked)
        while True:
            message = json.loads(self._frame())
            if message.get("id") == self._num:
                assert "error" not in message, message
                return message["result"]

    def _frame(self) -> bytes:
        whole = b""
        while True:
            first, second = self._file.read(2)
            size = second & 0x7F
            if size > 125:
                size = int.from_bytes(self._file.read(2 if size == 126 else 8), "big")
            whole += self._file.read(size)
            if first & 0x80:
                return whole

    def value(self, expression: str) -> Any:
        """What JavaScript makes of this in the page."""
        message = self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in message, message["exceptionDetails"]
        return message["result"].get("value")

    def close(self) -> None:
        self._file.close()
        self._socket.close()


@contextmanager
def opened(url: str, folder: Path, width: int = 1280, height: int = 1200, *options: str) -> Iterator[Page]:
    """A browser that shows this page."""
    command = [
        chromium(),
        "--headless",
        "--no-sandbox",
        "--disable-gpu",
        "--hide-scrollbars",
        "--remote-debugging-port=0",
        "--remote-allow-origins=*",
        f"--user-data-dir={folder / 'profile'}",
        f"--window-size={width},{height}",
        *options,
        url,
    ]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
    page = None
    try:
        with process.stderr:  # type: ignore[union-attr]  # it is a pipe
            address = next(line.decode() for line in process.stderr if b"DevTools listening on" in line)  # type: ignore[union-attr]
            port = urlsplit(address.split()[-1]).port
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/json", timeout=PATIENCE_S) as reply:
                targets = json.load(reply)
            page = Page(next(each["webSocketDebuggerUrl"] for each in targets if each["type"] == "page"))
            is_there = f"location.href === {json.dumps(url)} && document.readyState === 'complete'"
            end_s = time.monotonic() + PATIENCE_S
            while not page.value(is_there):
                assert time.monotonic() < end_s, f"{url} is not there"
            yield page
    finally:
        if page is not None:
            page.close()
        process.kill()
        process.wait()
