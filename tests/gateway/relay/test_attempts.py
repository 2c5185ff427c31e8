"""How often engines run a request: engines that are stopped, die of a prompt, or are removed; and cut-off streams."""

from __future__ import annotations

import os
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

import serving
from faulty import POISON, FaultyEngine, executions, text_of
from keys import ADMIN, digest
from serving import answer_text, chat, send
from worker_fleet import gateway_with_workers, worker_pids

pytest.importorskip("httptools")


def test_requests_of_a_stopped_engine_go_to_another_one(tmp_path: Path) -> None:
    """Their connections are kept ones, which the gateway breaks off by itself."""
    engines = [FaultyEngine("--interval-s", "0.02") for _ in range(2)]
    gateway = {"probe_timeout_s": 0.2, "scrape_period_s": 0.1, "timeout_s": 600.0}
    front = serving.gateway(serving.fleet_file(tmp_path, [each.url for each in engines], gateway=gateway))
    with serving.closing(*engines, front), ThreadPoolExecutor(10) as clients:
        serving.all_up(front, 2)
        for _ in clients.map(lambda _: chat(front, max_tokens=2).json(), range(10)):
            pass  # connections to both are kept
        engines[0].process.send_signal(signal.SIGSTOP)
        replies = list(clients.map(lambda _: chat(front, max_tokens=5).json(), range(10)))
        assert [reply["choices"][0]["message"]["content"] for reply in replies] == [text_of(5)] * 10
        engines[0].process.send_signal(signal.SIGCONT)
        assert max(executions(engines).values()) <= 2


@pytest.mark.parametrize("workers", [(), ("--workers", "2")], ids=["one process", "two workers"])
def test_a_poison_prompt_ends_two_engines_and_no_more(tmp_path: Path, workers: tuple[str, ...]) -> None:
    """Other requests run beside it, on connections that are kept, and all of them are answered."""
    engines = [FaultyEngine("--interval-s", "0.02") for _ in range(5)]
    fleet = serving.fleet_file(tmp_path, [each.url for each in engines], gateway={"admin_keys": [digest("root")]})
    front = serving.gateway(fleet, *workers)
    with serving.closing(*engines, front), ThreadPoolExecutor(10) as clients:
        serving.all_up(front, 5)
        for _ in clients.map(lambda _: chat(front, max_tokens=2).json(), range(20)):
            pass
        others = [
            clients.submit(lambda: answer_text(list(chat(front, stream=True, max_tokens=60).events())))
            for _ in range(5)
        ]
        time.sleep(0.3)
        reply = chat(front, f"some {POISON}", max_tokens=5)
        assert reply.status == 422 and reply.json()["error"]["code"] == "request_quarantined"
        # It is answered once all workers have read what they were sent before.
        assert send(front, "/reload", method="POST", headers=ADMIN).json()["outcome"] == "unchanged"
        for again in clients.map(lambda _: chat(front, f"some {POISON}", max_tokens=5), range(8)):
            assert again.status == 422 and "quarantined" in again.json()["error"]["message"]
        assert sum(each.is_alive for each in engines) == 3, "each worker would end two"
        assert [each.result() for each in others] == [text_of(60)] * 5


def num_alive_of(engines: list[FaultyEngine]) -> int:
    """How many of them live."""
    return sum(each.is_alive for each in engines)


@pytest.mark.ci
def test_a_worker_that_is_slow_to_read_breaks_still_knows_a_poison_prompt(tmp_path: Path) -> None:
    """The workers are stopped while each engine ends, until the scheduler has found out and told them to give it up."""
    engines = [FaultyEngine("--interval-s", "0.02") for _ in range(4)]
    fleet = serving.fleet_file(tmp_path, [each.url for each in engines], gateway={"max_attempts": 4})
    front = gateway_with_workers(fleet, 2)
    with serving.closing(*engines, front), ThreadPoolExecutor(1) as client:
        serving.all_up(front, 4)
        for engine in engines:
            send(engine, "/fault", {"delay_s": 1.5}, method="PUT").json()
        reply = client.submit(lambda: chat(front, f"some {POISON}", max_tokens=5).json())
        for num_alive in (3, 2):
            serving.until(lambda num=num_alive: executions(engines).total() == 1 or num_alive_of(engines) == num)
            pids = worker_pids(front)
            for pid in pids:
                os.kill(pid, signal.SIGSTOP)
            serving.until(lambda num=num_alive: num_alive_of(engines) == num)
            time.sleep(0.3)  # health checks come every 0.1 s
            for pid in pids:
                os.kill(pid, signal.SIGCONT)
        assert reply.result()["error"]["code"] == "request_quarantined"
        assert num_alive_of(engines) == 2


def test_a_removed_engine_gets_no_request_again(tmp_path: Path) -> None:
    """It answers requests well, and is removed by force while it runs some on kept connections."""
    engines = [FaultyEngine("--interval-s", "0.05") for _ in range(2)]
    gateway = {"admin_keys": [digest("root")]}
    front = serving.gateway(serving.fleet_file(tmp_path, [each.url for each in engines], gateway=gateway))
    with serving.closing(*engines, front), ThreadPoolExecutor(10) as clients:
        serving.all_up(front, 2)
        for _ in clients.map(lambda _: chat(front, max_tokens=2).json(), range(10)):
            pass
        before = executions(engines[:1]).total()
        running = [clients.submit(lambda: chat(front, max_tokens=30).json()) for _ in range(8)]
        serving.until(lambda: executions(engines[:1]).total() == before + 4)
        send(front, "/workers/0?force=true", headers={"authorization": "Bearer root"}, method="DELETE").json()
        assert [each.result()["choices"][0]["message"]["content"] for each in running] == [text_of(30)] * 8
        assert executions(engines[:1]).total() == before + 4


@pytest.mark.parametrize("workers", [(), ("--workers", "2")], ids=["one process", "two workers"])
def test_streams_that_do_not_end_in_the_drain_time_end_with_an_error(tmp_path: Path, workers: tuple[str, ...]) -> None:
    engine = FaultyEngine("--interval-s", "0.05")
    front = serving.gateway(serving.fleet_file(tmp_path, [engine.url], gateway={"drain_s": 0.5}), *workers)
    with serving.closing(engine, front):
        serving.all_up(front, 1)
        events = []
        for event in chat(front, stream=True, max_tokens=1000).events():
            if len(events) == 3:
                front.process.terminate()
            events.append(event)
        assert events[-1] == "[DONE]" and events[-2]["error"]["code"] == "shutting_down"
        assert len(events) < 500
        front.process.wait(serving.PATIENCE_S)
