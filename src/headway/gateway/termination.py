"""What SIGTERM means: end, with the status 0, however often it comes, and however far the process has started or ended.

A process that is killed by the signal has another status, which those that started it take for a failure.
"""

from __future__ import annotations

import signal
import sys
from types import FrameType


def ignore_sigterm() -> None:
    """Ignore SIGTERM from now on. For a process that ends: the interpreter drops handlers before it is gone."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)


def exit_at_sigterm() -> None:
    """Exit at a SIGTERM from now on. For a process that has begun nothing that it must end."""
    signal.signal(signal.SIGTERM, _exit)


def _exit(number: int, frame: FrameType | None) -> None:
    ignore_sigterm()
    sys.exit(0)
