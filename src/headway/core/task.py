"""Work that takes long, such as planning: done at once in a simulation, beside the event loop in a gateway."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol


class BackgroundTask(Protocol):
    """One function that is computed again and again, for other arguments. One computation runs at a time."""

    @property
    def is_busy(self) -> bool:
        """Whether a computation is running."""

    def start(self, *arguments: Any) -> None:
        """Start to compute the function for these arguments. Call only while the task is not busy."""

    def result(self) -> Any:
        """The result of the last computation, after its end; None if it failed. The task has logged the reason."""


TaskFactory = Callable[[Callable[..., Any]], BackgroundTask]
"""Creates a task for a function."""


class InlineTask:
    """A task that computes in `result`, takes no simulated time, and raises what the function raises."""

    is_busy = False

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function
        self._arguments: tuple[Any, ...] = ()

    def start(self, *arguments: Any) -> None:
        self._arguments = arguments

    def result(self) -> Any:
        arguments, self._arguments = self._arguments, ()
        return self._function(*arguments)
