"""Token counts, phases and inter-token latencies of responses."""

from __future__ import annotations

import json
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("httptools")

from headway.control.live import Live, Stage
from headway.core.request import Phase
from headway.gateway.relay import engine_stream, passthrough
from headway.gateway.relay.engine_stream import EngineStream
from headway.gateway.relay.partial_answer import PartialAnswer
from headway.gateway.relay.request import COMPLETIONS, RESPONSES
from headway.gateway.scheduling.in_flight import InFlightRequest
from headway.gateway.upstream import sse
from headway.gateway.upstream.chunks import Chunk
from headway.gateway.upstream.errors import EngineError
from relay_alone import OrderedScheduler, Reservation, chat_request


def meter_of(**fields: Any) -> tuple[PartialAnswer, Live, OrderedScheduler, Reservation]:
    """The meter of a request that is placed."""
    in_flight = InFlightRequest(Live(0, 0.0, 5, 10, model="m"))
    in_flight.reservation = reservation = Reservation()
    scheduler = OrderedScheduler([])
    return (
        PartialAnswer(chat_request(stream=True, **fields), in_flight, scheduler),
        in_flight.live,
        scheduler,
        reservation,
    )


def chunk(**delta: Any) -> Chunk:
    return sse.chunk_in({"choices": [{"delta": delta}]})[0]


def test_a_chunk_with_text_is_a_token() -> None:
    meter, live, _, reservation = meter_of()
    for delta in ({"role": "assistant"}, {"content": ""}, {"content": "so"}, {"content": " on"}):
        meter.measure(chunk(**delta))
    assert live.generated_tokens == reservation.tokens == meter.tokens == 2
    assert live.stage is Stage.DECODING and (live.first_token_s, live.answer_s) == (1.0, 1.0)
    assert meter.text == ["so", " on"]


@given(st.lists(st.sampled_from(("so", " on", "<think>", "a</think>", "</think>", "b")), min_size=1, max_size=8))
def test_a_text_alone_is_measured_as_its_chunk(texts: list[str]) -> None:
    meters = [meter_of() for _ in range(2)]
    for meter, *_ in meters:
        assert meter.takes_texts
        meter.measure(chunk(role="assistant", content=""))
        meter.begin_attempt()
    for text in texts:
        meters[0][0].measure(chunk(content=text))
        meters[1][0].measure_text(text)
        seen = [
            (
                *(getattr(live, name) for name in ("generated_tokens", "reasoning_tokens", "phase", "stage")),
                *(repr(getattr(live, name)) for name in ("first_token_s", "answer_s", "reasoning_end_s")),
                meter.text,
                meter.tokens,
                meter.token_ids,
                meter.last_text,
                reservation.tokens,
                scheduler.phase_changes,
            )
            for meter, live, scheduler, reservation in meters
        ]
        assert seen[0] == seen[1]


def test_token_ids_count_exactly() -> None:
    meter, live, _, _ = meter_of()
    meter.measure(sse.chunk_in({"choices": [{"delta": {"content": "so"}, "token_ids": [1, 2, 3]}]})[0])
    meter.measure(sse.chunk_in({"choices": [{"delta": {"content": ""}, "token_ids": [4]}]})[0])
    assert live.generated_tokens == 4 and meter.token_ids == [1, 2, 3, 4]


def test_llama_cpps_timings_count_tokens_without_text() -> None:
    meter, live, _, _ = meter_of()
    for num in (1, 4):
        timings = {"prompt_n": 5, "cache_n": 2, "predicted_n": num}
        meter.measure(sse.chunk_in({"choices": [{"delta": {"content": "so"}}], "timings": timings})[0])
    assert live.generated_tokens == 4 and meter.seen_tokens == 11 and meter.token_ids is None


def test_the_engines_usage_corrects_both_counts() -> None:
    meter, live, _, _ = meter_of()
    meter.tokens_before = live.generated_tokens = 3  # of another replica, whose tokens are part of this prompt
    meter.measure(chunk(content="so"))
    meter.measure(sse.chunk_in({"usage": {"prompt_tokens": 10, "completion_tokens": 2}})[0])
    assert (live.prompt_tokens, meter.prompt_tokens, live.generated_tokens) == (7, 7, 5)


