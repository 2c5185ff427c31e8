"""Long computations, such as planning: a simulation runs them at once, a gateway runs them while its event loop goes
on."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol


class BackgroundTask(Protocol):
    """A function computed repeatedly for different arguments, one computation at a time."""

    @property
    def is_busy(self) -> bool:
        """Whether a computation is running."""

    def start(self, *arguments: Any) -> None:
        """Start computing the function for these arguments. Call only while the task is not busy."""

    def result(self) -> Any:
        """The result of the last computation, once it has ended; None if it failed and the task logged the reason."""


TaskFactory = Callable[[Callable[..., Any]], BackgroundTask]
"""Creates a task for a function."""


class InlineTask:
    """A task that computes in `result`, takes no simulated time, and raises the function's errors."""

    is_busy = False

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function
        self._arguments: tuple[Any, ...] = ()

    def start(self, *arguments: Any) -> None:
        self._arguments = arguments

    def result(self) -> Any:
        arguments, self._arguments = self._arguments, ()
        return self._function(*arguments)
