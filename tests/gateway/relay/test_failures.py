"""Engines that are killed or hang during an answer."""

from __future__ import annotations

import itertools
import random
import signal
import threading
from pathlib import Path
from typing import Any

import pytest

import serving
from serving import MODEL, answer_text, chat, metric, send, until

pytest.importorskip("httptools")


def _killed_after(num_events: int, doomed: serving.Process, reply: serving.Reply) -> list[Any]:
    """The events of a stream whose engine is killed after `num_events`."""
    events = []
    for i, event in enumerate(reply.events()):
        if i == num_events:
            doomed.kill()
        events.append(event)
    return events


@pytest.mark.parametrize("num_events", [20, 80], ids=["reasoning", "answering"])
def test_a_stream_continues_elsewhere_when_its_engine_is_killed(
    survivor: serving.Process, tmp_path: Path, num_events: int
) -> None:
    """The client gets the same tokens as without the failure."""
    doomed = serving.slow_emulator()
    front = serving.gateway(serving.fleet_file(tmp_path, [doomed.url, survivor.url]))
    with serving.closing(doomed, front):
        serving.all_up(front, 2)
        reply = chat(front, stream=True, stream_options={"include_usage": True})
        assert reply.headers["x-headway-replica"] == "pool/0"
        events = _killed_after(num_events, doomed, reply)
        whole = chat(survivor).json()
        message = whole["choices"][0]["message"]
        assert answer_text(events, "reasoning").split() == message["reasoning"].split()
        assert answer_text(events).split() == message["content"].split()
        assert events[-1] == "[DONE]" and events[-3]["choices"][0]["finish_reason"] == "stop"
        assert events[-2]["usage"] == whole["usage"]
        assert len({(event["id"], event["created"], event["object"]) for event in events[:-1]}) == 1
        until(lambda: metric(front, "headway_requests_in_flight") == 0)


def test_reasoning_continues_after_two_engines_are_killed(survivor: serving.Process, tmp_path: Path) -> None:
    """The second engine streams reasoning as the text of a completion."""
    doomed = [serving.slow_emulator() for _ in range(2)]
    front = serving.gateway(serving.fleet_file(tmp_path, [*(each.url for each in doomed), survivor.url]))
    with serving.closing(*doomed, front):
        serving.all_up(front, 3)
        events = []
        for i, event in enumerate(chat(front, stream=True).events()):
            if i == 5:
                doomed[0].kill()
            if i == 12:
                doomed[1].kill()
            events.append(event)
        message = chat(survivor).json()["choices"][0]["message"]
        assert answer_text(events, "reasoning").split() == message["reasoning"].split()
        assert answer_text(events).split() == message["content"].split()


def test_completions_continue_elsewhere(survivor: serving.Process, tmp_path: Path) -> None:
    doomed = serving.slow_emulator()
    front = serving.gateway(serving.fleet_file(tmp_path, [doomed.url, survivor.url]))
    with serving.closing(doomed, front):
        serving.all_up(front, 2)
        body = {"model": MODEL, "prompt": "once upon a time", "max_tokens": 150}
        events = _killed_after(50, doomed, send(front, "/v1/completions", {**body, "stream": True}))
        text = "".join(choice["text"] for event in events[:-1] for choice in event["choices"])
        assert text == send(survivor, "/v1/completions", body).json()["choices"][0]["text"]


@pytest.mark.parametrize(
    ("num_replicas", "workers"), [(1, ()), (2, ()), (1, ("--workers", "2"))], ids=["one", "two", "one, two workers"]
)
def test_a_stream_waits_for_a_replica_when_all_are_restarted(
    survivor: serving.Process, tmp_path: Path, num_replicas: int, workers: tuple[str, ...]
) -> None:
    """All engines restart twice during one stream, which is more often than a request may fail without progress. The
    restarts are far apart, as the client reads later than the engine writes."""
    engines = [serving.slow_emulator() for _ in range(num_replicas)]
    patient = {"hold_s": serving.PATIENCE_S, "max_attempts": num_replicas + 1}
    with serving.up(
        serving.gateway(serving.fleet_file(tmp_path, [e.url for e in engines], gateway=patient), *workers), num_replicas
    ) as front:
        events = []
        for i, event in enumerate(chat(front, stream=True).events()):
            if i in (20, 280):
                for engine in engines:
                    engine.close()
                engines = [serving.slow_emulator(engine.port) for engine in engines]
            events.append(event)
        with serving.closing(*engines):
            assert events[-1] == "[DONE]" and not any("error" in event for event in events)
            assert answer_text(events).split() == chat(survivor).json()["choices"][0]["message"]["content"].split()
            until(lambda: metric(front, "headway_requests_in_flight") == 0)


def test_a_stream_that_cannot_continue_ends_with_an_error_and_done(survivor: serving.Process, tmp_path: Path) -> None:
    doomed = serving.slow_emulator()
    front = serving.gateway(serving.fleet_file(tmp_path, [doomed.url, survivor.url]))
    with serving.closing(doomed, front):
        serving.all_up(front, 2)
        events = _killed_after(20, doomed, chat(front, stream=True, frequency_penalty=0.5))
        assert events[-1] == "[DONE]"
        assert set(events[-2]["error"]) == {"message", "type", "param", "code"}
        until(lambda: metric(front, "headway_requests_in_flight") == 0)


def test_streams_of_a_hanging_engine_continue_elsewhere(survivor: serving.Process, tmp_path: Path) -> None:
    stuck = serving.slow_emulator()
    quick = {"probe_timeout_s": 0.2, "scrape_period_s": 0.05}
    front = serving.gateway(serving.fleet_file(tmp_path, [stuck.url, survivor.url], gateway=quick))
    with serving.closing(stuck, front):
        serving.all_up(front, 2)
        events = []
        for i, event in enumerate(chat(front, stream=True).events()):
            if i == 20:
                stuck.process.send_signal(signal.SIGSTOP)
            events.append(event)
        assert events[-1] == "[DONE]"
        assert answer_text(events).split() == chat(survivor).json()["choices"][0]["message"]["content"].split()
        assert send(front, "/health").json()["up"] == 1
        until(lambda: metric(front, "headway_requests_in_flight") == 0)


def test_no_request_is_left_in_flight_after_random_failures(survivor: serving.Process, tmp_path: Path) -> None:
    """Clients disconnect at random while an engine is killed, restarts, and fails requests."""
    doomed = serving.slow_emulator()
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
        send(doomed, "/emulator/failures", [500, 502, 429], method="PUT").json()
        until(lambda: len(outcomes) > 10)
        doomed.kill()
        again = serving.slow_emulator(doomed.port)
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