@pytest.mark.parametrize(
    ("deltas", "reasoning_tokens"),
    [
        ([{"reasoning_content": "hm"}, {"reasoning": "so"}, {"content": "yes"}], 2),
        ([{"content": "<think>"}, {"content": "hm"}, {"content": "</think>"}, {"content": "yes"}], 3),
        ([{"reasoning": "hm", "content": "yes"}, {"content": "so"}], 1),
        ([{"content": "yes"}, {"content": "<think>"}], 0),
        ([{"reasoning": "hm"}, {"tool_calls": [{"index": 0}]}], 1),
    ],
    ids=["fields", "tags", "both at once", "a tag within the answer", "a tool call"],
)
def test_reasoning_ends_with_the_first_token_of_the_answer(deltas: list[Any], reasoning_tokens: int) -> None:
    meter, live, scheduler, _ = meter_of()
    for i, delta in enumerate(deltas):
        meter.measure(chunk(**delta))
        if reasoning_tokens and i + 1 < len(deltas):
            assert live.phase is Phase.REASONING and live.reasoning_tokens == i + 1
    assert live.phase is Phase.ANSWERING and live.reasoning_tokens == reasoning_tokens
    assert scheduler.phase_changes == bool(reasoning_tokens)
    assert (live.reasoning_end_s == 1.0) is bool(reasoning_tokens)


def _ended(index: int, prompt_tokens: int, cached: int) -> Chunk:
    """How llama.cpp ends a choice: with the counts of its own prompt."""
    usage = {"prompt_tokens": prompt_tokens, "completion_tokens": 2, "prompt_tokens_details": {"cached_tokens": cached}}
    timings = {"prompt_n": prompt_tokens - cached, "cache_n": cached, "predicted_n": 2}
    choice = {"index": index, "text": "", "finish_reason": "length"}
    return sse.chunk_in({"choices": [choice], "usage": usage, "timings": timings})[0]


