"""The gateway's process is killed, crashes, or ends; and so does the process that starts it again."""

from __future__ import annotations

import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

import serving
from headway.core.errors import HeadwayError
from headway.serving import supervision
from headway.serving.supervision import supervise
from serving import chat, until
from worker_fleet import children, is_alive, started_stream

pytest.importorskip("httptools")


def supervised(folder: Path, engines: list[serving.Process], *options: str) -> serving.Process:
    made = serving.gateway(serving.fleet_file(folder, [each.url for each in engines]), "--restarts", "3", *options)
    serving.all_up(made, len(engines))
    return made


def child_of(front: serving.Process) -> int:
    """The gateway's process."""
    found: list[int] = []
    until(lambda: bool(found.extend(children(front.process.pid)) or found))
    return found[0]


def ask_until_answered(front: serving.Process) -> None:
    """As a client that asks now, and again when it is told to."""
    while "error" in (answer := chat(front, max_tokens=2).json()):
        assert answer["error"]["code"] == "shutting_down", answer  # a worker of the process that is gone
        time.sleep(0.2)
    assert answer["usage"]["completion_tokens"] == 2


@pytest.mark.parametrize("workers", ["1", "2"])
def test_a_killed_gateway_is_back_in_seconds(tmp_path: Path, workers: str) -> None:
    """A client that comes meanwhile waits. With workers, streams go on to their ends; without, they break."""
    engine = serving.emulator()
    with serving.closing(engine):
        front = supervised(tmp_path, [engine], "--workers", workers)
        with serving.closing(front):
            reply, events = started_stream(front, max_tokens=100)
            killed = child_of(front)
            os.kill(killed, signal.SIGKILL)
            ask_until_answered(front)
            assert child_of(front) != killed
            if workers == "2":
                assert list(events)[-1] == "[DONE]"
            reply.close()
            front.wait_for("been killed by signal 9: it is started again")
            front.process.send_signal(signal.SIGTERM)
            assert front.process.wait(serving.PATIENCE_S) == 0


def test_it_ends_with_its_supervisor_and_drains(tmp_path: Path) -> None:
    engine = serving.emulator()
    with serving.closing(engine):
        front = supervised(tmp_path, [engine])
        with serving.closing(front):
            reply, events = started_stream(front, max_tokens=100)
            gateway = child_of(front)
            front.process.kill()
            assert list(events)[-1] == "[DONE]"
            reply.close()
            until(lambda: not is_alive(gateway))


def test_restarts_are_bounded_and_the_end_has_a_reason(tmp_path: Path) -> None:
    engine = serving.emulator()
    with serving.closing(engine):
        front = supervised(tmp_path, [engine])
        with serving.closing(front):
            for _ in range(4):
                gateway = child_of(front)
                os.kill(gateway, signal.SIGKILL)
                until(lambda gateway=gateway: gateway not in children(front.process.pid))
            assert front.process.wait(serving.PATIENCE_S) == 2
            assert front.process.stderr is not None
            written = front.process.stderr.read().decode()
            assert "has been killed by signal 9, after 3 restarts in a row: it ends" in written


def status_of(target: Callable[[], None]) -> int:
    """The exit status of a process that does this."""
    pid = os.fork()
    if pid == 0:
        try:
            target()
        except SystemExit as end:
            os._exit(end.code if isinstance(end.code, int) else 1)
        except HeadwayError as error:
            os._exit(99 if "crashed, after 2 restarts" in str(error) else 98)
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def test_only_what_fails_is_started_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervision, "_FIRST_PAUSE_S", 0.01)

    def crashes(is_restart: bool) -> None:
        raise RuntimeError

    def ends(code: int) -> Callable[[bool], None]:
        return lambda is_restart: os._exit(code)

    def crashes_once(is_restart: bool) -> None:
        if not is_restart:
            raise RuntimeError
        os._exit(7)

    assert status_of(lambda: supervise(crashes, 2)) == 99
    assert status_of(lambda: supervise(ends(3), 2)) == 3
    assert status_of(lambda: supervise(ends(0), 2)) == 0
    assert status_of(lambda: supervise(crashes_once, 2)) == 7


def test_a_crash_at_the_end_leaves_no_signal_that_kills(capfd: pytest.CaptureFixture[str]) -> None:
    """Signals to end go on until the supervising process is gone; its own handler is dropped before that. The log says
    that it ends."""

    def crashes_at_its_end(is_restart: bool) -> None:
        def crash(number: int, frame: object) -> None:
            raise RuntimeError

        signal.signal(signal.SIGTERM, crash)
        os.kill(os.getppid(), signal.SIGTERM)
        time.sleep(serving.PATIENCE_S)

    def told_to_end() -> None:
        supervision.log.addHandler(logging.StreamHandler(os.fdopen(2, "w")))
        supervise(crashes_at_its_end, 2)
        os._exit(0 if signal.getsignal(signal.SIGTERM) is signal.SIG_IGN else 3)

    assert status_of(told_to_end) == 0
    written = capfd.readouterr().err
    assert "has crashed while it ended" in written and "is started again" not in written


def test_a_signal_to_end_may_interrupt_its_own_handler() -> None:
    """At each line of the handler: with a lock in it, it waited for itself."""
    child = object.__new__(supervision._Child)
    child._ending, child._is_running = supervision._Ending(), False
    num_lines = 0

    def interrupts(frame: FrameType, event: str, argument: object) -> Any:
        nonlocal num_lines
        if event == "line":
            num_lines += 1
            sys.settrace(None)
            child._end(signal.SIGTERM, None)
            sys.settrace(interrupts)
        return interrupts

    def handle() -> None:
        sys.settrace(interrupts)
        child._end(signal.SIGTERM, None)
        sys.settrace(None)

    handling = threading.Thread(target=handle, daemon=True)
    handling.start()
    handling.join(serving.PATIENCE_S)
    assert not handling.is_alive() and num_lines and child._ending.is_told
