"""Server-sent events and completion chunks: splitting, decoding, and removal of fields."""

from __future__ import annotations

import json
from contextlib import suppress
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

pytest.importorskip("httptools")

from headway.gateway.relay import passthrough
from headway.gateway.upstream import loose_json, sse
from headway.gateway.upstream.chunks import Delta
from headway.gateway.upstream.errors import EngineError, RefusedError, openai_error

_TEXTS = st.text('ab "\\\n\tü好\x7f\u2028', max_size=4)
_DELTAS = st.fixed_dictionaries(
    {"content": _TEXTS},
    optional={"role": _TEXTS, "reasoning": _TEXTS, "odd": st.fixed_dictionaries({"content": _TEXTS})},
)
_CHOICES = st.one_of(
    st.fixed_dictionaries(
        {"delta": _DELTAS}, optional={"index": st.just(0), "token_ids": st.just([7]), "text": _TEXTS}
    ),
    st.fixed_dictionaries({"text": _TEXTS}, optional={"finish_reason": st.sampled_from((None, "stop"))}),
)
_CHUNKS = st.fixed_dictionaries(
    {"id": st.sampled_from("cd"), "choices": st.lists(_CHOICES, min_size=1, max_size=2)},
    optional={"usage": st.just({"prompt_tokens": 3, "completion_tokens": 1}), "content": _TEXTS, "x": _TEXTS},
)


def _event(chunk: Any, is_ascii: bool, is_spaced: bool) -> bytes:
    separators = (", ", ": ") if is_spaced else (",", ":")
    return b"data: " + json.dumps(chunk, ensure_ascii=is_ascii, separators=separators).encode() + b"\n\n"


@given(_CHUNKS, st.lists(st.one_of(_CHUNKS, _TEXTS), max_size=6), st.booleans(), st.booleans())
def test_an_event_that_repeats_another_has_the_same_chunk_but_for_its_text(
    first: Any, others: list[Any], is_ascii: bool, is_spaced: bool
) -> None:
    repeated, event = sse.RepeatedEvent(), _event(first, is_ascii, is_spaced)
    learnt = sse.read_chunk(event[6:-2])[0]
    is_learnt = repeated.learn(event, learnt)
    for other in others:
        chunk = other
        if isinstance(other, str):
            chunk = json.loads(json.dumps(first))
            of = chunk["choices"][0]
            of.get("delta", of)["content" if "delta" in of else "text"] = other
        sent = _event(chunk, is_ascii, is_spaced)
        text = repeated.text_of(sent)
        found = sse.read_chunk(sent[6:-2])[0]
        if text:
            assert is_learnt and len(found.choices) == 1
            changed = found.choices[0]
            assert text == (changed.text if changed.delta is None else changed.delta.content)
            if changed.delta is None:
                changed.text = learnt.choices[0].text
            else:
                assert learnt.choices[0].delta is not None
                changed.delta.content = learnt.choices[0].delta.content
            assert found == learnt


@pytest.mark.parametrize("field", ["content", "text"])
def test_usual_events_are_recognized_and_odd_ones_are_not(field: str) -> None:
    def event(text: bytes) -> bytes:
        value = b'"%b":"%b"' % (field.encode(), text)
        value = b'"delta":{%b}' % value if field == "content" else value
        return b'data: {"id":"c","choices":[{"index":0,%b,"finish_reason":null}]}\n\n' % value

    repeated = sse.RepeatedEvent()
    assert repeated.text_of(event(b"so")) == ""  # nothing was learnt
    assert repeated.learn(event(b"so"), sse.read_chunk(event(b"so")[6:-2])[0])
    assert [repeated.text_of(event(text)) for text in (b"so", b" on", "ü好".encode())] == ["so", " on", "ü好"]
    for text in (b"", b"\\n", b'","x":"', b"\xff", b"\x01", b"a\n"):
        assert repeated.text_of(event(text)) == ""
    assert repeated.text_of(event(b"so").replace(b'"c"', b'"d"')) == ""
    assert repeated.text_of(event(b"so")[:-1]) == repeated.text_of(b"data: [DONE]\n\n") == ""


