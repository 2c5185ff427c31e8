"""A PostgreSQL server of a test's own, on a folder that goes away with it."""

from __future__ import annotations

import os
import pwd
import shutil
import socket
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count
from pathlib import Path

_numbers = count()
HIDDEN = "HEADWAY_BARE" in os.environ
"""As on a machine without it."""


def _programs() -> Path | None:
    """Where the server's programs are."""
    places = [Path(found).resolve().parent for found in (shutil.which("initdb"),) if found]
    places += sorted(Path("/usr/lib/postgresql").glob("*/bin"), reverse=True)
    return next((place for place in places if (place / "initdb").exists() and (place / "pg_ctl").exists()), None)


def _owner() -> str | None:
    """Who runs it: the server refuses to be root's. None: whoever runs the test."""
    if os.geteuid() != 0:
        return None
    names = {each.pw_name for each in pwd.getpwall()}
    return next((name for name in ("postgres", "nobody") if name in names), "")


def missing() -> str:
    """Why there can be no server; empty: there can."""
    if HIDDEN:
        return "PostgreSQL is hidden by HEADWAY_BARE"
    if _programs() is None:
        return "no PostgreSQL server is installed"
    return "nobody but root is there to run it" if _owner() == "" else ""


class Server:
    """One, on a port of its own. Everybody on this machine may use it."""

    def __init__(self, folder: Path) -> None:
        programs = _programs()
        assert programs is not None
        self._programs, self._folder = programs, folder
        with socket.socket() as held:
            held.bind(("127.0.0.1", 0))
            self.port = held.getsockname()[1]
        self.url = self._url("postgres")
        self._run("initdb", "-D", f"{folder}/data", "-U", "headway", "-A", "trust", "--no-sync", "-E", "UTF8")

    def start(self) -> None:
        options = f"-p {self.port} -k {self._folder} -c listen_addresses=127.0.0.1 -c fsync=off"
        self._run("pg_ctl", "-D", f"{self._folder}/data", "-w", "-l", f"{self._folder}/log", "-o", options, "start")

    def create(self, name: str) -> str:
        """The address of another database, empty. The server runs."""
        self._run("createdb", "-h", "127.0.0.1", "-p", str(self.port), "-U", "headway", name)
        return self._url(name)

    def new(self) -> str:
        """The address of an empty database of any name."""
        return self.create(f"n{next(_numbers)}")

    def _url(self, database: str) -> str:
        return f"postgresql://headway@127.0.0.1:{self.port}/{database}"

    def stop(self) -> None:
        self._run("pg_ctl", "-D", f"{self._folder}/data", "-w", "-m", "immediate", "stop")

    def _run(self, program: str, *args: str) -> None:
        subprocess.run(
            [str(self._programs / program), *args],
            check=True,
            stdout=subprocess.DEVNULL,
            user=_owner(),
            cwd=self._folder,
            env={"PATH": os.environ["PATH"], "LC_ALL": "C.UTF-8"},
            timeout=60,
        )


@contextmanager
def server() -> Iterator[Server]:
    """A server that runs. Its folder is where its owner can reach it, which pytest's own is not."""
    folder = Path(tempfile.mkdtemp(prefix="headway-postgres-"))
    try:
        if (owner := _owner()) is not None:
            shutil.chown(folder, owner)
        made = Server(folder)
        made.start()
        try:
            yield made
        finally:
            made.stop()
    finally:
        shutil.rmtree(folder, ignore_errors=True)
