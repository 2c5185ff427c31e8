"""Runs calls that may hang, such as file operations on a network file system, in threads."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Any, TypeVar

T = TypeVar("T")


async def in_thread(function: Callable[..., T], *arguments: Any) -> T:
    """The function's result or exception, from a separate daemon thread.

    `asyncio.to_thread` has few threads: hanging calls would occupy all of them, and the end of the process would wait
    for the hanging calls.
    """
    return await start_in_thread(function, *arguments)


def start_in_thread(function: Callable[..., T], *arguments: Any) -> asyncio.Future[T]:
    """As `in_thread`, without waiting. An error that nobody awaits is dropped."""
    loop = asyncio.get_running_loop()
    ended: asyncio.Future[T] = loop.create_future()
    ended.add_done_callback(_note_error)
    waiting = [ended]

    def run() -> None:
        outcome: tuple[Any, BaseException | None]
        try:
            outcome = function(*arguments), None
        except BaseException as error:
            outcome = None, error
        with suppress(RuntimeError):  # the loop may be closed by now
            loop.call_soon_threadsafe(_end, waiting.pop(), *outcome)
        del outcome  # an error refers to this frame, and this frame would refer back to the error and its future

    threading.Thread(target=run, name=f"call of {getattr(function, '__name__', function)}", daemon=True).start()
    return ended


def _end(ended: asyncio.Future[Any], result: Any, error: BaseException | None) -> None:
    if ended.cancelled():
        return
    if error is None:
        ended.set_result(result)
    else:
        ended.set_exception(error)


class OneAtATime:
    """Runs one call at a time, so that hanging calls occupy only one thread. Belongs to one event loop."""

    def __init__(self) -> None:
        self._running: asyncio.Future[Any] | None = None

    @property
    def is_busy(self) -> bool:
        """Whether a call has not returned, even if nobody waits for it."""
        return self._running is not None and not self._running.done()

    async def call(self, function: Callable[..., T], *arguments: Any) -> T:
        """The function's result or exception, once the earlier calls have returned."""
        while self._running is not None and not self._running.done():
            await asyncio.wait({self._running})
        self._running = start_in_thread(function, *arguments)
        return await asyncio.shield(self._running)


def _note_error(ended: asyncio.Future[Any]) -> None:
    """Mark an error as retrieved, because the caller may have left."""
    if not ended.cancelled():
        ended.exception()
