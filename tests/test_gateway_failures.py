"""Engines that fail, die and come back behind the gateway."""

from __future__ import annotations

import itertools
import random
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import serving
from serving import MODEL, ask, chat, metric, said, until

pytest.importorskip("httptools")


@pytest.fixture(scope="module")
def survivor() -> Iterator[serving.Process]:
    made = _doomed()
    with serving.closing(made):
        yield made


def _doomed(port: int = 0) -> serving.Process:
    return serving.emulator("--reasoning-tokens", "60", "--output-tokens", "300", "--speed", "3", port=port)


def _killed_after(num_events: int, doomed: serving.Process, reply: serving.Reply) -> list[Any]:
    """A stream whose engine is killed after so many events."""
    events = []
    for i, event in enumerate(reply.events()):
        if i == num_events:
            doomed.kill()
        events.append(event)
    return events


@pytest.mark.parametrize("num_events", [20, 80], ids=["while it reasons", "while it answers"])
def test_an_engine_killed_mid_stream_does_not_end_the_stream(
    survivor: serving.Process, tmp_path: Path, num_events: int
) -> None:
    """What the client gets is what it would have got, to the token."""
    doomed = _doomed()
    front = serving.gateway(serving.fleet_file(tmp_path, [doomed.url, survivor.url]))
    with serving.closing(doomed, front):
        serving.all_up(front, 2)
        reply = chat(front, stream=True, stream_options={"include_usage": True})
        assert reply.headers["x-headway-replica"] == "pool/0"
        events = _killed_after(num_events, doomed, reply)
        whole = chat(survivor).json()
        message = whole["choices"][0]["message"]
        assert said(events, "reasoning").split() == message["reasoning"].split()
        assert said(events).split() == message["content"].split()
        assert events[-1] == "[DONE]" and events[-3]["choices"][0]["finish_reason"] == "stop"
        assert events[-2]["usage"] == whole["usage"]
        assert len({(event["id"], event["created"], event["object"]) for event in events[:-1]}) == 1
        until(lambda: metric(front, "headway_requests_in_flight") == 0)


def test_completions_go_on_too(survivor: serving.Process, tmp_path: Path) -> None:
    doomed = _doomed()
    front = serving.gateway(serving.fleet_file(tmp_path, [doomed.url, survivor.url]))
    with serving.closing(doomed, front):
        serving.all_up(front, 2)
        body = {"model": MODEL, "prompt": "once upon a time", "max_tokens": 150}
        events = _killed_after(50, doomed, ask(front, "/v1/completions", {**body, "stream": True}))
        text = "".join(choice["text"] for event in events[:-1] for choice in event["choices"])
        assert text == ask(survivor, "/v1/completions", body).json()["choices"][0]["text"]


def test_what_cannot_go_on_ends_with_an_error_and_done(survivor: serving.Process, tmp_path: Path) -> None:
    doomed = _doomed()
    front = serving.gateway(serving.fleet_file(tmp_path, [doomed.url, survivor.url]))
    with serving.closing(doomed, front):
        serving.all_up(front, 2)
        events = _killed_after(20, doomed, chat(front, stream=True, frequency_penalty=0.5))
        assert events[-1] == "[DONE]"
        assert set(events[-2]["error"]) == {"message", "type", "param", "code"}
        until(lambda: metric(front, "headway_requests_in_flight") == 0)


def test_before_the_first_byte_another_engine_is_asked(survivor: serving.Process, tmp_path: Path) -> None:
    flaky = _doomed()
    front = serving.gateway(serving.fleet_file(tmp_path, [flaky.url, survivor.url]))
    with serving.closing(flaky, front):
        serving.all_up(front, 2)
        ask(flaky, "/emulator/failures", [500], method="PUT").json()
        reply = chat(front, max_tokens=3)
        assert reply.status == 200 and reply.headers["x-headway-replica"] == "pool/1"
        reply.json()
        flaky.kill()
        for _ in range(4):
            reply = chat(front, max_tokens=3)
            assert reply.status == 200 and reply.headers["x-headway-replica"] == "pool/1"
            reply.json()
        until(lambda: ask(front, "/health").json()["up"] == 1)