@given(
    st.lists(
        st.sampled_from((b"so", b" on", "ü".encode(), b"\xc3", b"\xbc", b"", b"\\n", b'"', b"\x01", b"\x7f", b"other"))
    )
)
@example([b"\xc3", b"\xbc"])
def test_texts_of_several_events_are_those_of_each(contents: list[bytes]) -> None:
    def event(text: bytes) -> bytes:
        return b'data: {"id":"%b","choices":[{"index":0,"text":"%b"}]}\n\n' % (b"d" if text == b"other" else b"c", text)

    repeated, events = sse.RepeatedEvent(), [event(text) for text in contents]
    assert repeated.learn(event(b"so"), sse.read_chunk(event(b"so")[6:-2])[0])
    texts = [repeated.text_of(each) for each in events]
    for start in range(len(events) + 1):
        num, whole, text, last = repeated.texts_of(events, start)
        assert whole == b"".join(events[start : start + num])
        assert all(texts[start : start + num]) == bool(text) or not num
        if text:
            assert text == "".join(texts[start : start + num]) and last == texts[start + num - 1]
            assert start + num == len(events) or not texts[start + num]


FIELDS = ("token_ids", "prompt_token_ids", "prompt_text", "timings")


@given(st.lists(st.text("ab {}:\r", max_size=12), max_size=6), st.lists(st.integers(0, 40), max_size=8))
def test_events_do_not_depend_on_how_the_stream_is_cut(payloads: list[str], cuts: list[int]) -> None:
    lines = [payload.replace("\r", "").strip() for payload in payloads]
    stream = "".join(f"data: {line}\r\n\r\n" for line in lines).encode()
    bounds = sorted({0, len(stream), *(cut for cut in cuts if cut < len(stream))})
    splitter = sse.EventSplitter()
    pieces = [stream[a:b] for a, b in pairwise(bounds)]
    found = [sse.payload(event) for piece in pieces for event in splitter.split(piece)]
    assert found == [line.encode() for line in lines]


def test_an_event_without_end_is_an_error() -> None:
    splitter = sse.EventSplitter()
    with pytest.raises(EngineError, match="without end"):
        for _ in range(100):
            splitter.split(b"x" * 100_000)


@pytest.mark.parametrize(
    ("event", "payload"),
    [
        (b"data: {}\n\n", b"{}"),
        (b"data:{}\n\n", b"{}"),
        (b"event: delta\ndata: {}\nid: 3\n\n", b"{}"),
        (b"data: a\ndata: b\n\n", b"a\nb"),
        (b": keep-alive\n\n", None),
        (b"event: ping\n\n", None),
    ],
)
def test_payloads(event: bytes, payload: bytes | None) -> None:
    assert sse.payload(event) == payload


def test_a_chunk_has_the_fields_that_the_gateway_reads() -> None:
    data = b'{"id":"c","choices":[{"index":0,"delta":{"content":"so","odd":1},"token_ids":[7]}],"more":{"a":[]}}'
    chunk, unread = sse.read_chunk(data)
    assert chunk.id == "c" and chunk.choices[0].delta == Delta(content="so") and chunk.choices[0].token_ids == [7]
    assert unread == "" and sse.chunk_in(sse.decoded(data)) == (chunk, "")


_SAID = b'{"choices":[{"index":0,"delta":{"content":"so"}%b}],"usage":{"prompt_tokens":9,"completion_tokens":2}%b}'


@pytest.mark.parametrize(
    ("data", "unread"),
    [
        (b"", "what is no JSON"), (b"{", "what is no JSON"), (b"<html>", "what is no JSON"),
        (b"\xff", "what is no JSON"),
        (b"[" * 50_000, "what is no JSON"), (b"[]", "JSON that is no object"), (b"null", "JSON that is no object"),
        (b"7", "JSON that is no object"), (b"NaN", "JSON that is no object"), (b'"a"', "JSON that is no object"),
        (b'{"choices":7}', "fields of other types"), (b'{"choices":[7]}', "fields of other types"),
        (b'{"usage":[]}', "fields of other types"), (b'{"choices":[{"delta":"so"}]}', "fields of other types"),
        (b"{}", ""), (b'{"choices":null}', ""), (b'{"error":null,"choices":[]}', ""), (b'{"error":{"code":null}}', ""),
        (b'{"usage":{"prompt_tokens":-1}}', ""), (b'{"usage":{"completion_tokens":1e400}}', ""),
    ],
)  # fmt: skip
def test_what_cannot_be_read_is_named_and_no_error(data: bytes, unread: str) -> None:
    chunk, named = sse.read_chunk(data)
    assert named == unread
    assert not any(choice.text or choice.delta for choice in chunk.choices)
    assert chunk.usage is None or chunk.usage.completion_tokens == chunk.usage.prompt_tokens == 0


