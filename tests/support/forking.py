"""`python -m headway ...`, or a script, as a fork of a process that has imported Headway: an interpreter and its
imports take half a second of processor time, and the tests start hundreds of servers.

What a fork does not show, the start of the installed program and the end of its interpreter, is what the tests of the
documentation start.
"""

from __future__ import annotations

import atexit
import gc
import json
import os
import runpy
import select
import selectors
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import cache
from importlib import import_module
from io import FileIO
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

PRELOADED = (
    "headway.cli.emulate", "headway.cli.epp", "headway.cli.serve", "headway.emulator.sglang", "headway.emulator.vllm",
    "headway.gateway.accounts.sql", "headway.gateway.reload", "headway.gateway.server.app",
    "headway.gateway.server.batches", "headway.gateway.server.http_protocol", "headway.gateway.server.middleware",
    "headway.gateway.telemetry.recording", "headway.gateway.workers.supervisor", "headway.serving.emulated_fleet",
    "uvicorn.lifespan.on", "uvicorn.logging", "uvicorn.loops.auto", "uvicorn.protocols.http.httptools_impl",
    "uvicorn.loops.uvloop", "encodings.idna", "gguf", "xllamacpp",
)  # fmt: skip
SCRIPTS = ("faulty_engine.py", "tiny_llama.py")
"""Scripts that run in a fork as they do in an interpreter of their own."""
FLEET = """
fleet: [{name: pool, model: qwen3-8b, gpu: h100, engine: vllm-0.15, endpoints: ["http://127.0.0.1:9"]}]
gateway: {scrape_period_s: 0.1}
policies: {routing: least-loaded, ordering: fcfs}
"""
_MAX_START_BYTES = 1 << 18


class Forked:
    """As much of `subprocess.Popen` as tests use, for a process that the template started and waits for."""

    def __init__(self, args: tuple[str, ...]) -> None:
        out, self._stdout = os.pipe()
        err, self._stderr = os.pipe()
        self._status, status = os.pipe()
        start = {"args": args, "cwd": os.getcwd(), "env": dict(os.environ)}
        ends = (self._stdout, self._stderr, status)
        try:
            socket.send_fds(template(), [json.dumps(start).encode()], ends)
        finally:
            for end in ends:
                os.close(end)
        self.stdout, self.stderr = FileIO(out), FileIO(err)
        self.returncode: int | None = None
        self.pid = int(self._line())

    def _line(self) -> bytes:
        """What the template tells next: the process id, then the exit status; nothing if the template is gone."""
        line = b""
        while not line.endswith(b"\n") and (byte := os.read(self._status, 1)):
            line += byte
        return line

    def poll(self) -> int | None:
        if self.returncode is None and select.select([self._status], [], [], 0.0)[0]:
            self.returncode = int(self._line() or -signal.SIGKILL)
            os.close(self._status)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        if self.returncode is None and not select.select([self._status], [], [], timeout)[0]:
            assert timeout is not None
            raise subprocess.TimeoutExpired("headway", timeout)
        status = self.poll()
        assert status is not None
        return status

    def communicate(self, timeout: float) -> tuple[bytes, bytes]:
        """All that it writes until it ends."""
        end_s, read = time.monotonic() + timeout, {self.stdout: b"", self.stderr: b""}
        is_open = {self.stdout, self.stderr}
        while is_open:
            ready = select.select([*is_open], [], [], max(end_s - time.monotonic(), 0.0))[0]
            if not ready:
                raise subprocess.TimeoutExpired("headway", timeout)
            for pipe in ready:
                data = pipe.read(1 << 16)
                read[pipe] += data
                if not data:
                    is_open.remove(pipe)
        self.wait(max(end_s - time.monotonic(), 0.0))
        return read[self.stdout], read[self.stderr]

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            with suppress(ProcessLookupError):  # it has just ended
                os.kill(self.pid, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


def can_fork(args: tuple[str, ...]) -> bool:
    """Whether a fork is as good as an interpreter of its own: not where a test changes what an interpreter reads."""
    is_known = args[:2] == ("-m", "headway") or Path(args[0]).name in SCRIPTS
    return is_known and hasattr(os, "pidfd_open") and _python_variables() == _VARIABLES


def _python_variables() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if name.startswith("PYTHON")}


