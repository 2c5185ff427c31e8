"""Computes plans beside the gateway, each kind in its own process, so that streams are not delayed.

A process ends with the gateway, even if the gateway is killed, and runs at low priority.
"""

from __future__ import annotations

import logging
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from multiprocessing.connection import Connection
from time import monotonic, sleep
from typing import Any

log = logging.getLogger("headway.gateway")
NICE = 10
PLAN_LIMIT_S = 1800.0
"""Longest time for a plan, because a process that hangs would block all later plans."""
_PARENT_CHECK_S = 0.5
"""Time between two checks that the gateway still runs."""


class PlannerProcesses:
    """The planner processes of one gateway. Each plan may take `limit_s`; after that, its process is killed."""

    def __init__(self, limit_s: float = PLAN_LIMIT_S) -> None:
        self._limit_s = limit_s
        self._planners: list[PlannerProcess] = []

    def __call__(self, work: Callable[..., Any]) -> PlannerProcess:
        """A task for this work. Its process starts with the first call of `start`."""
        self._planners.append(PlannerProcess(work, self._limit_s))
        return self._planners[-1]

    def close(self) -> None:
        for planner in self._planners:
            planner.close()


class PlannerProcess:
    """Implements `core.task.BackgroundTask`. The process keeps the state of its work between plans."""

    def __init__(self, work: Callable[..., Any], limit_s: float = PLAN_LIMIT_S) -> None:
        self._work, self.limit_s = work, limit_s
        self._process: subprocess.Popen[bytes] | None = None
        self._connection: Connection | None = None
        self._result: Future[Any] | None = None
        self._last_error = ""
        """Reason why the last plan failed. A repeated reason is not logged again."""

    @property
    def is_busy(self) -> bool:
        return self._result is not None and not self._result.done()

    def start(self, *arguments: Any) -> None:
        """Start to compute a plan. A thread waits for the process."""
        self._result = Future()
        threading.Thread(target=self._wait, args=(self._result, arguments), daemon=True).start()

    def result(self) -> Any:
        """The plan; None if planning failed. A failure is logged."""
        result, self._result = self._result, None
        assert result is not None
        try:
            took_s, plan = result.result(timeout=0)
        except Exception as error:
            if str(error) != self._last_error:
                log.warning("a plan could not be made, and the one before stays: %s", error)
            self._last_error = str(error)
            return None
        self._last_error = ""
        log.info("a plan was made in %.1f s", took_s)
        return plan

    def close(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()

    def _wait(self, result: Future[Any], arguments: tuple[Any, ...]) -> None:
        is_over = threading.Event()
        watchdog = threading.Timer(self.limit_s, self._kill, (is_over,))
        try:
            connection = self._connection or self._launch()
            watchdog.start()
            connection.send(arguments)
            has_succeeded, value = connection.recv()
        except Exception as error:
            self.close()
            self._connection = None
            is_gone = isinstance(error, EOFError | OSError)  # otherwise the arguments cannot be sent
            why = f"took more than {self.limit_s:g} s" if is_over.is_set() else "its process has ended"
            result.set_exception(ChildProcessError(why) if is_gone else error)
        else:
            result.set_result(value) if has_succeeded else result.set_exception(RuntimeError(value))
        finally:
            watchdog.cancel()

    def _kill(self, is_over: threading.Event) -> None:
        """End the process of a plan that takes too long. The waiting thread gets an EOFError."""
        is_over.set()
        if self._process is not None:
            self._process.kill()

    def _launch(self) -> Connection:
        """Start a new interpreter, and send it the module path and the work."""
        ours, theirs = socket.socketpair()
        with theirs:
            number = theirs.fileno()
            command = [sys.executable, "-m", __name__, str(number), str(os.getpid())]
            self._process = subprocess.Popen(command, stdin=subprocess.DEVNULL, pass_fds=(number,))
        self._connection = connection = Connection(ours.detach())
        connection.send(sys.path)
        connection.send(self._work)
        return connection


def _serve(connection: Connection) -> None:
    """Runs in the process: compute plans one after the other. Raises EOFError when the gateway closes the
    connection."""
    sys.path[:] = connection.recv()
    work = connection.recv()
    while True:
        arguments = connection.recv()
        start_s = monotonic()
        try:
            plan = work(*arguments)
            reply: tuple[bool, Any] = (True, (monotonic() - start_s, plan))
        except Exception as error:
            reply = False, f"{type(error).__name__}: {error}"
        connection.send(reply)


def _exit_with(parent: int) -> None:
    while os.getppid() == parent:
        sleep(_PARENT_CHECK_S)
    os._exit(0)


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.nice(NICE)
    threading.Thread(target=_exit_with, args=(int(sys.argv[2]),), daemon=True).start()
    with suppress(EOFError, BrokenPipeError, ConnectionResetError):
        _serve(Connection(int(sys.argv[1])))


if __name__ == "__main__":
    main()
