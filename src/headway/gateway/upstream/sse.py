"""The format of engines' answers: server-sent events with completion chunks in JSON."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from typing import Any, Final

import msgspec

from headway.gateway.errors import DECODE_ERRORS
from headway.gateway.upstream import loose_json
from headway.gateway.upstream.chunks import Chunk
from headway.gateway.upstream.errors import EngineError, error_in, reported

DONE: Final = b"data: [DONE]\n\n"
ABORTED: Final = "abort"
"""The finish reason of an answer that the engine gave up."""
FRAME_BYTES: Final = len(b"data: \n\n")
"""Bytes of a one-line event besides its data."""
MAX_DONE_BYTES: Final = 32
"""Maximum length of the data that mark the end of a stream."""
_MAX_EVENT_BYTES = 4 << 20
# Bytes are looked for by number, and longer patterns by `find`: for `b"x" in data` Python first makes an error message,
# which takes ten times as long as the search of an event.
_CR: Final = 0x0D
_QUOTE: Final = 0x22
_BACKSLASH: Final = 0x5C
_CONTROLS = bytes((*range(32), 127))


class EventSplitter:
    """Splits a byte stream into events, in amortised O(1) per byte for any segmentation of the stream."""

    _rest = b""

    @property
    def has_rest(self) -> bool:
        """Whether an event has begun."""
        return bool(self._rest)

    def split(self, data: bytes) -> list[bytes]:
        """The events completed by `data`, each with its blank line. Raises EngineError for an endless event."""
        # a single event, the usual case
        if not self._rest and 0 < data.find(b"\n\n") == len(data) - 2 and _CR not in data:
            return [data]
        if self._rest:
            data = self._rest + data
        if _CR in data:
            data = _with_line_feeds(data)
        *events, self._rest = data.split(b"\n\n")
        if len(self._rest) > _MAX_EVENT_BYTES:
            raise EngineError("streamed an event without end")
        # Further blank lines leave pieces without a byte, or with one line end.
        return [event + b"\n\n" for event in events if len(event) > 1 or event.strip(b"\n")]

    def take_rest(self) -> list[bytes]:
        """The event at the end of a complete stream that lacks its blank line."""
        rest, self._rest = self._rest.rstrip(b"\r\n"), b""
        return [rest + b"\n\n"] if rest else []


def _with_line_feeds(data: bytes) -> bytes:
    """The data with LF line ends in place of CRLF or CR. A CR at the end stays, because an LF may follow."""
    data = data.replace(b"\r\n", b"\n")
    if _CR not in data:
        return data
    last = b"\r" if data.endswith(b"\r") else b""
    return data.removesuffix(b"\r").replace(b"\r", b"\n") + last


_decode: Final = msgspec.json.Decoder(Chunk).decode


def payload(event: bytes) -> bytes | None:
    """The data of an event; None for comments and events without data."""
    if event.startswith(b"data: ") and event.find(b"\n") == len(event) - 2:
        return event[6:-2]
    lines = [line[5:].removeprefix(b" ") for line in event.split(b"\n") if line.startswith(b"data:")]
    data = b"\n".join(lines)
    if data.strip():
        return data
    if event.startswith(b"error:"):  # a field of llama.cpp's own, before October 2025
        reported = event[6:].strip()
        return reported if b'"error"' in reported else b'{"error":%b}' % reported
    return None


def is_done(data: bytes) -> bool:
    """Whether an event's data mark the end of a stream."""
    return data == b"[DONE]" or (len(data) < MAX_DONE_BYTES and data.strip() == b"[DONE]")


def read_chunk(data: bytes) -> tuple[Chunk, str]:
    """The chunk in an event's data or in an answer that is not streamed, and the unreadable part; "" if all could be
    read.

    Raises EngineError if the chunk reports an error, or reports that the answer was given up.
    """
    try:
        if not data.isascii():  # unread fields are not decoded, and invalid UTF-8 would fail at clients
            data.decode()
        chunk = _decode(data)
    except DECODE_ERRORS:
        return chunk_in(loose_json.parse(data))
    choices, usage = chunk.choices, chunk.usage
    if chunk.error or (not choices if usage is None else not usage.prompt_tokens):
        return chunk_in(loose_json.parse(data))
    for choice in choices:
        if choice.finish_reason == ABORTED:
            raise EngineError("gave the request up")
    return chunk, ""


