"""An executor that runs calls on a Ray cluster."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from concurrent.futures import Executor, Future
from contextlib import contextmanager
from typing import Any, ParamSpec, TypeVar

from headway.core.errors import HeadwayError

P = ParamSpec("P")
T = TypeVar("T")


class RayExecutor(Executor):
    """Runs each call as a Ray task with one CPU. Functions and arguments are pickled."""

    def __init__(self, ray: Any) -> None:
        self._ray = ray
        self._refs: list[Any] = []

    def submit(self, fn: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        """As in `concurrent.futures.Executor`. A HeadwayError of the call is raised unchanged."""
        ref = self._ray.remote(_call).options(num_cpus=1, max_retries=0).remote(fn, args, kwargs)
        self._refs.append(ref)
        result: Future[T] = Future()
        ref.future().add_done_callback(lambda done: _settle(done, result))
        return result

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """Wait for running calls, or cancel them."""
        if cancel_futures:
            for ref in self._refs:
                self._ray.cancel(ref, force=True)
        elif wait and self._refs:
            self._ray.wait(self._refs, num_returns=len(self._refs))
        self._refs = []


def _call(fn: Callable[..., T], args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[T | None, str | None]:
    """The result, or the message of a HeadwayError; Ray would add a traceback to the exception itself."""
    try:
        return fn(*args, **kwargs), None
    except HeadwayError as error:
        return None, str(error)


def _settle(done: Future[Any], result: Future[Any]) -> None:
    if not result.set_running_or_notify_cancel():
        return
    if done.cancelled():
        result.set_exception(HeadwayError("a task was cancelled"))
    elif (error := done.exception()) is not None:
        result.set_exception(HeadwayError(f"a task of the Ray cluster failed ({str(error).strip().splitlines()[-1]})"))
    else:
        value, message = done.result()
        if message is None:
            result.set_result(value)
        else:
            result.set_exception(HeadwayError(message))


@contextmanager
def cluster() -> Iterator[RayExecutor]:
    """An executor on the cluster at RAY_ADDRESS or on this machine, else on a temporary local cluster.

    Every machine of the cluster needs this version of Headway. Raises HeadwayError if the package `ray` is missing.
    """
    try:
        import ray
    except ImportError:
        raise HeadwayError("--ray needs Ray: pip install 'headway[ray]'") from None
    was_there = ray.is_initialized()
    if not was_there:
        ray.init(log_to_driver=False, include_dashboard=False, logging_level=logging.ERROR)
    pool = RayExecutor(ray)
    try:
        yield pool
    finally:
        pool.shutdown(cancel_futures=True)
        if not was_there:
            ray.shutdown()
