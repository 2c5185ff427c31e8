"""Detects a policy that uses the clock, the environment, files, or randomness other than its view's."""

from __future__ import annotations

import builtins
import gc
import random
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType, ModuleType
from typing import Any

from headway.testing.strict_views import BrokenPolicyError

_FORBIDDEN = frozenset(
    (
        "time", "datetime", "os", "posix", "nt", "io", "_io", "pathlib", "socket", "_socket", "subprocess",
        "secrets", "uuid", "logging", "asyncio",
    )
)  # fmt: skip
_BUILTINS = frozenset(getattr(builtins, name) for name in ("open", "print", "input"))
_GLOBAL_RANDOM = getattr(random, "_inst", None)


@contextmanager
def forbid_side_effects() -> Iterator[None]:
    """Raise BrokenPolicyError at the end if the enclosed code used anything except its arguments."""
    offences: list[str] = []

    def profile(frame: FrameType, event: str, called: Any) -> None:
        offence = _c_offence(called) if event == "c_call" else _python_offence(frame) if event == "call" else ""
        if offence:
            offences.append(offence)

    before = sys.getprofile()
    collects = gc.isenabled()
    gc.disable()  # a garbage-collector callback may read the clock
    sys.setprofile(profile)
    try:
        yield
    finally:
        sys.setprofile(before)
        if collects:
            gc.enable()
    if offences:
        raise BrokenPolicyError(f"used {offences[0]}: a policy may use only `now`, its views and `view.random`")


def _c_offence(called: Any) -> str:
    name = getattr(called, "__name__", "")
    owner = getattr(called, "__self__", None)
    if called in _BUILTINS:
        return f"{name}()"
    if owner is None:
        return ""
    if owner is _GLOBAL_RANDOM or owner is _numpy_random():
        return f"the global random ({name})"
    module = owner.__name__ if isinstance(owner, ModuleType) else getattr(owner, "__module__", "")
    return f"{module}.{name}" if isinstance(owner, ModuleType | type) and module in _FORBIDDEN else ""


def _python_offence(frame: FrameType) -> str:
    module, name = frame.f_globals.get("__name__", ""), frame.f_code.co_name
    if module == "random":
        values = frame.f_locals
        if values.get("self") is _GLOBAL_RANDOM:
            return f"the global random ({name})"
        if name == "__init__" and values.get("x") is None:
            return "random.Random() without a seed"
    return f"{module}.{name}" if module.partition(".")[0] in _FORBIDDEN else ""


def _numpy_random() -> object:
    """numpy's global generator; without numpy, an object without methods."""
    return getattr(sys.modules.get("numpy.random.mtrand"), "_rand", _FORBIDDEN)