@pytest.mark.parametrize(
    ("in_choice", "beside"),
    [
        (b"", b""),
        (b',"logprobs":{"content":[{"logprob":-Infinity}]}', b""),
        (b',"logprobs":NaN', b""),
        (b"", b',"created":1.5,"id":"c"'),
        (b"", b',"x":"\\ud800"'),
        (b"", b',"x":"\xff"'),
        (b',"index":0', b""),
        (b',"finish_reason":{"type":"stop"}', b""),
        (b"", b',"timings":null,"choices2":null'),
        (b',"token_ids":null', b',"prompt_token_ids":null'),
    ],
)
def test_one_odd_field_hides_no_other(in_choice: bytes, beside: bytes) -> None:
    chunk, _ = sse.read_chunk(_SAID % (in_choice, beside))
    delta, usage = chunk.choices[0].delta, chunk.usage
    assert delta is not None and delta.content == "so"
    assert usage is not None and (usage.prompt_tokens, usage.completion_tokens) == (9, 2)


@pytest.mark.parametrize(
    ("content", "text", "reasoning"),
    [
        ("so", "so", None),
        ([{"type": "text", "text": "so"}], "so", None),
        (["so", {"text": " it"}], "so it", None),
        ([{"type": "thinking", "thinking": [{"type": "text", "text": "hm"}]}], None, "hm"),
        ([{"type": "reasoning", "text": "hm"}, {"type": "text", "text": "so"}], "so", "hm"),
        ([7, None], None, None),
    ],
)
def test_a_content_may_have_parts(content: Any, text: str | None, reasoning: str | None) -> None:
    chunk, _ = sse.chunk_in({"choices": [{"delta": {"content": content}}]})
    delta = chunk.choices[0].delta
    assert delta is not None and (delta.content, delta.reasoning) == (text, reasoning)


@pytest.mark.parametrize(
    ("usage", "counts"),
    [
        ({"prompt_tokens": 9, "completion_tokens": 2}, (9, 2, 0)),
        ({"prompt_tokens": 9, "completion_tokens": None, "total_tokens": 9}, (9, 0, 0)),
        ({"prompt_tokens": 9.0, "completion_tokens": "2"}, (9, 2, 0)),
        ({"prompt_tokens": 9, "total_tokens": 11}, (9, 2, 0)),
        ({"total_tokens": 9}, (9, 0, 0)),
        ({"input_tokens": 9, "output_tokens": 2, "input_tokens_details": {"cached_tokens": 6}}, (9, 2, 6)),
        ({"input_tokens": 3, "output_tokens": 2, "cache_read_input_tokens": 6}, (9, 2, 6)),
        ({"prompt_tokens": 9, "completion_tokens": 2, "prompt_cache_hit_tokens": 6}, (9, 2, 6)),
        ({"prompt_tokens": 9, "completion_tokens": 2, "prompt_tokens_details": []}, (9, 2, 0)),
        ({"tokens": {"input_tokens": 9, "output_tokens": 2}}, (9, 2, 0)),
        ({"prompt_tokens": True}, (0, 0, 0)),
        ({"prompt_tokens": 10**400, "input_tokens": 9, "total_tokens": -(10**400)}, (9, 0, 0)),  # too long for a float
    ],
)
def test_forms_of_usage(usage: dict[str, Any], counts: tuple[int, int, int]) -> None:
    found = loose_json.usage_of(usage)
    assert (found.prompt_tokens, found.completion_tokens, found.cached_tokens) == counts


_JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-5, 5) | st.floats() | st.text(max_size=3),
    lambda each: (
        st.lists(each, max_size=3)
        | st.dictionaries(
            st.sampled_from(
                "choices delta message content usage text index type finish_reason id timings "
                "prompt_tokens token_ids error code object".split()
            ),
            each,
            max_size=4,
        )
    ),
    max_leaves=12,
)


@given(_JSON)
@example({"choices": [{"index": 10**400, "delta": {"content": "a"}}], "usage": {"prompt_tokens": 10**400}})
@example({"index": 10**400, "content": "a", "timings": {"prompt_n": 10**400, "cache_n": 10**400}})
def test_any_json_is_a_chunk_or_an_engines_error(value: Any) -> None:
    with suppress(EngineError):
        sse.read_chunk(json.dumps(value).encode())
    with suppress(EngineError):
        passthrough.Passthrough().measure(json.dumps(value).encode())
        passthrough.Passthrough().measure_whole(json.dumps(value).encode())