_VARIABLES = _python_variables()


@cache
def template() -> socket.socket:
    """A socket of the process that is forked. It is started once, and ends when the socket is closed."""
    here, there = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    for end in (here, there):
        end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _MAX_START_BYTES)
    command = [sys.executable, __file__, str(there.fileno())]
    process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, pass_fds=(there.fileno(),))
    there.close()

    def end() -> None:
        here.close()
        process.wait()

    atexit.register(end)
    return here


def _be_template(link: socket.socket) -> dict[str, Any]:
    """Fork for each start that is asked for, and report ids and exit statuses. Returns in the forks, what to run."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal's, to all of its processes
    with selectors.DefaultSelector() as selector:
        selector.register(link, selectors.EVENT_READ)
        while True:
            for key, _ in selector.select():
                if key.fileobj is not link:
                    pid, status = key.data
                    _, how = os.waitpid(pid, 0)
                    selector.unregister(key.fileobj)
                    os.close(key.fd)
                    _tell(status, os.waitstatus_to_exitcode(how))
                    os.close(status)
                    continue
                text, fds, _, _ = socket.recv_fds(link, _MAX_START_BYTES, 3)
                if not text:
                    os._exit(0)
                out, err, status = fds
                pid = os.fork()
                if pid == 0:
                    os.dup2(out, 1)
                    os.dup2(err, 2)
                    signal.signal(signal.SIGINT, signal.default_int_handler)
                    return dict(json.loads(text))
                os.close(out)
                os.close(err)
                _tell(status, pid)
                selector.register(os.pidfd_open(pid), selectors.EVENT_READ, (pid, status))


def _tell(status: int, number: int) -> None:
    try:
        os.write(status, b"%d\n" % number)
    except BrokenPipeError:
        return  # the test has ended without waiting


def _run(args: list[str], cwd: str, env: dict[str, str]) -> None:
    """As `python -m MODULE ...` or `python SCRIPT ...` in that folder, with that environment."""
    os.closerange(3, 1024)  # of the template and of other forks
    os.chdir(cwd)
    os.environ.clear()
    os.environ.update(env)
    is_module = args[0] == "-m"
    sys.path[0] = cwd if is_module else os.path.dirname(args[0])
    sys.argv = args[1:] if is_module else args
    with _ending():
        if is_module:
            runpy.run_module(args[1], run_name="__main__", alter_sys=True)
        else:
            runpy.run_path(args[0], run_name="__main__")


@contextmanager
def _ending() -> Iterator[None]:
    """Exit as the interpreter does, but leave the modules: to take them apart takes as long as all else in a fork."""
    status = 0
    try:
        yield
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else int(end.code is not None)
        if isinstance(end.code, str):
            sys.stderr.write(f"{end.code}\n")
    except BaseException:
        sys.excepthook(*sys.exc_info())
        status = 1
    threading._shutdown()
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):  # nobody reads it
            stream.flush()
    os._exit(status)


def _read_fleet() -> None:
    """What the types of files, the catalog and the policies need to be read for the first time is then done for all."""
    with TemporaryDirectory() as folder:
        file = Path(folder, "fleet.yaml")
        file.write_text(FLEET)
        read = import_module("headway.serving.gateway").read(file)
    import_module("headway.sim.replica_resources").calibrated_line(read.fleet.pools[0])


if __name__ == "__main__":
    for name in PRELOADED:
        with suppress(ImportError):  # of an extra that is not installed
            import_module(name)
    _read_fleet()
    gc.collect()
    gc.freeze()  # else each fork looks at all that was imported, and copies it by that
    _run(**_be_template(socket.socket(fileno=int(sys.argv[1]))))
