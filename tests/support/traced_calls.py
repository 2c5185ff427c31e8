"""Traces which of Headway's functions are called, and in which order."""

from __future__ import annotations

import gc
import inspect
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import headway

_ROOT = str(Path(headway.__file__).parent) + "/"
_SUSPENDS = inspect.CO_GENERATOR | inspect.CO_COROUTINE | inspect.CO_ASYNC_GENERATOR
Call = tuple[str, str]
"""File below `src/headway`, and the function's qualified name."""
_PERIODIC = frozenset(
    {
        "Gateway._check_stalls",
        "LoopDelay._sample",
        "RunTelemetry._compare_predictions",
        "StallWatch._step_s",
    }
)
"""What the gateway does every so often, however many requests there are."""

_COMPREHENSIONS = frozenset({"<listcomp>", "<dictcomp>", "<setcomp>"})
"""Parts of their functions, which Python calls before version 3.12."""


@contextmanager
def traced() -> Iterator[list[Call]]:
    """The calls of Headway's functions in this thread, as they happen, but for periodic ones, however many fall into
    this time. A resumed coroutine is not a new call."""
    calls: list[Call] = []
    frames: dict[int, FrameType] = {}

    def profile(frame: FrameType, event: str, argument: Any) -> None:
        code = frame.f_code
        if event != "call" or not code.co_filename.startswith(_ROOT) or id(frame) in frames:
            return
        if code.co_name in _COMPREHENSIONS or _is_periodic(frame):
            return
        if code.co_flags & _SUSPENDS:
            frames[id(frame)] = frame
        calls.append((code.co_filename.removeprefix(_ROOT), code.co_qualname))

    before, collects = sys.getprofile(), gc.isenabled()
    gc.disable()  # a collection closes suspended generators of earlier tests, and each closing is a call
    sys.setprofile(profile)
    try:
        yield calls
    finally:
        sys.setprofile(before)
        if collects:
            gc.enable()


def _is_periodic(frame: FrameType) -> bool:
    caller: FrameType | None = frame
    while caller is not None and caller.f_code.co_qualname not in _PERIODIC:
        caller = caller.f_back
    return caller is not None


def missing_step(steps: list[Call], calls: list[Call]) -> Call | None:
    """The first step that is not called after the previous one; None if all are called in order."""
    position = 0
    for step in steps:
        if step not in calls[position:]:
            return step
        position = calls.index(step, position) + 1
    return None
