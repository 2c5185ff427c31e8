"""Engines that are unreachable, fail at first, start late or serve other clients too."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest

import serving
from serving import chat, metric, send, until

pytest.importorskip("httptools")


def test_a_request_is_retried_elsewhere_before_its_first_byte(survivor: serving.Process, tmp_path: Path) -> None:
    flaky = serving.slow_emulator()
    front = serving.gateway(serving.fleet_file(tmp_path, [flaky.url, survivor.url]))
    with serving.closing(flaky, front):
        serving.all_up(front, 2)
        send(flaky, "/emulator/failures", [500], method="PUT").json()
        reply = chat(front, max_tokens=3)
        assert reply.status == 200 and reply.headers["x-headway-replica"] == "pool/1"
        reply.json()
        flaky.kill()
        for _ in range(4):
            reply = chat(front, max_tokens=3)
            assert reply.status == 200 and reply.headers["x-headway-replica"] == "pool/1"
            reply.json()
        until(lambda: send(front, "/health").json()["up"] == 1)


def test_a_replica_that_keeps_failing_is_down_until_a_canary_succeeds(
    survivor: serving.Process, tmp_path: Path
) -> None:
    """Its health checks succeed all the time."""
    flaky = serving.slow_emulator()
    front = serving.gateway(serving.fleet_file(tmp_path, [flaky.url, survivor.url]))
    with serving.closing(flaky, front):
        serving.all_up(front, 2)
        send(flaky, "/emulator/failures", [500] * 5, method="PUT").json()
        for _ in range(3):
            assert chat(front, max_tokens=1).json()["choices"]
        assert send(front, "/health").json()["up"] == 1
        serving.all_up(front, 2)
        reply = chat(front, max_tokens=1)
        assert reply.headers["x-headway-replica"] == "pool/0"
        reply.json()


def test_the_error_of_an_engine_that_always_fails_reaches_the_client(tmp_path: Path) -> None:
    flaky = serving.slow_emulator()
    front = serving.gateway(serving.fleet_file(tmp_path, [flaky.url]))
    with serving.closing(flaky, front):
        serving.all_up(front, 1)
        send(flaky, "/emulator/failures", [503], method="PUT").json()
        reply = chat(front, max_tokens=1)
        assert reply.status == 503 and reply.headers["retry-after"]
        assert "this failure was asked for" in reply.json()["error"]["message"]


def test_requests_are_held_for_a_replica_that_starts_late(tmp_path: Path) -> None:
    late = serving.slow_emulator()
    late.kill()
    front = serving.gateway(serving.fleet_file(tmp_path, [late.url], gateway={"hold_s": serving.PATIENCE_S}))
    with serving.closing(late, front):
        assert send(front, "/health").json()["status"] == "unavailable"
        replies: list[Any] = []
        waiting = threading.Thread(target=lambda: replies.append(chat(front, max_tokens=2).json()))
        waiting.start()
        until(lambda: metric(front, "headway_requests_held") == 1)
        again = serving.slow_emulator(late.port)
        with serving.closing(again):
            waiting.join(20)
        assert replies[0]["usage"]["completion_tokens"] == 2


def test_without_a_replica_the_hold_times_out(tmp_path: Path) -> None:
    front = serving.gateway(serving.fleet_file(tmp_path, ["http://127.0.0.1:9"], gateway={"hold_s": 0.2}))
    with serving.closing(front):
        reply = chat(front, max_tokens=2)
        assert reply.status == 503 and reply.headers["retry-after"] == "1"
        assert reply.json()["error"]["code"] == "no_capacity"


def test_a_request_that_takes_too_long_times_out(survivor: serving.Process, tmp_path: Path) -> None:
    with serving.up(
        serving.gateway(serving.fleet_file(tmp_path, [survivor.url], gateway={"timeout_s": 0.4})), 1
    ) as front:
        reply = chat(front, ignore_eos=True, max_tokens=20_000)
        assert reply.status == 504 and reply.json()["error"]["code"] == "timeout"
        events = list(chat(front, ignore_eos=True, max_tokens=20_000, stream=True).events())
        assert events[-2]["error"]["code"] == "timeout" and events[-1] == "[DONE]"
        until(lambda: metric(survivor, "vllm:num_requests_running") == 0)
        until(lambda: metric(front, "headway_requests_in_flight") == 0)


def _chosen_replica(front: serving.Process) -> str:
    reply = chat(front, max_tokens=1)
    reply.json()
    return reply.headers["x-headway-replica"]


def test_routing_sees_the_load_of_other_clients(survivor: serving.Process, tmp_path: Path) -> None:
    """An engine's load is read from its metrics, not only counted by the gateway."""
    busy = serving.slow_emulator()
    front = serving.gateway(serving.fleet_file(tmp_path, [busy.url, survivor.url]))
    with serving.closing(busy, front):
        serving.all_up(front, 2)
        others = [chat(busy, ignore_eos=True, max_tokens=20_000, stream=True) for _ in range(3)]
        until(lambda: _chosen_replica(front) == "pool/1")
        assert [_chosen_replica(front) for _ in range(3)] == ["pool/1"] * 3
        for other in others:
            other.close()
