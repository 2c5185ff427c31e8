"""The number of calls that a request takes: what is done for each request is noticed, whatever the machine's load."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

pytest.importorskip("httptools")

from traced_requests import traced_answer

MOST_CALLS = 152
"""Of Headway's functions: a few more than it takes. A check of each request costs about half a microsecond a call."""
MOST_CALLS_A_TOKEN, MOST_CALLS_A_REPEATED_TOKEN = 10, 6
"""Where events are decoded, and where they repeat the one before but for its text."""


MOST_CALLS_FOR_SHARES = 9
"""Of a request of a known tenant while nothing is held and each replica has room: its share adds no more to `fcfs`."""


def _chunk(text: str, is_spaced: bool) -> bytes:
    choice = {"index": 0, "delta": {"content": text}}
    separators = (", ", ": ") if is_spaced else (",", ":")
    value = json.dumps({"id": "c", "created": 1, "model": "m", "choices": [choice]}, separators=separators)
    event = b"data: " + value.encode() + b"\n\n"
    return b"%x\r\n%b\r\n" % (len(event), event)


def _stream(num_tokens: int, is_spaced: bool) -> list[bytes]:
    head = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
    chunks = b"".join([_chunk("a", is_spaced) for _ in range(num_tokens)])
    return [head + chunks + b"e\r\ndata: [DONE]\n\n\r\n0\r\n\r\n"]


def _whole() -> tuple[list[bytes], bytes]:
    """The response of an engine, and its body."""
    choice = {"index": 0, "message": {"role": "assistant", "content": "hi"}, "finish_reason": "stop"}
    usage = {"prompt_tokens": 3, "completion_tokens": 1, "total_tokens": 4}
    body = json.dumps({"id": "c", "object": "chat.completion", "choices": [choice], "usage": usage}).encode()
    head = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n" % len(body)
    return [head + body], body


def test_a_whole_answer_takes_a_bounded_number_of_calls(tmp_path: Path) -> None:
    reply, body = _whole()
    received, calls = traced_answer(tmp_path, reply, stream=False, end=body, num=8)
    assert received.startswith(b"HTTP/1.1 200") and len(calls) <= MOST_CALLS


def test_a_fair_share_adds_a_bounded_number_of_calls(tmp_path: Path) -> None:
    reply, body = _whole()
    calls = {}
    for name, sections in (("fcfs", {"policies": {"ordering": "fcfs"}}), ("fair", {})):
        (folder := tmp_path / name).mkdir()
        calls[name] = traced_answer(folder, reply, stream=False, end=body, num=3, key="k", **sections)[1]
    shares = {name for _, name in calls["fair"]} - {name for _, name in calls["fcfs"]}
    assert {"FairOrdering.started", "FairOrdering.learn"} <= shares
    assert len(calls["fair"]) - len(calls["fcfs"]) <= MOST_CALLS_FOR_SHARES


@pytest.mark.parametrize(("is_spaced", "most"), [(True, MOST_CALLS_A_TOKEN), (False, MOST_CALLS_A_REPEATED_TOKEN)])
def test_a_token_takes_a_bounded_number_of_calls(tmp_path: Path, is_spaced: bool, most: int) -> None:
    calls = {}
    for num in (10, 60):
        (folder := tmp_path / str(num)).mkdir()
        calls[num] = traced_answer(folder, _stream(num, is_spaced), stream=True, end=b"[DONE]", num=3)[1]
    assert (len(calls[60]) - len(calls[10])) / 50 <= most
    assert calls[60].count(("gateway/upstream/sse.py", "read_chunk")) == (60 if is_spaced else 1)
