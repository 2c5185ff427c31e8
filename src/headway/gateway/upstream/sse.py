"""The format of engines' answers: server-sent events with completion chunks in JSON."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

import msgspec

from headway.gateway.errors import DECODE_ERRORS
from headway.gateway.upstream.chunks import Chunk
from headway.gateway.upstream.errors import EngineError, InvalidAnswerError

DONE = b"data: [DONE]\n\n"
ABORTED = "abort"
"""The finish reason of an answer that the engine gave up."""
_MAX_EVENT_BYTES = 4 << 20


class EventSplitter:
    """Splits a byte stream into events, in amortised O(1) per byte however the stream is cut."""

    def __init__(self) -> None:
        self._rest = b""

    def split(self, data: bytes) -> list[bytes]:
        """The events that `data` completes, each with its blank line. EngineError for one that does not end."""
        if not self._rest and 0 < data.find(b"\n\n") == len(data) - 2 and b"\r" not in data:  # one, as most are
            return [data]
        if self._rest:
            data = self._rest + data
        if b"\r" in data:
            data = data.replace(b"\r\n", b"\n")
        *events, self._rest = data.split(b"\n\n")
        if len(self._rest) > _MAX_EVENT_BYTES:
            raise EngineError("streamed an event without end")
        return [event + b"\n\n" for event in events if event]


def reported(error: object) -> EngineError:
    """The exception for an error object in an answer with status 200."""
    return EngineError(f"reported an error: {msgspec.json.encode(error)[:300].decode(errors='replace')}")


_decode = msgspec.json.Decoder(Chunk).decode


def payload(event: bytes) -> bytes | None:
    """The data of an event; None for comments and events without data."""
    if event.startswith(b"data: ") and event.find(b"\n") == len(event) - 2:
        return event[6:-2]
    lines = [line[5:].removeprefix(b" ") for line in event.split(b"\n") if line.startswith(b"data:")]
    return b"\n".join(lines) if lines else None


def decode_chunk(data: bytes | dict[str, Any]) -> Chunk:
    """The chunk in JSON, or in an object decoded from it.

    InvalidAnswerError if it is no completion chunk; EngineError if it reports an error or gives the answer up.
    """
    try:
        if isinstance(data, dict):
            chunk = msgspec.convert(data, Chunk)
        else:
            if not data.isascii():  # fields that are not read are not decoded, and clients would fail on them
                data.decode()
            chunk = _decode(data)
    except DECODE_ERRORS as error:
        raise InvalidAnswerError(f"streamed what is no completion chunk ({error})") from None
    if chunk.error:
        raise reported(chunk.error)
    for choice in chunk.choices:
        if choice.finish_reason == ABORTED:
            raise EngineError("gave the request up")
    return chunk


def decode_object(data: bytes) -> dict[str, Any]:
    """A JSON object with all its fields. EngineError if `data` is not one."""
    try:
        value = msgspec.json.decode(data)
    except DECODE_ERRORS as error:
        raise EngineError(f"answered with what is no JSON ({error})") from None
    if not isinstance(value, dict):
        raise EngineError("answered with JSON that is no object")
    return value


def encode_event(value: object) -> bytes:
    """An event with a value as its data."""
    return b"data: " + msgspec.json.encode(value) + b"\n\n"


def remove_fields(names: Iterable[str], chunk: dict[str, Any]) -> None:
    """Remove fields that the client did not ask for, from a chunk and from its choices."""
    for each in (chunk, *chunk.get("choices", ())):
        for name in names:
            each.pop(name, None)


_FLAT_VALUE = rb'(?:null|\[[\d,\s]*\]|"(?:[^"\\]|\\.)*"|\{(?:\s*"\w+"\s*:\s*[-+.\deE]+\s*,?)*\s*\})'


class FieldRemover:
    """Removes fields from the JSON of valid chunks, as `remove_fields` does, mostly without decoding it."""

    def __init__(self, names: tuple[str, ...]) -> None:
        self._names = names
        keys = [b'"%b"' % name.encode() for name in names]
        # A quote after a comma opens a key: within a text it is escaped.
        self._patterns = [(key, re.compile(b"," + key + b":" + _FLAT_VALUE)) for key in keys]

    def remove(self, payload: bytes) -> bytes:
        """The payload without the fields."""
        for key, pattern in self._patterns:
            if key in payload:
                payload = pattern.sub(b"", payload)
                if key in payload:  # a first or nested field, whitespace, or a text that is the field's name
                    chunk = decode_object(payload)
                    remove_fields(self._names, chunk)
                    return msgspec.json.encode(chunk)
        return payload
