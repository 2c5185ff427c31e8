"""Engines that pass their health checks and do not serve: each beside a good one, with the default settings."""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import yaml

import serving
from faulty import FaultyEngine, executions, text_of
from keys import digest
from serving import answer_text, chat, metric, send, until

pytest.importorskip("httptools")
ROOT = {"authorization": "Bearer root"}


class Fleet:
    """Two engines behind a gateway, which have answered some requests."""

    def __init__(self, engines: list[FaultyEngine], folder: Path, *workers: str, **settings: Any) -> None:
        self.engines = engines
        self.log = folder / "decisions.jsonl"
        gateway = {"admin_keys": [digest("root")], **settings}
        path = serving.fleet_file(folder, [each.url for each in self.engines], gateway=gateway)
        self.front = serving.gateway(path, "--decisions", str(self.log), *workers)
        self.clients = ThreadPoolExecutor(32)
        serving.all_up(self.front, 2)
        for _ in self.clients.map(lambda _: self.send(4), range(12)):
            pass

    def send(self, max_tokens: int, stream: bool = True) -> tuple[int, str]:
        """A client's status and text."""
        reply = chat(self.front, max_tokens=max_tokens, stream=stream)
        if reply.status != 200:
            return reply.status, json.dumps(reply.json())
        if stream:
            return 200, answer_text(list(reply.events()))
        return 200, reply.json()["choices"][0]["message"]["content"]

    def begin(self, num: int, max_tokens: int, stream: bool = True) -> list[Future[tuple[int, str]]]:
        return [self.clients.submit(self.send, max_tokens, stream) for _ in range(num)]

    def status(self, replica: int = 0) -> str:
        found = send(self.front, f"/workers/{replica}", headers=ROOT).json()
        return str(found["status"])

    def close(self) -> None:
        self.clients.shutdown()
        self.front.close()


@pytest.fixture(scope="module")
def both() -> Iterator[list[FaultyEngine]]:
    made = [FaultyEngine("--interval-s", "0.01") for _ in range(2)]
    with serving.closing(*made):
        yield made


@pytest.fixture
def engines(both: list[FaultyEngine]) -> list[FaultyEngine]:
    """Without faults at first."""
    for engine in both:
        engine.fail()
    return both


@pytest.fixture
def fleet(engines: list[FaultyEngine], tmp_path: Path) -> Iterator[Fleet]:
    made = Fleet(engines, tmp_path)
    yield made
    made.close()


@pytest.mark.ci
@pytest.mark.parametrize("stream", [True, False], ids=["streamed", "whole"])
def test_an_engine_that_generates_nothing_is_found_out(fleet: Fleet, stream: bool) -> None:
    """Its health checks go on well. All requests are answered, and later ones do not wait for it."""
    fleet.engines[0].fail("hang")
    replies = fleet.begin(10, 20, stream)
    until(lambda: fleet.status() == "down")
    assert {each.result() for each in replies} == {(200, text_of(20))}
    before = executions(fleet.engines[:1]).total()
    assert {each.result() for each in fleet.begin(6, 5, stream)} == {(200, text_of(5))}
    assert executions(fleet.engines[:1]).total() - before <= 2, "only canaries"
    assert metric(fleet.front, "headway_ejections_total") == 1
    fleet.engines[0].fail()
    serving.all_up(fleet.front, 2)


def test_streams_that_stall_continue_elsewhere(fleet: Fleet) -> None:
    """The engine goes on to answer short requests, so a one-token request does not show it."""
    fleet.engines[0].fail("stall", after=7)
    assert {each.result() for each in fleet.begin(10, 30)} == {(200, text_of(30))}


@pytest.mark.parametrize("workers", [(), ("--workers", "2")], ids=["one process", "two workers"])
@pytest.mark.parametrize("status", [401, 404, 400])
def test_an_engine_that_refuses_at_once_does_not_attract_requests(
    engines: list[FaultyEngine], tmp_path: Path, status: int, workers: tuple[str, ...]
) -> None:
    """Beside a good one it is always the least loaded. A refusal that the other does not give is the engine's."""
    fleet = Fleet(engines, tmp_path, *workers)
    try:
        before = executions(fleet.engines[:1]).total()
        fleet.engines[0].fail("status", status=status)
        replies = [each.result() for _ in range(10) for each in fleet.begin(10, 5, stream=False)]
        assert set(replies) == {(200, text_of(5))}
        assert fleet.status() == "ejected"
        assert executions(fleet.engines[:1]).total() - before <= 40
        decisions = [json.loads(line) for line in fleet.log.read_text().splitlines()]
        (ejection,) = [each for each in decisions if each["what"] == "ejected"]
        assert ejection["choice"] == 0 and "in a row" in ejection["why"]
        assert metric(fleet.front, "headway_replica_ejected") == 1
        assert metric(fleet.front, "headway_replica_up") == 1
    finally:
        fleet.close()


@pytest.mark.parametrize("workers", [(), ("--workers", "2")], ids=["one process", "two workers"])
def test_a_prefill_engine_that_hangs_is_passed_over(
    engines: list[FaultyEngine], tmp_path: Path, workers: tuple[str, ...]
) -> None:
    """The decode engine computes the prompts meanwhile."""
    sides = {
        role: {"model": serving.MODEL, "gpu": "h100", "engine": "vllm-0.15", "endpoints": [each.url]}
        for role, each in zip(("prefill", "decode"), engines, strict=True)
    }
    file = tmp_path / "fleet.yaml"
    file.write_text(yaml.safe_dump({"combos": [{"name": "pair", **sides, "handover": {"first_token": "decode"}}]}))
    front = serving.gateway(file, *workers)
    with serving.closing(front), ThreadPoolExecutor(8) as clients:
        serving.all_up(front, 2)

        def text(_: int = 0) -> str:
            return answer_text(list(chat(front, stream=True, max_tokens=6).events()))

        assert text() == text_of(6) and metric(front, "headway_prefills_total") == 1
        engines[0].fail("hang")
        assert set(clients.map(text, range(6))) == {text_of(6)}
        asked = executions(engines[:1]).total()
        assert set(clients.map(text, range(6))) == {text_of(6)}
        assert executions(engines[:1]).total() - asked <= 2, "only the first ones wait, and canaries"
        until(lambda: metric(front, "headway_requests_in_flight") == 0)


def test_a_request_that_all_engines_refuse_is_the_clients_fault(fleet: Fleet) -> None:
    for engine in fleet.engines:
        engine.fail("status", status=404)
    for _ in range(12):
        assert fleet.send(5)[0] == 404
    assert fleet.status(0) == fleet.status(1) == "up"


@pytest.mark.ci
def test_an_engine_that_trickles_is_ejected_and_returns_slowly(engines: list[FaultyEngine], tmp_path: Path) -> None:
    fleet = Fleet(engines, tmp_path, outliers={"ejection_s": 6, "slow_start_s": 20})
    try:
        fleet.engines[0].fail("trickle", interval_s=0.7)
        replies = fleet.begin(4, 12) + fleet.begin(4, 400)
        until(lambda: fleet.status() == "ejected")
        fleet.engines[0].fail()
        assert {each.result()[0] for each in replies} == {200}
        until(lambda: fleet.status() == "up")
        before = [executions([each]).total() for each in fleet.engines]
        for _ in range(20):
            fleet.send(1)
        after = [executions([each]).total() for each in fleet.engines]
        assert 0 < after[0] - before[0] < after[1] - before[1], "it is offered a growing share"
    finally:
        fleet.close()
