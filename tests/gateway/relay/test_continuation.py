"""Continuation of answers on other engines."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headway.control.live import Live
from headway.gateway.relay.continuation import ResumedStream
from headway.gateway.relay.engine_request import CannotResumeError, resume_request
from headway.gateway.relay.partial_answer import PartialAnswer
from headway.gateway.relay.request import CHAT, COMPLETIONS, ClientRequest
from headway.gateway.relay.request_reader import read_request
from headway.gateway.scheduling.in_flight import InFlightRequest
from headway.gateway.scheduling.stream_copy import StreamPart
from headway.gateway.settings import Api
from headway.gateway.upstream import sse
from headway.gateway.upstream.dialects import ADAPTERS
from relay_alone import OrderedScheduler


def _chat(**options: object) -> ClientRequest:
    body = {"model": "m", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 10, **options}
    return read_request(CHAT, json.dumps(body).encode(), {})


def _partial(**options: object) -> PartialAnswer:
    return PartialAnswer(_chat(**options), InFlightRequest(Live(0, 0.0, 1, 10)), OrderedScheduler([]))


def _resumed(partial: PartialAnswer, api: Api = "vllm", prompt_tokens: int = 2) -> tuple[str, dict[str, Any]]:
    return resume_request(partial._request, partial, ADAPTERS[api], 100, prompt_tokens)


def _add(partial: PartialAnswer, delta: dict[str, str], ids: list[int] | None) -> None:
    choice = {"index": 0, "delta": delta} | ({} if ids is None else {"token_ids": ids})
    chunk = sse.read_chunk(json.dumps({"id": "c", "created": 1, "model": "m", "choices": [choice]}).encode())[0]
    partial._add(chunk, 1 if ids is None else len(ids))


def test_an_answer_resumes_from_ids_else_from_text_else_not_at_all() -> None:
    kept = {"temperature": 0, "cache_salt": "ann's", "vllm_xargs": {"own": 1}}
    partial = _partial(**kept)
    partial.prompt_ids = [1, 2]
    _add(partial, {"content": " a"}, [3])
    path, body = _resumed(partial)
    assert path == COMPLETIONS and body == {"prompt": [1, 2, 3], "max_tokens": 9, **kept}
    endless = _partial(max_tokens=None)
    endless.prompt_ids, endless.token_ids, endless.tokens = [1, 2], [3], 1
    assert _resumed(endless, prompt_tokens=50)[1]["max_tokens"] == 97
    _add(partial, {"content": " b"}, None)
    path, body = _resumed(partial)
    assert path == CHAT and body["messages"][-1] == {"role": "assistant", "content": " a b"}
    assert body["max_tokens"] == 8 and body["continue_final_message"] is True
    with pytest.raises(CannotResumeError):
        _resumed(partial, "openai")
    with pytest.raises(CannotResumeError):
        _resumed(_partial(logprobs=True))


@given(st.lists(st.sampled_from(["</", "think", ">", " x", "<", "</think>", "y "]), max_size=8))
def test_the_end_tag_of_reasoning_may_come_in_any_pieces(pieces: list[str]) -> None:
    partial = _partial()
    _add(partial, {"reasoning": "so"}, [5])
    resumed = ResumedStream(_chat(), partial, COMPLETIONS)
    deltas: list[dict[str, str]] = []
    for i, piece in enumerate(pieces):
        finish = "stop" if i == len(pieces) - 1 else None
        payload = json.dumps({"choices": [{"text": piece, "finish_reason": finish}]}).encode()
        value = sse.decoded(payload)
        resumed.convert(sse.chunk_in(value)[0])
        deltas += [choice["delta"] for choice in value["choices"]] if resumed.rewrite(value) else []
    before, _, after = "".join(pieces).partition("</think>")
    assert "".join(delta.get("reasoning", "") for delta in deltas) == before
    assert "".join(delta.get("content", "") for delta in deltas) == after


@given(st.integers(0, 3), st.lists(st.integers(1, 3), min_size=1, max_size=4))
def test_an_answer_is_no_reasoning_if_its_engine_broke_at_the_end_tag(num_silent: int, sizes: list[int]) -> None:
    """Tokens without text after the reasoning may be its end tag: they are generated again, and sent once."""
    partial = _partial()
    partial.prompt_ids = [1, 2]
    _add(partial, {"reasoning": "so"}, [5])
    sent = [6, 7, 8][:num_silent]
    for id in sent:
        _add(partial, {}, [id])
    assert partial.begin_attempt() == num_silent and partial.tokens == 1
    body = _resumed(partial)[1]
    assert (body["prompt"], body["max_tokens"]) == ([1, 2, 5], 9)
    resumed = ResumedStream(_chat(), partial, COMPLETIONS, num_silent)
    rest = [6, 7, 8, 9, 10]
    deltas, ids, start = [], list(sent), 0
    for size in [*sizes, len(rest)]:
        part = rest[start : start + size]
        text = "".join({8: "</think>", 9: " answer"}.get(id, "") for id in part)
        start += size
        value = sse.decoded(json.dumps({"choices": [{"text": text, "token_ids": part}]}).encode())
        chunk = sse.chunk_in(value)[0]
        resumed.convert(chunk)
        partial._add(chunk, len(part))
        if resumed.rewrite(value):
            deltas.append(value["choices"][0]["delta"])
            ids += value["choices"][0]["token_ids"]
    assert "".join(delta.get("content", "") for delta in deltas) == " answer" and ids == rest
    assert partial.token_ids == [5, *rest] and partial.tokens == 6


def test_ids_that_came_without_their_texts_are_kept() -> None:
    """Of a stream that another gateway began, and of a KV snapshot: which of them brought reasoning is not known."""
    chunk = {"id": "c", "choices": [{"index": 0, "delta": {"reasoning": "so"}}]}
    restored = _partial()
    restored.restore(StreamPart(sse.encode_event(chunk), 3, [5, 6, 7], [1, 2]))
    saved = _partial()
    _add(saved, {"reasoning": "so"}, None)
    saved.tokens, saved.seen_tokens = 3, 5
    saved.set_token_ids([1, 2, 5, 6, 7])
    assert (restored.unread_ids(), saved.unread_ids()) == ([5, 6, 7], []), "a snapshot ends with the last chunk's text"
    for partial in (restored, saved):
        assert partial.begin_attempt() == 0
        assert _resumed(partial)[1]["prompt"] == [1, 2, 5, 6, 7]
    _add(restored, {"reasoning": " on"}, [8])
    _add(restored, {}, [9])
    assert restored.begin_attempt() == 1 and restored.token_ids == [5, 6, 7, 8]
    _add(restored, {}, [9])
    restored.finish_reason = "length"
    assert restored.begin_attempt() == 0, "an answer that has ended has all of its tokens"