@pytest.mark.parametrize("n", [1, 2, 3])
@pytest.mark.parametrize("backwards", [False, True])
def test_each_prompt_of_a_list_is_counted_once_where_choices_count_their_own(n: int, backwards: bool) -> None:
    sizes = [(7, 3), (2, 0), (11, 10)]
    meter, live, _, _ = meter_of(path=COMPLETIONS, prompt=["a", "b", "c"], n=n)
    choices = [_ended(i, *sizes[i // n]) for i in range(3 * n)]
    for each in reversed(choices) if backwards else choices:
        meter.measure(each)
    assert (live.prompt_tokens, live.cached_tokens, live.generated_tokens) == (20, 13, 6 * n)


@pytest.mark.parametrize(
    ("prompt", "first", "expected"),
    [(["abcdefghi", "abc"], 3, 4), ([[1, 2, 3], [4]], 3, 4), (["", "abc"], 1, 1), ("abcdef", 6, 6), ([5, 6, 7], 3, 3)],
)
def test_a_whole_answer_that_counts_its_first_prompt(prompt: Any, first: int, expected: int) -> None:
    """By the characters, or the tokens, of all of them."""
    meter, live, _, _ = meter_of(path=COMPLETIONS, prompt=prompt, n=2)
    usage = {"prompt_tokens": first, "completion_tokens": 2, "total_tokens": first + 2}
    choices = [{"index": i, "text": "so on", "finish_reason": "length"} for i in range(2)]
    timings = {"prompt_n": first, "cache_n": 0, "predicted_n": 2}
    meter.measure_unstreamed(json.dumps({"choices": choices, "usage": usage, "timings": timings}).encode())
    assert live.prompt_tokens == expected
    assert live.generated_tokens == 4


def test_of_an_answer_that_is_not_streamed_the_first_token_is_not_known() -> None:
    meter, live, _, _ = meter_of()
    meter.measure_unstreamed(b'{"error":{},"choices":[],"usage":{"prompt_tokens":9,"completion_tokens":4}}')
    assert (live.prompt_tokens, live.generated_tokens) == (9, 4)
    assert live.first_token_s != live.first_token_s and live.answer_s != live.answer_s
    meter.measure_unstreamed(b'{"choices":"in a form of its own"}')
    with pytest.raises(EngineError, match="gave the request up"):
        meter.measure_unstreamed(b'{"choices":[{"finish_reason":"abort"}]}')


@pytest.mark.parametrize(
    ("payload", "tokens", "reasoning_tokens"),
    [
        (b'{"type":"response.output_text.delta"}', 1, 0),
        (b'{"type":"response.reasoning_text.delta"}', 1, 1),
        (b'{"type":"content_block_delta","delta":{"type":"thinking_delta"}}', 1, 1),
        (b'{"type":"message_delta","usage":{"output_tokens":6}}', 6, 0),
        (b'{"type":"ping"}', 0, 0),
        (b"none", 0, 0),
    ],
)
def test_passthrough_events(payload: bytes, tokens: int, reasoning_tokens: int) -> None:
    meter, live, _, _ = meter_of(path=RESPONSES, input="hi")
    assert meter.passthrough is not None
    meter.measure_passthrough(meter.passthrough, payload)
    assert (live.generated_tokens, live.reasoning_tokens) == (tokens, reasoning_tokens)


_STREAMED = st.one_of(
    st.sampled_from(("so", " on", "ü", "\n", 'a"', "\\", "<think>", "</think>", " ")).map(
        lambda text: {"id": "c", "choices": [{"index": 0, "delta": {"content": text}, "finish_reason": None}]}
    ),
    st.sampled_from((
        {"id": "c", "choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}}]},
        {"id": "c", "choices": [{"index": 0, "delta": {"content": ""}, "finish_reason": "stop"}]},
        {"id": "c", "choices": [], "usage": {"prompt_tokens": 3, "completion_tokens": 4}},
    )),
)  # fmt: skip


@given(
    st.lists(st.one_of(_STREAMED.map(sse.encode_event), st.sampled_from((b": comment\n\n", sse.DONE))), max_size=30),
    st.booleans(),
    st.sampled_from((1, 5, 100)),
    st.data(),
)
def test_a_stream_is_counted_and_passed_on_alike_in_any_pieces(
    events: list[bytes], begins_with_thought: bool, max_tokens: int, data: st.DataObject
) -> None:
    if begins_with_thought:
        first = {"id": "c", "choices": [{"index": 0, "delta": {"content": "<think>"}, "finish_reason": None}]}
        events = [sse.encode_event(first), *events]

    def fed(reads: list[list[bytes]]) -> Any:
        in_flight, scheduler = InFlightRequest(Live(0, 0.0, 5, 10, model="m")), OrderedScheduler([])
        in_flight.reservation = reservation = Reservation()
        partial, written = PartialAnswer(chat_request(stream=True), in_flight, scheduler), list[bytes]()
        partial.limit(max_tokens, is_exact=True)
        stream = EngineStream(partial, in_flight, scheduler, None, True, lambda data: written.append(data) is None)
        for parts in reads:
            if not (stream.is_done or stream.is_too_long):
                stream.feed(parts)
        live = in_flight.live
        return (
            b"".join(written) + stream.last_events,
            (stream.is_done, stream.is_too_long, partial.finish_reason, partial.has_usage),
            (partial.tokens, partial.token_ids, "".join(partial.text), partial.last_text, partial.head),
            (live.generated_tokens, live.reasoning_tokens, live.phase, live.stage, reservation.tokens),
            [repr(each) for each in (live.first_token_s, live.answer_s, live.reasoning_end_s)],
            scheduler.phase_changes,
        )

    whole = b"".join(events)
    places = data.draw(st.lists(st.integers(0, len(whole)), max_size=4).map(sorted))
    pieces = [whole[start:end] for start, end in pairwise([0, *places, len(whole)])]
    num = data.draw(st.integers(0, len(events)))
    expected = fed([[event] for event in events])
    for reads in ([events], [events[:num], events[num:]], [pieces], [[each] for each in pieces]):
        assert fed(reads) == expected


def test_tokens_of_one_read_are_spread_over_the_time_since_the_last(monkeypatch: pytest.MonkeyPatch) -> None:
    in_flight, scheduler = InFlightRequest(Live(0, 0.0, 5, 10, model="m")), OrderedScheduler([])
    now = 10.0
    monkeypatch.setattr(engine_stream, "monotonic", lambda: now)
    partial = PartialAnswer(chat_request(stream=True), in_flight, scheduler)
    stream = EngineStream(partial, in_flight, scheduler, None, True, lambda data: True)
    event = b'data: {"choices": [{"delta": {"content": "a"}}]}\n\n'
    for now, tokens in (  # noqa: B007  # the patched clock reads it
        (10.0, 2),
        (10.5, 0),
        (12.5, 1),
        (16.5, 2),
    ):
        stream.feed([event * tokens])
    # One interval of 0 within the first read, one of 2.5 s to the next token, and two of 2 s.
    histogram = scheduler.metrics.inter_token(in_flight)
    assert sum(histogram.counts.values()) == 4 and histogram.total == pytest.approx(6.5)


@pytest.mark.parametrize(
    "answer",
    [
        {"usage": {"prompt_tokens": 9, "completion_tokens": 1, "prompt_tokens_details": {"cached_tokens": 6}}},
        {"choices": [{"delta": {"content": "so"}}], "timings": {"prompt_n": 3, "cache_n": 6, "predicted_n": 1}},
    ],
)
def test_an_engine_says_how_much_of_the_prompt_was_cached(answer: dict[str, Any]) -> None:
    meter, live, _, _ = meter_of()
    meter.measure(sse.chunk_in({"usage": {"prompt_tokens": 9, "prompt_tokens_details": None}})[0])
    assert live.cached_tokens == 0
    meter.measure(sse.chunk_in(answer)[0])
    assert live.cached_tokens == 6


@pytest.mark.parametrize(
    "answer",
    [
        {"usage": {"prompt_tokens": 9, "completion_tokens": 1, "prompt_tokens_details": {"cached_tokens": 6}}},
        {"choices": [{"delta": {"content": "so"}}], "timings": {"prompt_n": 3, "cache_n": 6, "predicted_n": 1}},
    ],
)
def test_engines_say_what_they_computed_anew_to_continue_an_answer(answer: dict[str, Any]) -> None:
    in_flight = InFlightRequest(Live(0, 0.0, 5, 10, model="m"))
    in_flight.reservation = Reservation()
    meter = PartialAnswer(chat_request(stream=True), in_flight, OrderedScheduler([]))
    meter.measure(sse.chunk_in(answer)[0])
    assert in_flight.answer.continued_tokens == (0, 0)
    for tokens_before in (4, 5):
        meter.tokens_before = tokens_before
        for _ in range(2):  # llama.cpp says so in each chunk
            meter.measure(sse.chunk_in(answer)[0])
    assert in_flight.answer.continued_tokens == (6, 12)


@pytest.mark.parametrize(
    ("usage", "expected"),
    [
        ({"input_tokens": 9, "output_tokens": 2, "input_tokens_details": {"cached_tokens": 6}}, (9, 2, 6)),
        ({"input_tokens": 3, "output_tokens": 2, "cache_read_input_tokens": 6}, (9, 2, 6)),
        ({"prompt_tokens": 9, "total_tokens": 9}, (9, 0, 0)),
    ],
)
def test_cached_tokens_of_answers_that_are_passed_on(usage: dict[str, Any], expected: tuple[int, int, int]) -> None:
    meter = passthrough.Passthrough()
    counts = meter.measure_whole(json.dumps({"usage": usage}).encode())
    assert counts is not None
    assert (counts.prompt_tokens, counts.completion_tokens, counts.cached_tokens) == expected
    meter.measure(json.dumps({"type": "message_start", "message": {"usage": usage}}).encode())
    assert (meter.prompt_tokens, meter.generated_tokens, meter.cached_tokens) == expected
