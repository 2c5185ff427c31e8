"""Worker processes for runs, which end with the main process: at Ctrl-C at once, and without a traceback."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from concurrent.futures import Executor, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from multiprocessing import active_children, get_context

from headway.core.errors import HeadwayError


@contextmanager
def processes(jobs: int, num_tasks: int) -> Iterator[Executor | None]:
    """A pool of at most `jobs` processes; None for one job or task, which needs none.

    HeadwayError if a process is killed, as by the system when memory runs out.
    """
    if jobs == 1 or num_tasks <= 1:
        yield None
        return
    others = set(active_children())
    # A terminal sends Ctrl-C to all processes; Python's own handler would print a traceback in each.
    on_interrupts = signal.SIGINT, signal.SIG_DFL
    pool = ProcessPoolExecutor(min(jobs, num_tasks), get_context("spawn"), signal.signal, on_interrupts)
    try:
        yield pool
    except BaseException as error:
        for child in set(active_children()) - others:
            child.terminate()
        if isinstance(error, BrokenProcessPool):
            raise HeadwayError("a worker process was killed; is there enough memory for --jobs?") from None
        raise
    finally:
        pool.shutdown(cancel_futures=True)
