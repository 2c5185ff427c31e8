"""The meaning of SIGHUP: either the terminal was closed, or the fleet file must be read again. A closed terminal sends
SIGHUP to all its processes; an operator sends it with `kill -HUP` for a reload, as with other servers.
"""

from __future__ import annotations

import os
import signal


class Hangup:
    """Created at the start of a process to interpret a later SIGHUP."""

    def __init__(self) -> None:
        """A process that ignores SIGHUP at its start, as under `nohup`, is taken as independent of its terminal."""
        self._had_terminal = signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN and _has_terminal()

    def is_end(self) -> bool:
        """Whether the process must end, because its terminal is gone."""
        return self._had_terminal and not _has_terminal()


def _has_terminal() -> bool:
    """Whether the process has a terminal that can be opened."""
    try:
        os.close(os.open("/dev/tty", os.O_RDONLY | os.O_NOCTTY))
    except OSError:
        return False
    return True
