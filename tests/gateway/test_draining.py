"""A gateway that is told to end: new requests are refused in words, and streams go on for `drain_s`."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

import serving
from serving import chat, send, until
from worker_fleet import children, started_stream, worker_pids

pytest.importorskip("httptools")


Start = Callable[[float], serving.Process]


@pytest.fixture(params=[("--workers", "1"), ("--workers", "2"), ("--workers", "1", "--restarts", "3")])
def start(request: pytest.FixtureRequest, engines: list[serving.Process], tmp_path: Path) -> Iterator[Start]:
    """Starts a gateway with this `drain_s`."""
    with ExitStack() as started:

        def start(drain_s: float) -> serving.Process:
            path = serving.fleet_file(tmp_path, [engines[0].url], gateway={"drain_s": drain_s})
            made = serving.gateway(path, *request.param)
            started.enter_context(serving.closing(made))
            serving.all_up(made, 1)
            return made

        yield start


def test_new_requests_are_refused_while_streams_go_on(start: Start) -> None:
    front = start(60.0)
    long, _ = started_stream(front)
    _, events = started_stream(front, max_tokens=60)
    front.process.send_signal(signal.SIGTERM)
    until(lambda: send(front, "/health").json()["status"] == "unavailable")
    replies = [chat(front, max_tokens=1) for _ in range(6)]
    refusals = [(reply.status, reply.headers.get("retry-after"), reply.json()["error"]["code"]) for reply in replies]
    assert refusals == [(503, "1", "shutting_down")] * 6
    assert send(front, "/v1/models").json()["data"]
    rest = list(events)
    assert rest[-1] == "[DONE]" and not any("error" in event for event in rest[:-1])
    assert front.process.poll() is None, "the long stream goes on"
    long.close()
    front.process.wait(serving.PATIENCE_S)


def test_streams_are_cut_off_after_the_drain_time(start: Start) -> None:
    front = start(1.0)
    _, events = started_stream(front)
    began_s = time.monotonic()
    front.process.send_signal(signal.SIGTERM)
    rest = list(events)
    assert rest[-2]["error"]["code"] == "shutting_down" and rest[-1] == "[DONE]"
    assert time.monotonic() - began_s >= 1.0
    front.process.wait(serving.PATIENCE_S)


def test_a_worker_that_leaves_alone_makes_place_for_the_next(engines: list[serving.Process], tmp_path: Path) -> None:
    """It refuses nobody: who comes meanwhile waits for the next worker."""
    with serving.up(serving.gateway(serving.fleet_file(tmp_path, [engines[0].url]), "--workers", "2"), 1) as made:
        streams = [started_stream(made, max_tokens=100) for _ in range(4)]
        (first, *_) = worker_pids(made)
        os.kill(first, signal.SIGTERM)
        for _ in range(8):
            assert chat(made, max_tokens=1).json()["usage"]
        assert all(list(events)[-1] == "[DONE]" for _, events in streams)
        until(lambda: first not in children(made.process.pid))


def test_a_worker_that_has_not_started_refuses_requests_once_it_has(
    engines: list[serving.Process], tmp_path: Path
) -> None:
    """Linux gives connections to its socket while it starts, and nobody else could answer them."""
    with serving.up(
        serving.gateway(serving.fleet_file(tmp_path, [engines[0].url], gateway={"drain_s": 60.0}), "--workers", "2"), 1
    ) as made:
        until(lambda: len(worker_pids(made)) == 2)
        streams = [started_stream(made) for _ in range(12)]
        first, second = worker_pids(made)
        os.kill(first, signal.SIGKILL)
        until(lambda: set(children(made.process.pid)) - {first, second})
        made.process.send_signal(signal.SIGTERM)
        until(lambda: send(made, "/health").json()["status"] == "unavailable")
        codes = [chat(made, max_tokens=1).json()["error"]["code"] for _ in range(12)]
        assert codes == 12 * ["shutting_down"]
        for reply, _ in streams:
            reply.close()
        made.process.wait(serving.PATIENCE_S)


@pytest.mark.parametrize("has_started", [False, True])
def test_however_often_a_process_is_told_to_end_it_ends_well(has_started: bool, tmp_path: Path) -> None:
    """The signal comes until the process is gone, from the time that it listens, or once it serves."""
    file = str(serving.fleet_file(tmp_path, ["http://127.0.0.1:9"], gateway={"drain_s": 1.0}))
    supervised = ("--port", "0", "--restarts", "3")
    made = [
        serving.emulator(),
        serving.gateway(Path(file)),
        serving.Process("-m", "headway", "serve", file, "--workers", "2", *supervised),
        serving.Process("-m", "headway", "epp", file, "--http-port", "0", *supervised),
    ]
    with serving.closing(*made):
        for each in made:
            assert each.port
            if has_started and each is not made[3]:
                send(each, "/health").text()

        def is_over() -> bool:
            for each in made:
                each.process.send_signal(signal.SIGTERM)
            return all(each.process.poll() is not None for each in made)

        until(is_over)
        assert [each.process.wait() for each in made] == [0, 0, 0, 0]