@pytest.mark.parametrize(
    ("data", "status"),
    [
        (b'{"error":{"message":"no"}}', 500),
        (b'{"error":"no"}', 500),
        (b'{"error":{"message":"no","code":400}}', 400),
        (b'{"error":{"message":"no","code":"400"}}', 400),
        (b'{"error":{"status":"INVALID_ARGUMENT","code":400}}', 400),
        (b'{"error":{"message":"no","type":"invalid_request_error","code":"context_length_exceeded"}}', 400),
        (b'{"error":{"message":"no","type":"BadRequestError","code":null}}', 400),
        (b'{"error":[1]}', 500),
        (b'{"object":"error","message":"no","type":"BadRequestError","param":null,"code":400}', 400),
        (b'{"object":"error","message":"no","type":"InternalServerError","code":500}', 500),
        (b'{"error":"too long","error_type":"validation"}', 400),
        (b'{"error":"full","error_type":"overloaded"}', 500),
        (b'{"type":"error","error":{"type":"invalid_request_error","message":"no"}}', 400),
        (b'{"error":{"message":"slow down","type":"rate_limit_error"}}', 429),
        (b'{"detail":"no"}', 500),
        (b'{"error":{"message":"no","code":502},"choices":[{"delta":{"content":"a"},"finish_reason":"error"}]}', 500),
    ],
)
def test_errors_in_answers_have_the_status_that_they_name(data: bytes, status: int) -> None:
    for read in (sse.read_chunk, passthrough.Passthrough().measure_whole):
        with pytest.raises(EngineError) as caught:
            read(data)
        error = caught.value
        assert (error.status if isinstance(error, RefusedError) else 500) == status
        if isinstance(error, RefusedError):
            assert json.loads(openai_error(status, error.body))["error"]["message"]


def test_an_answer_that_was_given_up_is_a_failure() -> None:
    with pytest.raises(EngineError, match="gave the request up"):
        sse.read_chunk(b'{"choices":[{"finish_reason":"abort"}]}')


@pytest.mark.parametrize("ends", [b"\n", b"\r\n", b"\r"])
@pytest.mark.parametrize("size", [1, 2, 3, 100])
def test_lines_end_in_any_way(ends: bytes, size: int) -> None:
    data = (b"event: a\ndata: {\ndata: }\n\n: ping\n\ndata:[DONE] \n\n" + b"data: [DONE]").replace(b"\n", ends)
    splitter, events = sse.EventSplitter(), list[bytes]()
    for start in range(0, len(data), size):
        events += splitter.split(data[start : start + size])
    events += splitter.take_rest()
    assert [sse.payload(event) for event in events] == [b"{\n}", None, b"[DONE] ", b"[DONE]"]
    assert sse.is_done(b"[DONE] ") and not sse.is_done(b"[DONE]!")


@pytest.mark.parametrize(
    ("event", "status"),
    [
        (b'event: error\ndata: {"message":"no","code":400}\n\n', 400),
        (b"event: error\ndata: went wrong\n\n", 500),
        (b'event:error\ndata: {"error":{"message":"no","code":400}}\n\n', 400),
        (b"event: delta\ndata: {}\n\n", None),
        (b'error: {"code":400,"message":"too long"}\n\n', None),
    ],
)
def test_events_that_are_named_errors(event: bytes, status: int | None) -> None:
    data = sse.payload(event)
    assert data is not None
    error = sse.error_of_event(event, data)
    assert (None if error is None else getattr(error, "status", 500)) == status
    if event.startswith(b"error:"):
        with pytest.raises(RefusedError):
            sse.read_chunk(data)


_TEXTS = st.text('ab"\\{},: é', max_size=8) | st.sampled_from(['"token_ids":[1]', ',"token_ids":null', "prompt_text"])
_HIDDEN: dict[str, st.SearchStrategy[Any]] = {
    "token_ids": st.none() | st.lists(st.integers(0, 99), max_size=3) | _TEXTS,
    "prompt_token_ids": st.none() | st.lists(st.lists(st.integers(0, 9), max_size=2), max_size=2),
    "prompt_text": _TEXTS,
    "timings": st.dictionaries(st.sampled_from(["prompt_n", "ms"]), st.integers() | st.floats(0, 9), max_size=2),
}


@st.composite
def _objects(draw: st.DrawFn, **fields: st.SearchStrategy[Any]) -> dict[str, Any]:
    """An object with these fields and some of those to hide, in any order."""
    hidden = draw(st.lists(st.sampled_from(sorted(_HIDDEN)), unique=True))
    names = draw(st.permutations([*fields, *hidden]))
    return {name: draw((fields | _HIDDEN)[name]) for name in names}


_CHOICES = st.lists(_objects(index=st.integers(0, 3), text=_TEXTS), max_size=2)


@given(_objects(id=_TEXTS, choices=_CHOICES), st.booleans())
def test_removing_fields_from_the_json_is_removing_them_from_the_object(chunk: dict[str, Any], compact: bool) -> None:
    separators = (",", ":") if compact else (", ", ": ")
    data = json.dumps(chunk, separators=separators, ensure_ascii=False).encode()
    rest = json.loads(sse.FieldRemover(FIELDS).remove(data))
    sse.remove_fields(FIELDS, chunk)
    assert rest == chunk
