"""Worker processes for runs, which end with the main process: at Ctrl-C at once, and without a traceback."""

from __future__ import annotations

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


_MOST_WAIT_S = 1.0
"""For the ends of a broken pool's processes to be known."""


def available_cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1


@contextmanager
def processes(jobs: int, num_tasks: int | None = None) -> Iterator[Executor | None]:
    """A pool of at most `jobs` processes; None for one job or task, which needs none.

    All of them start now. On Linux they are forks of this process, with its modules loaded, as long as it has no other
    threads; elsewhere each is a new interpreter. HeadwayError, with the process and the signal, if one is killed, as by
    the system when memory runs out; and for more jobs than a machine has.
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


def _begin() -> None:
    """Prepare a worker: it ends at Ctrl-C, and when its parent ends."""
    # A terminal sends Ctrl-C to all processes; Python's own handler would print a traceback in each.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    warnings.simplefilter("ignore", HeadwayWarning)  # which the main process has shown
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    """End this process when its parent does, even if the parent was killed and could send no signal."""
    from multiprocessing import parent_process

    parent = parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


def _killed(workers: Iterable[BaseProcess]) -> str:
    """The worker that a signal ended, as in "worker process 123 was killed by SIGKILL"; "" if none is known.

    The pool ends the others with SIGTERM. It waits for them in a thread of its own: until that has noted how a process
    ended, nobody else can know.
    """
    until_s = time.monotonic() + _MOST_WAIT_S
    for each in workers:
        while each.exitcode is None and time.monotonic() < until_s:
            time.sleep(0.005)
        code = each.exitcode or 0
        if code < 0 and code != -signal.SIGTERM:
            return f"worker process {each.pid} was killed by {signal.Signals(-code).name}"
    return ""
