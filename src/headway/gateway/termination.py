"""Makes SIGTERM end the process with status 0, even if the signal comes several times, and at any stage of the process.

A process killed by the signal has another status, and its parent would take that status for a failure.
"""

from __future__ import annotations

import signal
import sys
from types import FrameType


def ignore_sigterm() -> None:
    """Ignore SIGTERM from now on, in a process that is ending: the interpreter drops handlers before the process
    ends."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)


def exit_at_sigterm() -> None:
    """Exit at a SIGTERM from now on, in a process that has nothing to clean up."""
    signal.signal(signal.SIGTERM, _exit)


def _exit(number: int, frame: FrameType | None) -> None:
    ignore_sigterm()
    sys.exit(0)
