"""Restarts a gateway's process when it is killed or crashes.

The listening sockets stay open in the supervising process, so connections wait for the next process instead of being
refused. A process that ends on its own, after a signal or because of an invalid setting, is not restarted.
"""

from __future__ import annotations

import gc
import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from types import FrameType

from headway.core.errors import HeadwayError
from headway.gateway.hangup import Hangup
from headway.gateway.termination import exit_at_sigterm, ignore_sigterm

log = logging.getLogger("headway.gateway")
MAX_RESTARTS = 5
"""Maximum number of restarts in a row, each within `_STABLE_S`. Then the gateway ends."""
_STABLE_S = 30.0
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.1, 3.0
_ENDING = (signal.SIGTERM, signal.SIGINT)
_CRASHED = 70
"""Exit status after an unhandled exception (EX_SOFTWARE)."""


def supervise(run: Callable[[bool], None], max_restarts: int = MAX_RESTARTS) -> None:
    """Call `run(is_restart)` in a separate process, and again whenever that process is killed or crashes.

    Returns, in either process, when `run` returns. Raises HeadwayError after `max_restarts` failed restarts in a row.
    If the process ends with a status other than 0, raises SystemExit with this status. Call it before threads start.
    """
    pause_s, num_restarts, hangup, ending = _FIRST_PAUSE_S, 0, Hangup(), _Ending()
    is_restart = False
    while True:
        started_s = time.monotonic()
        child = _Child(run, is_restart, hangup, ending)
        if child.is_child:
            return
        how = child.wait()
        if how is None:
            return
        if time.monotonic() - started_s >= _STABLE_S:
            pause_s, num_restarts = _FIRST_PAUSE_S, 0
        if num_restarts >= max_restarts:
            raise HeadwayError(f"the gateway's process has {how}, after {num_restarts} restarts in a row: it ends")
        if ending.is_told:
            log.error("the gateway's process has %s while it ended", how)
            return
        log.error("the gateway's process has %s: it is started again", how)
        if child.wait_to_restart(pause_s):
            return
        num_restarts, pause_s, is_restart = num_restarts + 1, min(2 * pause_s, _LONGEST_PAUSE_S), True


class _Ending:
    """Whether a signal to end has come. Uses no lock, because a handler can interrupt itself."""

    is_told = False


class _Child:
    """One process of the gateway, as the supervising process sees it. In the process itself, the constructor returns
    when the gateway has ended, and `is_child` is true."""

    def __init__(self, run: Callable[[bool], None], is_restart: bool, hangup: Hangup, ending: _Ending) -> None:
        alive, self._held = os.pipe()  # the pipe's other end closes when the supervising process ends
        sys.stdout.flush()
        sys.stderr.flush()
        gc.freeze()  # keeps the memory of both processes shared
        self._ending, self._is_running = ending, True
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, _ENDING)  # until each process has its own handlers
        self.pid = os.fork()
        self.is_child = self.pid == 0
        if self.is_child:
            exit_at_sigterm()
            signal.signal(signal.SIGINT, signal.default_int_handler)
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)
            os.close(self._held)
            _run(run, is_restart, alive)
            return
        os.close(alive)
        for number in _ENDING:
            signal.signal(number, self._end)
        signal.signal(signal.SIGHUP, partial(self._hang_up, hangup))
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        if ending.is_told:  # a signal came since the last process ended
            self._end(signal.SIGTERM, None)

    def _hang_up(self, hangup: Hangup, number: int, frame: FrameType | None) -> None:
        """Make the process reload its fleet file, or end with the terminal."""
        if hangup.is_end():
            self._end(signal.SIGTERM, frame)
            return
        with suppress(ProcessLookupError):
            os.kill(self.pid, number)

    def _end(self, number: int, frame: FrameType | None) -> None:
        self._ending.is_told = True
        if self._is_running:
            with suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def wait(self) -> str | None:
        """Wait until the process ends. Returns the way in which it failed; None if it succeeded. Raises SystemExit if
        it ended with an error."""
        _, status = os.waitpid(self.pid, 0)
        self._is_running = False
        os.close(self._held)
        if self._ending.is_told:
            ignore_sigterm()
        if os.WIFSIGNALED(status) and not self._ending.is_told:
            return f"been killed by signal {os.WTERMSIG(status)}"
        code = os.waitstatus_to_exitcode(status)
        if code == _CRASHED:
            return "crashed"
        if code:
            raise SystemExit(max(code, 1))
        return None

    def wait_to_restart(self, pause_s: float) -> bool:
        """Pause before a restart. Returns True if the gateway must end."""
        end_s = time.monotonic() + pause_s
        while time.monotonic() < end_s and not self._ending.is_told:
            time.sleep(min(0.05, pause_s))
        if self._ending.is_told:
            ignore_sigterm()
        return self._ending.is_told


def _run(run: Callable[[bool], None], is_restart: bool, alive: int) -> None:
    """The gateway's process. It has its own process group, so that a terminal's signals come from the supervising
    process."""
    signal.signal(signal.SIGHUP, signal.SIG_IGN)  # until there is a file to reload
    os.setpgid(0, 0)
    threading.Thread(target=_end_with, args=(alive,), name="supervisor", daemon=True).start()
    try:
        run(is_restart)
    except HeadwayError:
        raise
    except Exception:
        log.exception("the gateway")
        logging.shutdown()
        os._exit(_CRASHED)


def _end_with(alive: int) -> None:
    """End this process when the supervising process ends."""
    os.read(alive, 1)
    os.kill(os.getpid(), signal.SIGTERM)
