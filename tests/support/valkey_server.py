"""A Valkey or Redis server of a test's own, on a folder that goes away with it."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count
from pathlib import Path

import processes

_PROGRAMS = ("valkey-server", "redis-server")
_names = count()


def _program() -> str | None:
    return next((found for found in map(shutil.which, _PROGRAMS) if found), None)


def missing() -> str:
    """Why there can be no server; empty: there can."""
    if "HEADWAY_BARE" in os.environ:  # as on a machine without it
        return "Valkey is hidden by HEADWAY_BARE"
    return "" if _program() else "no Valkey or Redis server is installed"


class NoTlsError(Exception):
    """The server was built without TLS."""


class Server:
    """One, on a port of its own. Everybody on this machine may use it."""

    def __init__(self, folder: Path, *options: str, is_tls: bool) -> None:
        self._folder, self.options, self._is_tls = folder, options, is_tls
        self.port = processes.ports(1)[0]
        self.url = f"redis://127.0.0.1:{self.port}/0"
        self._process: subprocess.Popen[bytes] | None = None

    def new(self) -> str:
        """The address of a store that nobody has used: its names begin like no other's."""
        return f"{self.url}?prefix=test-{next(_names)}"

    def start(self) -> None:
        """Start it, and wait until it answers."""
        program = _program()
        assert program is not None
        ports = ["--port", "0", "--tls-port", str(self.port)] if self._is_tls else ["--port", str(self.port)]
        command = [program, *ports, "--bind", "127.0.0.1", "--save", "", *self.options]
        self._process = subprocess.Popen(
            [*command, "--dir", str(self._folder)], stdout=subprocess.PIPE, stdin=subprocess.DEVNULL
        )
        assert self._process.stdout is not None
        log = []
        for line in self._process.stdout:
            log.append(line)
            if b"Ready to accept connections" in line:
                return
        text = b"".join(log).decode()
        raise NoTlsError if "TLS support" in text else AssertionError(text)

    def stop(self) -> None:
        """Kill it, as a machine that fails would."""
        if self._process is not None:
            self._process.kill()
            self._process.communicate()
            self._process = None

    @contextmanager
    def stopped(self) -> Iterator[None]:
        self.stop()
        try:
            yield
        finally:
            self.start()

    @contextmanager
    def paused(self) -> Iterator[None]:
        """It takes connections meanwhile, and answers nothing."""
        assert self._process is not None
        self._process.send_signal(signal.SIGSTOP)
        try:
            yield
        finally:
            self._process.send_signal(signal.SIGCONT)

    def call(self, *command: str | int) -> object:
        """The answer to one command."""
        from redis import Redis

        with Redis(port=self.port, decode_responses=True) as client:
            return client.execute_command(*command)


@contextmanager
def server(*options: str, is_tls: bool = False) -> Iterator[Server]:
    """A server that runs, with such options of its configuration."""
    folder = Path(tempfile.mkdtemp(prefix="headway-valkey-"))
    try:
        made = Server(folder, *options, is_tls=is_tls)
        try:
            made.start()
            yield made
        finally:
            made.stop()
    finally:
        shutil.rmtree(folder, ignore_errors=True)
