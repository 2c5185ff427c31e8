"""Streams that the gateway pauses for others, and resumes from their tokens."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

pytest.importorskip("httptools")
pytest.importorskip("uvicorn")

import serving as processes
from headway import records, serving
from headway.core.errors import HeadwayError
from headway.core.record import Outcome
from headway.gateway.upstream import sse
from serving import MODEL
from virtual_time import streams

URLS = [f"http://127.0.0.1:{port}" for port in range(10_001, 10_003)]
PASCAL = {"name": "pascal", "quantum_tokens": 40, "by_quanta": True}


def fleet(ordering: Any, num: int = 1, **policies: Any) -> dict[str, Any]:
    pool = {"model": MODEL, "gpu": "h100", "engine": "vllm-0.15", "endpoints": URLS[:num]}
    return {
        "fleet": [pool],
        "gateway": {"scrape_period_s": 0.2},
        "policies": {"ordering": ordering, "ordering_at": "gateway", "window": 1, **policies},
    }


def chat(max_tokens: int, text: str) -> dict[str, Any]:
    return {"model": MODEL, "messages": [{"role": "user", "content": text}], "max_tokens": max_tokens}


def texts(parts: list[tuple[float, bytes]]) -> Iterator[tuple[float, str]]:
    splitter = sse.EventSplitter()
    for time_s, body in parts:
        for event in splitter.split(body):
            payload = sse.payload(event)
            if payload is not None and payload != b"[DONE]":
                for choice in json.loads(payload)["choices"]:
                    delta = choice.get("delta") or {"content": choice.get("text")}
                    yield time_s, (delta.get("reasoning") or "") + (delta.get("content") or "")


def text_of(parts: list[tuple[float, bytes]]) -> str:
    return "".join(text for _, text in texts(parts))


@pytest.mark.parametrize("body", [chat(128, "long"), {"model": MODEL, "prompt": "so ", "max_tokens": 128}])
def test_a_paused_stream_resumes_with_the_same_tokens(tmp_path: Path, body: dict[str, Any]) -> None:
    asked = [(0.5, body), (0.9, chat(20, "short"))]
    (alone,), _ = streams(fleet("fcfs"), tmp_path, asked[:1])
    waiting, plain = streams(fleet("fcfs"), tmp_path, asked)
    (paused, short), ran = streams(fleet(PASCAL, preempt_every_s=0.05), tmp_path, asked)
    assert text_of(paused) == text_of(alone) == text_of(waiting[0])
    assert text_of(short) == text_of(waiting[1])
    assert (ran.requests["outcome"] == Outcome.FINISHED).all()
    assert sorted(ran.requests["preemptions"].tolist()) == [0, 1]
    assert sorted(ran.requests["generated_tokens"].tolist()) == [20, 128]
    # The short one did not wait for the long one, which was silent meanwhile.
    assert short[0][0] < 1.1 < waiting[1][0][0] and not plain.requests["preemptions"].any()
    gap_s = np.diff([at for at, text in texts(paused) if text]).max()
    assert gap_s > short[-1][0] - short[0][0]


def test_a_reload_begins_and_ends_pauses(tmp_path: Path) -> None:
    """No answer is lost, within a pause neither."""
    asked = [(0.5, {**chat(128, "long"), "priority": 1}), (0.9, {**chat(20, "short"), "priority": 0})]
    with_pauses, without = fleet("priority", preempt_every_s=0.05), fleet("priority")
    whole = [text_of(parts) for parts in streams(without, tmp_path, asked)[0]]

    def num_paused(before: dict[str, Any], at_s: float, after: dict[str, Any]) -> int:
        found, ran = streams(before, tmp_path, asked, reloaded=(at_s, after))
        assert [text_of(parts) for parts in found] == whole
        return int(ran.requests["preemptions"].sum())

    assert num_paused(without, 0.7, with_pauses) == 1
    assert num_paused(with_pauses, 0.7, without) == 0
    (paused, _), _ = streams(with_pauses, tmp_path, asked)
    times_s = [at for at, text in texts(paused) if text]
    pause_s = max(range(1, len(times_s)), key=lambda i: times_s[i] - times_s[i - 1])
    assert num_paused(with_pauses, times_s[pause_s] - 1e-4, without) == 1


def test_reasoning_goes_before_answers(tmp_path: Path) -> None:
    """Once a model has reasoned, what comes for it is taken to reason: it does not wait for an answer's quantum."""
    asked = [(0.5, chat(50, "first")), (1.5, chat(128, "long")), (2.0, chat(40, "short"))]
    quantum = {**PASCAL, "quantum_tokens": 500}
    found, ran = streams(fleet(quantum, preempt_every_s=0.05), tmp_path, asked, reasoning_tokens=30)
    by_length = dict(zip(ran.requests["generated_tokens"].tolist(), ran.requests["preemptions"].tolist(), strict=True))
    assert by_length[50] == 0 and by_length[128] == 1
    assert found[2][0][0] < 2.2  # its first token: the long one has an answer of 98 to go, in its first quantum