def test_a_replica_that_fails_again_and_again_is_left_alone_and_tried_out(
    survivor: serving.Process, tmp_path: Path
) -> None:
    """Health checks say that it is well all the while."""
    flaky = _doomed()
    front = serving.gateway(serving.fleet_file(tmp_path, [flaky.url, survivor.url]))
    with serving.closing(flaky, front):
        serving.all_up(front, 2)
        ask(flaky, "/emulator/failures", [500] * 5, method="PUT").json()
        for _ in range(3):
            assert chat(front, max_tokens=1).json()["choices"]
        assert ask(front, "/health").json()["up"] == 1
        serving.all_up(front, 2)
        reply = chat(front, max_tokens=1)
        assert reply.headers["x-headway-replica"] == "pool/0"
        reply.json()


def test_an_engine_that_always_fails_is_reported(tmp_path: Path) -> None:
    flaky = _doomed()
    front = serving.gateway(serving.fleet_file(tmp_path, [flaky.url]))
    with serving.closing(flaky, front):
        serving.all_up(front, 1)
        ask(flaky, "/emulator/failures", [503], method="PUT").json()
        reply = chat(front, max_tokens=1)
        assert reply.status == 503 and reply.headers["retry-after"]
        assert "this failure was asked for" in reply.json()["error"]["message"]


def test_a_replica_may_come_later(tmp_path: Path) -> None:
    """Requests wait for it, and find it where it was to be."""
    late = _doomed()
    late.kill()
    front = serving.gateway(serving.fleet_file(tmp_path, [late.url]))
    with serving.closing(late, front):
        assert ask(front, "/health").json()["status"] == "unavailable"
        replies: list[Any] = []
        waiting = threading.Thread(target=lambda: replies.append(chat(front, max_tokens=2).json()))
        waiting.start()
        until(lambda: metric(front, "headway_requests_held") == 1)
        again = _doomed(late.port)
        with serving.closing(again):
            waiting.join(20)
        assert replies[0]["usage"]["completion_tokens"] == 2


def test_without_any_replica_the_wait_has_an_end(tmp_path: Path) -> None:
    front = serving.gateway(serving.fleet_file(tmp_path, ["http://127.0.0.1:9"], gateway={"hold_s": 0.2}))
    with serving.closing(front):
        reply = chat(front, max_tokens=2)
        assert reply.status == 503 and reply.headers["retry-after"] == "1"
        assert reply.json()["error"]["code"] == "no_capacity"


def test_nothing_is_in_flight_after_chaos(survivor: serving.Process, tmp_path: Path) -> None:
    """Clients leave at random while an engine dies, returns, and fails requests."""
    doomed = _doomed()
    front = serving.gateway(serving.fleet_file(tmp_path, [doomed.url, survivor.url]))
    outcomes: list[str] = []

    def client(seed: int) -> None:
        draw = random.Random(seed)
        for _ in range(8):
            reply = chat(front, max_tokens=draw.randrange(1, 120), stream=draw.random() < 0.7)
            if "text/event-stream" not in reply.headers["content-type"]:
                outcomes.append("whole" if "choices" in reply.json() else "error")
                continue
            some = list(itertools.islice(reply.events(), draw.randrange(1, 120)))
            outcomes.append("done" if some[-1] == "[DONE]" else "left")
            reply.close()

    with serving.closing(doomed, front):
        serving.all_up(front, 2)
        clients = [threading.Thread(target=client, args=(seed,)) for seed in range(8)]
        for thread in clients:
            thread.start()
        ask(doomed, "/emulator/failures", [500, 502, 429], method="PUT").json()
        until(lambda: len(outcomes) > 10)
        doomed.kill()
        again = _doomed(doomed.port)
        with serving.closing(again):
            for thread in clients:
                thread.join(30)
            serving.all_up(front, 2)
            until(lambda: metric(front, "headway_requests_in_flight") == 0)
            for engine in (again, survivor):
                until(lambda engine=engine: metric(engine, "vllm:num_requests_running") == 0)
        assert len(outcomes) == 64 and "error" not in outcomes
        ended = metric(front, "headway_requests_total")
        assert ended == 64 and metric(front, "headway_requests_held") == 0
