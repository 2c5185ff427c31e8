"""Runs independent calls: one after the other, or in parallel if they wait for worker processes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from typing import Any

Together = Callable[[Sequence[Callable[[], Any]]], list[Any]]
"""Makes calls in any order, and returns their results in the order of the calls."""


def in_turn(calls: Sequence[Callable[[], Any]]) -> list[Any]:
    return [call() for call in calls]


def in_threads(calls: Sequence[Callable[[], Any]]) -> list[Any]:
    """Run each call in its own thread. The first error is raised after all have ended."""
    if len(calls) <= 1:
        return in_turn(calls)
    with ThreadPoolExecutor(len(calls)) as threads:
        return [each.result() for each in [threads.submit(call) for call in calls]]


def together_in(pool: Executor | None) -> Together:
    """Threads for calls that wait for a pool; without a pool, one call after the other."""
    return in_turn if pool is None else in_threads
