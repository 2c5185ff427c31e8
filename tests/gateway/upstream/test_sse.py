"""Server-sent events and completion chunks: splitting, decoding, and removal of fields."""

from __future__ import annotations

import json
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("httptools")

from headway.gateway.upstream import sse
from headway.gateway.upstream.chunks import Delta
from headway.gateway.upstream.errors import EngineError

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
    chunk = sse.decode_chunk(data)
    assert chunk.id == "c" and chunk.choices[0].delta == Delta(content="so") and chunk.choices[0].token_ids == [7]
    assert sse.decode_chunk(sse.decode_object(data)) == chunk


@pytest.mark.parametrize(
    "data", [b"", b"{", b"[]", b'{"choices":7}', b'{"usage":{"prompt_tokens":-1}}', b'{"a":"\xff"}']
)
def test_what_is_no_chunk_is_an_error(data: bytes) -> None:
    with pytest.raises(EngineError, match="no completion chunk"):
        sse.decode_chunk(data)


def test_objects_of_another_shape_are_errors() -> None:
    with pytest.raises(EngineError, match="no completion chunk"):
        sse.decode_chunk({"choices": 7})
    with pytest.raises(EngineError, match="no object"):
        sse.decode_object(b"[]")


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b'{"error":{"message":"no"}}', 'reported an error: {"message":"no"}'),
        (b'{"choices":[{"finish_reason":"abort"}]}', "gave the request up"),
    ],
)
def test_failures_that_come_as_chunks(data: bytes, message: str) -> None:
    with pytest.raises(EngineError, match=message):
        sse.decode_chunk(data)


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