def chunk_in(value: Any) -> tuple[Chunk, str]:
    """`read_chunk` for an already decoded value."""
    if isinstance(value, dict) and (error := error_in(value)) is not None:
        raise reported(error, value)
    chunk, unread = loose_json.chunk_of(value)
    _raise_if_given_up(chunk)
    return chunk, unread


def _raise_if_given_up(chunk: Chunk) -> None:
    for choice in chunk.choices:
        if choice.finish_reason == ABORTED:
            raise EngineError("gave the request up")


def error_of_event(event: bytes, data: bytes) -> EngineError | None:
    """The error of an event named `error`, with any data; None for another name."""
    if event.startswith(b"data: ") or not any(
        line.startswith(b"event:") and line[6:].strip() == b"error" for line in event.split(b"\n")
    ):
        return None
    value = loose_json.parse(data)
    if value is loose_json.UNREAD:
        value = data.decode(errors="replace")
    error = error_in(value) if isinstance(value, dict) else None
    return reported(value if error is None else error, value if isinstance(value, dict) else None)


def decoded(data: bytes) -> Any:
    """The value of JSON, including variants that only Python's own parser accepts."""
    try:
        return msgspec.json.decode(data)
    except DECODE_ERRORS:
        return loose_json.parse(data)


def is_json(data: bytes) -> bool:
    return decoded(data) is not loose_json.UNREAD


def encoded(value: object) -> bytes:
    """JSON of a value that was decoded from an answer."""
    try:
        return msgspec.json.encode(value)
    except UnicodeEncodeError:  # surrogate halves, because only escapes can express them
        return json.dumps(value).encode()


def encode_event(value: object) -> bytes:
    """An event with a value as its data."""
    return b"data: " + encoded(value) + b"\n\n"


def remove_fields(names: Iterable[str], chunk: dict[str, Any]) -> None:
    """Remove fields that the client did not ask for from a chunk and its choices."""
    choices = chunk.get("choices")
    for each in (chunk, *(choices if isinstance(choices, list) else ())):
        if isinstance(each, dict):
            for name in names:
                each.pop(name, None)


