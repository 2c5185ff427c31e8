"""The gateway's pure parts: events, what is said so far, engines' metrics, views."""

from __future__ import annotations

import asyncio
import json
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("httptools")

from headway.catalog import engine, gpu, model
from headway.control.live import Live
from headway.core.fleet import Pool
from headway.core.pacer import Pacer
from headway.core.request import Phase
from headway.emulator import tokens
from headway.gateway.clock import Clock
from headway.gateway.errors import ApiError
from headway.gateway.fleet.replica import LiveReplica
from headway.gateway.relay.continuation import CannotGoOnError, PartialResponse, ResumedStream
from headway.gateway.relay.request import CHAT, COMPLETIONS, PATHS, ClientRequest, read_request
from headway.gateway.upstream import sse
from headway.gateway.upstream.dialects import ADAPTERS, Load, api_of, parse_load
from headway.gateway.upstream.errors import EngineError
from headway.policies.ordering.pascal import PascalOrdering


@given(st.lists(st.text("ab {}:\r", max_size=12), max_size=6), st.lists(st.integers(0, 40), max_size=8))
def test_events_do_not_hang_on_how_they_are_cut(payloads: list[str], cuts: list[int]) -> None:
    lines = [payload.replace("\r", "").strip() for payload in payloads]
    stream = "".join(f"data: {line}\r\n\r\n" for line in lines).encode()
    bounds = sorted({0, len(stream), *(cut for cut in cuts if cut < len(stream))})
    events = sse.EventSplitter()
    pieces = [stream[a:b] for a, b in pairwise(bounds)]
    found = [sse.payload(event) for piece in pieces for event in events.split(piece)]
    assert found == [line.encode() for line in lines]


def test_an_event_without_end_is_an_error_not_memory() -> None:
    events = sse.EventSplitter()
    with pytest.raises(EngineError, match="without end"):
        for _ in range(100):
            events.split(b"x" * 100_000)


@given(st.binary(max_size=200))
def test_any_body_is_a_request_or_a_clients_mistake(raw: bytes) -> None:
    for path in PATHS:
        try:
            read_request(path, raw, {})
        except ApiError as error:
            assert 400 <= error.status < 500


_ODD: list[object] = [
    None, True, 0, -1, 7, 1e300, 10**30, "", "x" * 3000, [], [1, "a"], [[1], [2]], [None], {}, {"a": []},
]  # fmt: skip
_NAMES = "prompt messages input instructions system stream stream_options max_tokens n priority tools".split()


@given(st.dictionaries(st.sampled_from(_NAMES), st.sampled_from(_ODD)))
def test_any_object_is_a_request_or_a_clients_mistake(body: dict[str, object]) -> None:
    for path in PATHS:
        try:
            made = read_request(path, json.dumps({**body, "model": "m"}).encode(), {})
        except ApiError as error:
            assert 400 <= error.status < 500
        else:
            assert made.can_go_on in (True, False) and len(made.prefix()) <= 64


def _chat(**options: object) -> ClientRequest:
    body = {"model": "m", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 10, **options}
    return read_request(CHAT, json.dumps(body).encode(), {})


def _hear(said: PartialResponse, delta: dict[str, str], ids: list[int] | None) -> None:
    choice = {"index": 0, "delta": delta} | ({} if ids is None else {"token_ids": ids})
    chunk = sse.decode_chunk(json.dumps({"id": "c", "created": 1, "model": "m", "choices": [choice]}).encode())
    said.heard(chunk, 1 if ids is None else len(ids))


def test_an_answer_goes_on_from_ids_else_from_text_else_not_at_all() -> None:
    said = PartialResponse(_chat(temperature=0))
    said.prompt_ids = [1, 2]
    _hear(said, {"content": " a"}, [3])
    path, body = said.go_on(ADAPTERS["vllm"], 100, 2)
    assert path == COMPLETIONS and body == {"prompt": [1, 2, 3], "max_tokens": 9, "temperature": 0}
    endless = PartialResponse(_chat(max_tokens=None))
    endless.prompt_ids, endless.ids, endless.tokens = [1, 2], [3], 1
    assert endless.go_on(ADAPTERS["vllm"], 100, prompt_tokens=50)[1]["max_tokens"] == 97
    _hear(said, {"content": " b"}, None)
    path, body = said.go_on(ADAPTERS["vllm"], 100, 2)
    assert path == CHAT and body["messages"][-1] == {"role": "assistant", "content": " a b"}
    assert body["max_tokens"] == 8 and body["continue_final_message"] is True
    with pytest.raises(CannotGoOnError):
        said.go_on(ADAPTERS["openai"], 100, 2)
    with pytest.raises(CannotGoOnError):
        PartialResponse(_chat(logprobs=True)).go_on(ADAPTERS["vllm"], 100, 2)


