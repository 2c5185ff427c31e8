"""Plans worked out beside the gateway: each clerk is a process of its own, so that streams go on meanwhile.

It ends with the gateway, however that ends, and steps back behind everything else on the machine.
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
_LOOK_S = 0.5
"""How often a process looks whether its gateway is still there."""


class PlannerProcesses:
    """All of a gateway's. Satisfies `core.clerk.Desk`."""

    def __init__(self) -> None:
        self._clerks: list[PlannerProcess] = []

    def __call__(self, work: Callable[..., Any]) -> PlannerProcess:
        """One for this work. There is no process before it is asked."""
        self._clerks.append(PlannerProcess(work))
        return self._clerks[-1]

    def close(self) -> None:
        """Nobody asks any more."""
        for clerk in self._clerks:
            clerk.close()


class PlannerProcess:
    """Satisfies `core.clerk.Clerk`. A thread waits for the process, which keeps its work from one plan to the next."""

    def __init__(self, work: Callable[..., Any]) -> None:
        self._work = work
        self._process: subprocess.Popen[bytes] | None = None
        self._line: Connection | None = None
        self._asked: Future[Any] | None = None
        self._why = ""
        """It failed last time; what has been said is not said again."""

    @property
    def is_busy(self) -> bool:
        """It is not done with what it was asked last."""
        return self._asked is not None and not self._asked.done()

    def ask(self, *arguments: Any) -> None:
        """Work it out for these."""
        self._asked = Future()
        threading.Thread(target=self._wait, args=(self._asked, arguments), daemon=True).start()

    def answer(self) -> Any:
        """None where it failed, which the log says once; what was planned before then stays."""
        asked, self._asked = self._asked, None
        assert asked is not None
        try:
            took_s, found = asked.result(timeout=0)
        except Exception as error:
            if str(error) != self._why:
                log.warning("a plan could not be made, and the one before stays: %s", error)
            self._why = str(error)
            return None
        self._why = ""
        log.info("a plan was made in %.1f s", took_s)
        return found

    def close(self) -> None:
        """End the process, whatever it does."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()

    def _wait(self, asked: Future[Any], arguments: tuple[Any, ...]) -> None:
        try:
            line = self._line or self._begin()
            line.send(arguments)
            worked, found = line.recv()
        except Exception as error:
            self.close()
            self._line = None
            is_gone = isinstance(error, EOFError | OSError)  # else it is what cannot be sent, say
            asked.set_exception(ChildProcessError("its process has ended") if is_gone else error)
        else:
            asked.set_result(found) if worked else asked.set_exception(RuntimeError(found))

    def _begin(self) -> Connection:
        """A fresh interpreter, which is told where modules are, and its work."""
        ours, theirs = socket.socketpair()
        with theirs:
            number = theirs.fileno()
            command = [sys.executable, "-m", __name__, str(number), str(os.getpid())]
            self._process = subprocess.Popen(command, stdin=subprocess.DEVNULL, pass_fds=(number,))
        line = Connection(ours.detach())
        line.send(sys.path)
        line.send(self._work)
        self._line = line
        return line


def _sit(line: Connection) -> None:
    """In the process: one plan after the other."""
    sys.path[:] = line.recv()
    work = line.recv()
    while True:
        arguments = line.recv()
        began_s = monotonic()
        try:
            found = work(*arguments)
            said: tuple[bool, Any] = (True, (monotonic() - began_s, found))
        except Exception as error:
            said = False, f"{type(error).__name__}: {error}"
        line.send(said)


def _end_with(parent: int) -> None:
    while os.getppid() == parent:
        sleep(_LOOK_S)
    os._exit(0)


def main() -> None:
    """`python -m headway.gateway.workers.planner_process FD PARENT`."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.nice(NICE)
    threading.Thread(target=_end_with, args=(int(sys.argv[2]),), daemon=True).start()
    with suppress(EOFError, BrokenPipeError, ConnectionResetError):
        _sit(Connection(int(sys.argv[1])))


if __name__ == "__main__":
    main()
