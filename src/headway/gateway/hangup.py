"""What SIGHUP means: the terminal is gone, or a request to read the fleet file again.

A terminal that is closed sends it to all that runs in it, and `kill -HUP` sends it to reload, as with other servers.
"""

from __future__ import annotations

import os
import signal


class Hangup:
    """Made at the start of a process, which tells later what a SIGHUP is."""

    def __init__(self) -> None:
        """A process that ignores SIGHUP at its start, as one of `nohup` does, is not tied to its terminal."""
        self._had_terminal = signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN and _has_terminal()

    def is_end(self) -> bool:
        """Whether the process has to end, as its terminal is gone."""
        return self._had_terminal and not _has_terminal()


def _has_terminal() -> bool:
    """Whether the process has a terminal that can be opened."""
    try:
        os.close(os.open("/dev/tty", os.O_RDONLY | os.O_NOCTTY))
    except OSError:
        return False
    return True