@given(st.lists(st.sampled_from(["</", "think", ">", " x", "<", "</think>", "y "]), max_size=8))
def test_the_end_of_reasoning_is_found_in_whatever_pieces_it_comes(pieces: list[str]) -> None:
    said = PartialResponse(_chat())
    _hear(said, {"reasoning": "so"}, [5])
    continued = ResumedStream(_chat(), said, COMPLETIONS)
    deltas: list[dict[str, str]] = []
    for i, piece in enumerate(pieces):
        finish = "stop" if i == len(pieces) - 1 else None
        payload = json.dumps({"choices": [{"text": piece, "finish_reason": finish}]}).encode()
        continued.read(sse.decode_chunk(payload))
        made = continued.event(payload)
        deltas += [choice["delta"] for choice in json.loads(made)["choices"]] if made else []
    before, _, after = "".join(pieces).partition("</think>")
    assert "".join(delta.get("reasoning", "") for delta in deltas) == before
    assert "".join(delta.get("content", "") for delta in deltas) == after


@given(st.integers(1, 60), st.integers(0, 30), st.lists(st.integers(1, 9), max_size=8), st.booleans())
def test_an_emulated_answer_goes_on_as_it_would_have(
    output_tokens: int, reasoning_tokens: int, parts: list[int], is_chat: bool
) -> None:
    """Whoever reads the tokens so far writes the same next ones, and ends in the same place."""
    messages = [{"role": "user", "content": "what is w77"}]
    prompt = tokens.chat(messages, reasoning_tokens > 0, False) if is_chat else tokens.encode("once upon w9")
    straight = tokens.Writer(prompt, output_tokens, reasoning_tokens)
    whole = straight.write(60)
    done: list[int] = []
    for part in parts:
        again = tokens.Writer([*prompt, *done], output_tokens, reasoning_tokens)
        assert again.left is None or again.left == max(output_tokens - len(done), 1)
        done += again.write(part)
    assert done == whole[: len(done)] if len(done) <= 60 else done[:60] == whole
    assert tokens.encode(tokens.decode(whole)) == whole
    if is_chat and reasoning_tokens:
        assert whole.index(tokens.THINK_END) == reasoning_tokens - 1


def test_metrics_of_all_ranks_add_up_and_what_is_missing_is_unknown() -> None:
    page = """# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="0"} 3.0
vllm:num_requests_running{engine="1"} 4.0
vllm:num_requests_running_total 99
vllm:gpu_cache_usage_perc{engine="0"} 0.25
"""
    assert parse_load(ADAPTERS["vllm"], page) == Load(running=7, waiting=None, kv_share=0.25)
    assert parse_load(ADAPTERS["sglang"], page) == Load()
    assert [api_of(name) for name in ("vllm-v1", "sglang", "llama.cpp", "orca")] == [
        "vllm", "sglang", "llama.cpp", "openai",
    ]  # fmt: skip


def test_a_view_counts_what_it_knows_and_believes_engines_only_while_they_are_fresh() -> None:
    clock = Clock(asyncio.new_event_loop())
    clock._loop.close()
    pool = Pool("p", model("qwen3-8b"), gpu("h100"), engine("vllm-v1"))
    replica = LiveReplica(0, pool, "http://h:1", ADAPTERS["vllm"], 1000, PascalOrdering(), Pacer(), clock, stale_s=60.0)
    thinking = Live(0, 0.0, 160, 10, tier=2, phase=Phase.REASONING)
    answering = Live(1, 0.0, 32, 10)
    seats = [replica.reserve(thinking), replica.reserve(answering)]
    assert (replica.num_in_flight, replica.num_by_tier, replica.queue_lengths) == (2, {2: 1, 0: 1}, [1, 1])
    assert (replica.num_running, replica.num_waiting, replica.kv_blocks_used) == (2, 0, 12)
    assert (replica.prefill_tokens_left, replica.tokens_generated) == (192, 0)
    thinking.generated_tokens += 3
    seats[0].count_tokens(3)
    assert (replica.prefill_tokens_left, replica.tokens_generated) == (32, 3)
    thinking.phase = Phase.ANSWERING
    replica.requeue(seats[0])
    assert replica.queue_lengths == [0, 2]
    replica.update_load(Load(running=9, waiting=4, kv_share=0.5))
    assert (replica.num_running, replica.num_waiting, replica.kv_blocks_used) == (9, 4, 500)
    replica._stale_s = -1.0
    assert (replica.num_running, replica.num_waiting) == (2, 0)
    for seat in (*seats, *seats):
        seat.free()
    assert (replica.num_in_flight, replica.prefill_tokens_left, replica.tokens_generated) == (0, 0, 0)
    assert replica.queue_lengths == [0, 0] and not any(replica.num_by_tier.values())
