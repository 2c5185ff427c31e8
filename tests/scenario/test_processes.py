"""Worker processes: they start without importing anew, end with the command, and their deaths are named."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from threading import Event, Thread

import pytest

from headway.core.errors import HeadwayError
from headway.scenario.processes import _killed, available_cores, processes

LOADED_LATE: list[int] = []


def _die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _loaded() -> list[int]:
    return LOADED_LATE


def test_one_job_or_one_task_needs_no_process() -> None:
    for jobs, num_tasks in ((1, 5), (4, 1), (4, 0)):
        with processes(jobs, num_tasks) as pool:
            assert pool is None
    assert available_cores() >= 1


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux forks")
def test_workers_are_forks_unless_there_are_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """A fork has what was loaded before; a new interpreter has not."""
    monkeypatch.setattr(sys.modules[__name__], "LOADED_LATE", [1])
    with monkeypatch.context() as patch:
        patch.setattr(threading, "active_count", lambda: 1)  # whatever other tests have left running
        with processes(2) as pool:
            assert pool is not None and pool.submit(_loaded).result() == [1]
    done = Event()
    waiting = Thread(target=done.wait)
    waiting.start()
    try:
        with processes(2) as pool:
            assert pool is not None and pool.submit(_loaded).result() == []
    finally:
        done.set()
        waiting.join()


def test_a_killed_worker_is_named() -> None:
    named = r"worker process \d+ was killed by SIGKILL; is there enough memory"
    with pytest.raises(HeadwayError, match=named), processes(2) as pool:
        assert pool is not None
        pool.submit(_die).result()


def test_a_killed_worker_is_named_once_the_pool_has_noted_its_end() -> None:
    class Worker:
        pid = 7
        exit_codes = iter([None, None, None, -signal.SIGKILL, -signal.SIGKILL])

        @property
        def exitcode(self) -> int | None:
            return next(self.exit_codes)

    assert _killed([Worker()]) == "worker process 7 was killed by SIGKILL"  # type: ignore[list-item]


@pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")
def test_workers_end_with_a_parent_that_was_killed() -> None:
    program = (
        "import os, sys, time\n"
        "from headway.scenario.processes import processes\n"
        "with processes(2) as pool:\n"
        "    print(*[pool.submit(os.getpid).result() for _ in range(2)], flush=True)\n"
        "    time.sleep(60)\n"
    )
    parent = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    workers = {int(each) for each in parent.stdout.readline().split()}
    parent.kill()
    parent.communicate()
    for _ in range(200):
        if not any(_is_running(each) for each in workers):
            return
        time.sleep(0.05)
    raise AssertionError(f"workers outlive their parent: {workers}")


def _is_running(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False