class RepeatedEvent:
    """Recognises events that repeat an earlier one except for the answer's text, without decoding them.

    Most events of a stream differ only in the text. A text without quotes, backslashes and control characters is
    unchanged in JSON, so equal bytes before and after the text mean equal values of all other fields.
    """

    is_set = False
    """Whether an event was learnt."""
    _before = b""
    _after = b""
    _between = b""

    def learn(self, event: bytes, chunk: Chunk) -> bool:
        """Recognise events like `event` from now on. `chunk`: the decoded event. Returns False if the event has more
        than text, or an unexpected form."""
        text, key = _text_alone(chunk)
        if not text or not event.startswith(_DATA) or event.find(b"\n") != len(event) - 2:
            return False
        data = text.encode("utf-8", "surrogatepass")
        before, field, after = event.partition(key + data + b'"')
        # A quote before `content` that does not end a value begins a key, and this name occurs only once.
        if not field or before[-1:] not in (b"{", b",") or before.find(key[:-2]) >= 0 or after.find(key[:-2]) >= 0:
            return False
        if _BACKSLASH in before or _BACKSLASH in after:  # an escape may spell the name, too
            return False
        self._before, self._after, self.is_set = before + key, b'"' + after, True
        self._between = self._after + self._before
        return True

    def texts_of(self, events: list[bytes], start: int) -> tuple[int, bytes, str, str]:
        """(number, joint bytes, joint text, last text) of the events from `start` on that are like the last learnt
        event. The texts are empty if one of them has characters that must be looked at."""
        before, after, texts = self._before, self._after, list[bytes]()
        for i in range(start, len(events)):
            event = events[i]
            end = len(event) - len(after)
            if end <= len(before):
                break
            texts.append(event[len(before) : end])
        num = len(texts)
        whole = b"".join(events[start : start + num])
        if before + self._between.join(texts) + after != whole:  # all at once takes a third of one by one
            num = self._num_like(events, start, num)
            del texts[num:]
            whole = b"".join(events[start : start + num])
        data = b" ".join(texts)  # with spaces, so that no character spans two texts
        if not num or _QUOTE in data or _BACKSLASH in data:
            return num, whole, "", ""
        try:
            text = data.decode()
        except UnicodeDecodeError:
            return num, whole, "", ""
        if num > 1 and len(text) == len(data):  # ASCII
            is_printable = len(data.translate(None, _CONTROLS)) == len(data)
        else:
            is_printable = text.isprintable()
        if not is_printable:
            return num, whole, "", ""
        if num == 1:
            return 1, whole, text, text
        return num, whole, b"".join(texts).decode(), texts[-1].decode()

    def _num_like(self, events: list[bytes], start: int, most: int) -> int:
        """The number of events from `start` on that begin and end like the last learnt one."""
        before, after = self._before, self._after
        for i in range(most):
            event = events[start + i]
            if event[: len(before)] != before or event[len(event) - len(after) :] != after:
                return i
        return most

    def text_of(self, event: bytes) -> str:
        """The text of an event like the last learnt event; empty for other events."""
        before, after = self._before, self._after
        if not self.is_set or not event.startswith(before) or not event.endswith(after):
            return ""
        data = event[len(before) : len(event) - len(after)]  # empty if beginning and end overlap
        if _QUOTE in data or _BACKSLASH in data:
            return ""
        try:
            text = data.decode()
        except UnicodeDecodeError:
            return ""
        return text if text.isprintable() else ""


_DATA: Final = b"data: "


def _text_alone(chunk: Chunk) -> tuple[str, bytes]:
    """(text, beginning of its field) of a chunk that has only text to count; both are empty for other chunks."""
    choices = chunk.choices
    if len(choices) != 1 or chunk.prompt_token_ids is not None:
        return "", b""
    if chunk.usage is not None or chunk.timings is not None:
        return "", b""
    choice = choices[0]
    delta = choice.delta
    if choice.token_ids is not None or choice.prompt_token_ids is not None or choice.usage is not None:
        return "", b""
    if choice.message is not None or choice.finish_reason is not None:
        return "", b""
    if delta is None:
        return choice.text or "", b'"text":"'
    if choice.text or delta.reasoning or delta.reasoning_content or delta.tool_calls is not None:
        return "", b""
    return delta.content or "", b'"content":"'


_FLAT_VALUE = rb'(?:null|\[[\d,\s]*\]|"(?:[^"\\]|\\.)*"|\{(?:\s*"\w+"\s*:\s*[-+.\deE]+\s*,?)*\s*\})'


class FieldRemover:
    """Removes fields from the JSON of valid chunks, like `remove_fields`, mostly without decoding it."""

    def __init__(self, names: tuple[str, ...]) -> None:
        self._names = names
        keys = [b'"%b"' % name.encode() for name in names]
        # A quote after a comma opens a key: inside a text it is escaped.
        self._patterns = [(key, re.compile(b"," + key + b":" + _FLAT_VALUE)) for key in keys]

    def remove(self, payload: bytes) -> bytes:
        """The payload without the fields."""
        for key, pattern in self._patterns:
            if payload.find(key) >= 0:
                payload = pattern.sub(b"", payload)
                if payload.find(key) >= 0:  # a first or nested field, white space, or a text like the field's name
                    try:
                        chunk = msgspec.json.decode(payload)
                    except DECODE_ERRORS:
                        return payload
                    if isinstance(chunk, dict):
                        remove_fields(self._names, chunk)
                        return msgspec.json.encode(chunk)
        return payload
