"""Paced emission: the client of a stream gets its tokens evenly."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("httptools")

from headway.core.pacer import Emission
from headway.gateway.relay import paced
from headway.gateway.relay.paced import PacedWriter
from headway.gateway.relay.request import CHAT
from headway.gateway.relay.request_reader import read_request
from headway.gateway.relay.writer import BufferedWriter
from headway.gateway.upstream import sse
from relay_alone import KeepingWriter
from serving import MODEL
from virtual_time import streams

URLS = [f"http://127.0.0.1:{port}" for port in range(10_001, 10_003)]
PACE_S = 0.05


def fleet(num: int = 1, gateway: dict[str, Any] | None = None, **policies: Any) -> dict[str, Any]:
    pool = {"model": MODEL, "gpu": "h100", "engine": "vllm-0.15", "endpoints": URLS[:num]}
    return {"fleet": [pool], "gateway": {"scrape_period_s": 0.2, **(gateway or {})}, "policies": policies}


def chat(max_tokens: int, text: str = "Why?") -> dict[str, Any]:
    return {"model": MODEL, "messages": [{"role": "user", "content": text}], "max_tokens": max_tokens}


def deltas(parts: list[tuple[float, bytes]]) -> Iterator[tuple[float, str, str]]:
    """(time, kind, text) of each event with text."""
    splitter = sse.EventSplitter()
    for time_s, body in parts:
        for event in splitter.split(body):
            payload = sse.payload(event)
            if payload is None or payload == b"[DONE]":
                continue
            for choice in json.loads(payload)["choices"]:
                delta = choice.get("delta") or {"content": choice.get("text")}
                for kind in ("reasoning", "content"):
                    if delta.get(kind):
                        yield time_s, kind, delta[kind]


def text_of(parts: list[tuple[float, bytes]]) -> str:
    return "".join(text for _, _, text in deltas(parts))


def test_an_answer_comes_evenly_and_reasoning_at_once(tmp_path: Path) -> None:
    asked = [(0.5, chat(60))]
    (plain,), _ = streams(fleet(), tmp_path, asked, reasoning_tokens=20)
    (even,), ran = streams(fleet(gateway={"pace_s": PACE_S}), tmp_path, asked, reasoning_tokens=20)
    assert text_of(even) == text_of(plain)
    assert b"".join(body for _, body in even).endswith(sse.DONE)
    reasoning, answer = ([at for at, kind, _ in deltas(even) if kind == k] for k in ("reasoning", "content"))
    generated = [at for at, kind, _ in deltas(plain) if kind == "reasoning"]
    assert np.diff(reasoning) == pytest.approx(np.diff(generated), abs=1e-6)
    assert len(answer) == 40 and np.diff(answer) == pytest.approx(PACE_S, abs=2e-3)
    # The engine is free long before the client has the answer.
    assert ran.requests["end_s"][0] < answer[-1] - 1.0
    assert max(b - a for a, b in pairwise(at for at, _, _ in deltas(plain))) < PACE_S / 2


def test_only_streams_are_paced() -> None:
    writer = KeepingWriter()
    stream, whole = (read_request(CHAT, json.dumps({**chat(3), "stream": on}).encode(), {}) for on in (True, False))
    assert isinstance(paced.paced(stream, writer, 1.0), PacedWriter)
    assert paced.paced(whole, writer, 1.0) is writer


def test_what_is_kept_is_sent_at_once_if_nobody_waits_for_it() -> None:
    async def story() -> None:
        writer = KeepingWriter()
        even = PacedWriter(writer, 1000.0)
        even.start(200, [])
        for i in range(3):
            even.write_tokens(b"%d" % i, 1)
        even.write(b"end")
        ended = asyncio.create_task(even.drain())
        await asyncio.sleep(0)
        assert writer.body == b"0"
        even.flush()
        await ended
        assert writer.body == b"012end" and writer.is_complete

    asyncio.run(story())


def test_a_kept_answer_is_paced_once_it_is_accepted(monkeypatch: pytest.MonkeyPatch) -> None:
    async def story() -> list[bytes]:
        buffered, writer = BufferedWriter(), KeepingWriter()
        buffered.start(200, [])
        for i in range(3):
            buffered.write_tokens(b"%d" % i, 1)
        buffered.write(b"end")
        even = PacedWriter(writer, 1000.0)
        copying = asyncio.create_task(buffered.copy_to(even))
        for _ in range(5):
            await asyncio.sleep(0)
        sent = list(writer.pieces)
        even.flush()
        await copying
        return sent

    monkeypatch.setattr(paced, "monotonic", lambda: 5.0)
    assert asyncio.run(story()) == [b"0"]


@given(st.lists(st.floats(0.0, 3.0), min_size=1, max_size=30), st.sampled_from([0.1, 0.5]))
def test_a_reader_of_that_pace_reads_the_same_tokens_at_the_same_times(gaps: list[float], tpot_s: float) -> None:
    """So QoE, which assumes such a reader, needs no pace in a simulation."""
    generated = np.cumsum(gaps)
    emission = Emission(tpot_s)
    sent = np.array([emission.send_s(at) for at in generated])
    assert (sent >= generated).all()

    def read(times: Any) -> list[float]:
        """Each token is read in `tpot_s`, once it is there and those before it are read."""
        done: list[float] = []
        for at in times:
            done.append(max(at, done[-1] if done else 0.0) + tpot_s)
        return done

    assert read(sent) == pytest.approx(read(generated))
    assert (np.diff(sent) >= tpot_s - 1e-9).all()