def test_a_client_may_leave_while_its_stream_is_paused(tmp_path: Path) -> None:
    asked = [(at_s, {"model": MODEL, "prompt": text, "max_tokens": 3000}) for at_s, text in ((0.5, "a"), (0.9, "b"))]
    data = fleet({**PASCAL, "quantum_tokens": 20}, preempt_every_s=0.05)
    data["gateway"]["timeout_s"] = 3.0
    _, ran = streams(data, tmp_path, asked)
    assert (ran.requests["outcome"] == Outcome.CANCELLED).all()
    assert ran.requests["preemptions"].sum() >= 1


def test_two_replicas_share_what_is_paused(tmp_path: Path) -> None:
    asked = [(0.5 + 0.01 * i, chat(120, f"long {i}")) for i in range(2)]
    asked += [(0.9 + 0.2 * i, chat(30, f"short {i}")) for i in range(4)]
    alone = [streams(fleet("fcfs"), tmp_path, [(0.5, body)])[0][0] for _, body in asked[:2]]
    found, ran = streams(fleet(PASCAL, num=2, preempt_every_s=0.05), tmp_path, asked)
    assert [text_of(parts) for parts in found[:2]] == [text_of(parts) for parts in alone]
    assert (ran.requests["outcome"] == Outcome.FINISHED).all() and ran.requests["preemptions"].sum() >= 2


def test_what_engines_do_not_report_is_refused_by_name(tmp_path: Path) -> None:
    data = fleet("fcfs")
    data["policies"] |= {"routing": "pascal"}
    data["fleet"][0] |= {"engine": {"name": "sglang", "preemption": "swap"}}
    path = tmp_path / "fleet.yaml"
    path.write_text(yaml.safe_dump(data))
    message = r"fleet\.yaml.*routing: pascal reads replica\.kv_blocks_host, which the engine of .*sglang"
    with pytest.raises(HeadwayError, match=message):
        serving.load(path)
    data["policies"]["routing"] = "least-loaded"
    path.write_text(yaml.safe_dump(data))
    serving.load(path)


def test_engines_that_continue_no_answer_pause_none(tmp_path: Path) -> None:
    data = fleet("priority", preempt_every_s=1.0)
    data["fleet"][0] |= {"api": "openai"}
    path = tmp_path / "fleet.yaml"
    path.write_text(yaml.safe_dump(data))
    with pytest.raises(
        HeadwayError, match=r"preempt_every_s: .*cannot continue another's answer, so nothing can be paused"
    ):
        serving.load(path)


@pytest.mark.ci
@pytest.mark.parametrize("num_workers", [1, 2])
def test_processes_pause_and_pace_streams(tmp_path: Path, num_workers: int) -> None:
    """With real processes: what a paused stream's client reads, and that it was paused."""
    engine = processes.emulator("--speed", "0.5")
    policies = {"ordering": PASCAL, "ordering_at": "gateway", "window": 1, "preempt_every_s": 0.05}
    options = {"policies": policies, "pool": {"replicas": 1}, "gateway": {"pace_s": 0.001}}
    path, rows = processes.fleet_file(tmp_path, [engine.url], **options), tmp_path / "rows"
    front = processes.gateway(path, "--workers", str(num_workers), "--records", str(rows))
    with processes.closing(engine, front):
        processes.all_up(front, 1)
        alone = processes.answer_text(list(processes.chat(front, "long", max_tokens=300, stream=True).events()))
        long = processes.chat(front, "long", max_tokens=300, stream=True).events()
        begun = [next(long) for _ in range(60)]  # beyond its first quantum
        short = processes.chat(front, "short", max_tokens=5).json()
        assert short["usage"]["completion_tokens"] == 5
        assert processes.answer_text([*begun, *long]) == alone
        assert "wrote 3 requests" in front.stop()
    ran, _ = records.load(rows)
    assert sorted(ran.requests["preemptions"].tolist()) == [0, 0, 1]
