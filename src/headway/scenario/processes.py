"""Worker processes for runs. They end with the main process; Ctrl-C ends them at once, without a traceback."""

from __future__ import annotations

import gc
import os
import signal
import sys
import threading
import time
import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from headway.core.counts import MOST_PROCESSES, check_count
from headway.core.errors import HeadwayError, HeadwayWarning

if TYPE_CHECKING:
    from concurrent.futures import Executor
    from multiprocessing.process import BaseProcess


_OBJECTS_PER_COLLECTION = 1 << 20
_MOST_WAIT_S = 1.0
"""Longest wait for the exit codes of a broken pool's processes."""


def available_cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1


@contextmanager
def processes(jobs: int, num_tasks: int | None = None) -> Iterator[Executor | None]:
    """A pool of at most `jobs` processes; None for one job or task, which needs none.

    All of them start now. On Linux they are forks of this process, with its modules loaded, unless it has other
    threads; elsewhere each is a new interpreter. Raises HeadwayError, with process and signal, if one is killed (for
    example for lack of memory), and for more jobs than any machine supports.
    """
    check_count("jobs", jobs, MOST_PROCESSES)
    if jobs == 1 or (num_tasks is not None and num_tasks <= 1):
        yield None
        return
    from concurrent.futures import ProcessPoolExecutor
    from concurrent.futures.process import BrokenProcessPool
    from multiprocessing import active_children, get_context

    others = set(active_children())
    can_fork = sys.platform == "linux" and threading.active_count() == 1
    num = jobs if num_tasks is None else min(jobs, num_tasks)
    pool = ProcessPoolExecutor(num, get_context("fork" if can_fork else "spawn"), _begin)
    workers: set[BaseProcess] = set()
    try:
        for _ in range(num):
            pool.submit(int)
        workers = set(active_children()) - others
        yield pool
    except BaseException as error:
        dead = _killed(workers) if isinstance(error, BrokenProcessPool) else ""
        for child in set(active_children()) - others:
            child.terminate()
        if isinstance(error, BrokenProcessPool):
            raise HeadwayError(f"{dead or 'a worker process died'}; is there enough memory for --jobs?") from None
        raise
    finally:
        pool.shutdown(cancel_futures=True)


def collect_rarely() -> None:
    """Until this process ends, collect the objects of many runs at once. A run's replicas refer to each other, so that
    only collections free them."""
    gc.set_threshold(_OBJECTS_PER_COLLECTION)


def _begin() -> None:
    """Prepare a worker to end at Ctrl-C and when its parent ends."""
    # A terminal sends Ctrl-C to all processes, and Python's own handler would print a traceback in each.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    warnings.simplefilter("ignore", HeadwayWarning)  # the main process has already shown them
    collect_rarely()
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    """End this process when its parent ends, even if the parent was killed and could not send a signal."""
    from multiprocessing import parent_process

    parent = parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


def _killed(workers: Iterable[BaseProcess]) -> str:
    """The worker that a signal ended, as in "worker process 123 was killed by SIGKILL"; "" if unknown.

    The pool ends the other workers with SIGTERM. Its own thread waits for them, and exit codes are known only after
    that thread has read them.
    """
    until_s = time.monotonic() + _MOST_WAIT_S
    for each in workers:
        while each.exitcode is None and time.monotonic() < until_s:
            time.sleep(0.005)
        code = each.exitcode or 0
        if code < 0 and code != -signal.SIGTERM:
            return f"worker process {each.pid} was killed by {signal.Signals(-code).name}"
    return ""
