"""A gateway that is told to end: new requests are refused in words, and streams go on for `drain_s`."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import serving
from serving import ask, chat, until
from worker_fleet import children, started_stream, worker_pids

pytest.importorskip("httptools")


@pytest.fixture(params=[("--workers", "1"), ("--workers", "2"), ("--workers", "1", "--restarts", "3")])
def front(request: pytest.FixtureRequest, engines: list[serving.Process], tmp_path: Path) -> Iterator[serving.Process]:
    made = serving.gateway(serving.fleet_file(tmp_path, [engines[0].url], gateway={"drain_s": 4}), *request.param)
    with serving.closing(made):
        serving.all_up(made, 1)
        yield made


def _draining(made: serving.Process) -> list[Any]:
    """Tell the gateway to end, and wait until it is not ready; what new requests get from then on."""
    made.process.send_signal(signal.SIGTERM)
    until(lambda: ask(made, "/health").json()["status"] == "unavailable", 2)
    replies = [chat(made, max_tokens=1) for _ in range(6)]
    told = [(reply.status, reply.headers.get("retry-after"), reply.json()["error"]["code"]) for reply in replies]
    assert ask(made, "/v1/models").json()["data"]
    return told


def test_new_requests_are_refused_while_streams_go_on(front: serving.Process) -> None:
    _, events = started_stream(front, max_tokens=60)
    told = _draining(front)
    assert told == [(503, "1", "shutting_down")] * 6
    rest = list(events)
    assert rest[-1] == "[DONE]" and not any("error" in event for event in rest[:-1])
    front.process.wait(serving.PATIENCE_S)


def test_streams_are_cut_off_after_the_drain_time(front: serving.Process) -> None:
    _, events = started_stream(front, max_tokens=4000)
    began_s = time.monotonic()
    assert set(_draining(front)) == {(503, "1", "shutting_down")}
    rest = list(events)
    assert rest[-2]["error"]["code"] == "shutting_down" and rest[-1] == "[DONE]"
    assert time.monotonic() - began_s >= 3.5
    front.process.wait(serving.PATIENCE_S)


def test_a_worker_that_leaves_alone_makes_place_for_the_next(engines: list[serving.Process], tmp_path: Path) -> None:
    """It refuses nobody: who comes meanwhile waits for the next worker."""
    made = serving.gateway(serving.fleet_file(tmp_path, [engines[0].url]), "--workers", "2")
    with serving.closing(made):
        serving.all_up(made, 1)
        streams = [started_stream(made, max_tokens=100) for _ in range(4)]
        (first, *_) = worker_pids(made)
        os.kill(first, signal.SIGTERM)
        for _ in range(8):
            assert chat(made, max_tokens=1).json()["usage"]
        assert all(list(events)[-1] == "[DONE]" for _, events in streams)
        until(lambda: first not in children(made.process.pid))
