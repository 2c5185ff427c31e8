"""Who works out what takes long, such as a plan: here and now in a simulation, beside the event loop in a gateway."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol


class BackgroundTask(Protocol):
    """Has one piece of work, and does it again and again, for other arguments."""

    @property
    def is_busy(self) -> bool:
        """It is not done with what it was asked last."""

    def ask(self, *arguments: Any) -> None:
        """Work it out for these. Never while it is busy."""

    def answer(self) -> Any:
        """What came of it, once it is done; None: it failed, and whoever runs it has been told why."""


TaskFactory = Callable[[Callable[..., Any]], BackgroundTask]
"""Finds a clerk for a piece of work."""


class InlineTask:
    """No time passes. What goes wrong is raised."""

    is_busy = False

    def __init__(self, work: Callable[..., Any]) -> None:
        self._work = work
        self._asked: tuple[Any, ...] = ()

    def ask(self, *arguments: Any) -> None:
        """As the Protocol says."""
        self._asked = arguments

    def answer(self) -> Any:
        """As the Protocol says."""
        asked, self._asked = self._asked, ()
        return self._work(*asked)
