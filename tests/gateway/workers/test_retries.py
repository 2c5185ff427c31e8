"""Streams that break with their worker, or with their client's connection, and are continued by a retry."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import pytest

import serving
from keys import bearer, digest
from serving import chat, metric, until
from worker_fleet import gateway_with_workers, worker_pids

pytest.importorskip("httptools")

LONG = {"stream": True, "max_tokens": 250, "ignore_eos": True, "temperature": 0}
NAMED = {"x-request-id": "mine", **bearer("a")}


@pytest.fixture(scope="module")
def engines() -> Iterator[list[serving.Process]]:
    made = [serving.emulator("--speed", "4") for _ in range(2)]
    with serving.closing(*made):
        yield made


def fleet(folder: Path, engines: list[serving.Process], **gateway: Any) -> Path:
    keys = [digest("a"), digest("b")]
    return serving.fleet_file(folder, [each.url for each in engines], gateway={"api_keys": keys, **gateway})


def content(events: list[Any]) -> str:
    return "".join(each["choices"][0]["delta"].get("content") or "" for each in events if each["choices"])


def whole(reply: serving.Reply) -> tuple[str, list[Any]]:
    """The text of a complete stream, and its events."""
    events = list(reply.events())
    assert events[-1] == "[DONE]", events[-1]
    return content(events[:-1]), events[:-1]


def num_generated(engines: list[serving.Process]) -> float:
    return sum(metric(engine, "vllm:generation_tokens_total") for engine in engines)


Broken = tuple[serving.Reply, list[Any]]


def broken(front: serving.Process, headers: dict[str, str], num: int, **options: Any) -> Broken:
    """A stream that has brought some events, or all: an engine may be done before a busy machine has read as many."""
    reply = chat(front, headers=headers, **{**LONG, **options})
    return reply, list(islice(reply.events(), num))


@pytest.mark.ci
def test_a_retry_continues_where_its_worker_was_killed(tmp_path: Path, engines: list[serving.Process]) -> None:
    """One answer, identical to one without a break; with the same head, and usage of the whole."""
    longer = {**LONG, "max_tokens": 1000}  # so that they do not end before their workers are killed
    front = gateway_with_workers(fleet(tmp_path, engines), 2)
    with serving.closing(front):
        serving.all_up(front, 2)
        text, _ = whole(chat(front, headers=bearer("a"), **longer))
        reply, early = broken(front, NAMED, 100, max_tokens=1000, stream_options={"include_usage": True})
        for pid in worker_pids(front):
            os.kill(pid, signal.SIGKILL)
        until(lambda: len(worker_pids(front)) == 2)
        reply.close()
        generated = num_generated(engines)
        again = chat(front, headers=NAMED, **longer, stream_options={"include_usage": True})
        replayed = int(again.headers["x-headway-replayed-tokens"])
        found, events = whole(again)
        # What was sent since the worker's last report is generated again; how many tokens depends on the machine.
        assert found == text and 0 < replayed < 1000
        assert {each["id"] for each in events} == {early[0]["id"]}
        assert content(events).startswith(content(early[:-5]))
        assert events[-1]["usage"]["completion_tokens"] == 1000
        # What was sent already is not generated again.
        assert num_generated(engines) - generated <= 1000 - replayed + 1
        other = chat(front, headers={**NAMED, **bearer("b")}, **longer)
        assert "x-headway-replayed-tokens" not in other.headers and whole(other)[0] == text


@pytest.mark.parametrize("workers", [1, 2])
def test_a_retry_continues_after_its_connection_broke(
    tmp_path: Path, engines: list[serving.Process], workers: int
) -> None:
    """Several times; and a complete answer is sent again for an idempotency key, and for no other name."""
    made = fleet(tmp_path, engines)
    front = serving.gateway(made) if workers == 1 else gateway_with_workers(made, workers)
    headers = {"idempotency-key": "k", **bearer("a")}
    with serving.closing(front):
        serving.all_up(front, 2)
        text, _ = whole(chat(front, headers=bearer("a"), **LONG))
        replayed = []
        for _ in range(3):
            reply, _ = broken(front, headers, 30 + 30 * len(replayed))
            replayed.append(int(reply.headers.get("x-headway-replayed-tokens", 0)))
            reply.close()
            until(lambda: metric(front, "headway_requests_in_flight") == 0)
        # The second one may be gone before it got more than what was sent to the first.
        assert replayed[0] == 0 < 20 < replayed[1] <= replayed[2]
        assert whole(chat(front, headers=headers, **LONG))[0] == text
        last = chat(front, headers=headers, **LONG)
        assert last.headers["x-headway-replayed-tokens"] == "250" and whole(last)[0] == text
        named = chat(front, headers=NAMED, **LONG)
        assert whole(named)[0] == text
        again = chat(front, headers=NAMED, **LONG)
        assert "x-headway-replayed-tokens" not in again.headers and whole(again)[0] == text
