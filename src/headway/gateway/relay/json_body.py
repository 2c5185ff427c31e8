"""JSON bodies, decoded within limits on their content, and in short steps if they are long.

A long body is decoded in a thread. A call of the decoder holds the interpreter's lock, so a single call for the whole
body would delay all streams as much as decoding in the event loop.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any, Final

import msgspec
from msgspec import Raw

from headway.gateway.errors import ApiError

MAX_DEPTH = 100
"""Limit on the nesting of arrays and objects."""
MAX_PARTS = 50_000
"""Limit on the number of arrays, objects and strings, including keys."""
MAX_VALUES = 1 << 21
"""Limit on the number of all values, most of which are token ids."""
LONG_BYTES = 64 << 10
"""Longer bodies are decoded in steps."""
_STEP_BYTES = 256 << 10
_SCAN_BYTES = 64 << 10
_COUNTED_BYTES = 512
_IN_NUMBERS = b"+-.0123456789eE"
_NO_BRACKETS = bytes(set(range(256)) - set(b"[]{}"))
_BRACKET = re.compile(rb"[\[\]{}]")
_NOT_IN_NUMBERS = re.compile(rb'["{\[]')
_COMMA = re.compile(rb",")
_QUOTE, _BRACE, _BRACKET_BYTE = b'"{['
_END_OF_KEY = re.compile(rb"[ \t\r\n]*:")
_HIGH_SURROGATE = re.compile(rb"\\u[dD][89abAB][0-9a-fA-F]{2}")
_decode_short: Final = msgspec.json.Decoder().decode
Fields = dict[str, Raw]
"""The top-level fields of a body, as raw JSON."""


def decode(raw: bytes) -> tuple[Any, Fields | None]:
    """A body's value and, if the body is long, its raw fields.

    The value of a long body that is not an object is None. Raises ApiError beyond the limits; raises one of
    `DECODE_ERRORS` if the body is invalid.
    """
    if len(raw) <= LONG_BYTES:
        if len(raw) > MAX_DEPTH and _may_be_deep(raw):
            check(raw)
        return _decode_short(raw), None
    check(raw)
    if not raw.lstrip().startswith(b"{"):
        return None, None
    fields = msgspec.json.decode(raw, type=Fields)
    return {name: _decode(memoryview(value)) for name, value in fields.items()}, fields


def _may_be_deep(raw: bytes) -> bool:
    """Whether there are more brackets than the allowed nesting."""
    if len(raw) <= _COUNTED_BYTES:
        return raw.count(b"{") + raw.count(b"[") > MAX_DEPTH
    num = 0
    # searched one by one, because most bodies have few matches, and counting reads every byte
    for bracket in (b"{", b"["):
        at = raw.find(bracket)
        while at >= 0 and num <= MAX_DEPTH:
            num += 1
            at = raw.find(bracket, at + 1)
    return num > MAX_DEPTH


def encode(body: Mapping[str, Any], read: Mapping[str, Any], fields: Fields) -> bytes:
    """`body` as JSON. Values that are unchanged since they were `read` from `fields` are copied from there, not
    encoded."""
    return msgspec.json.encode(
        {name: fields[name] if name in fields and read.get(name) is value else value for name, value in body.items()}
    )


# Limits.


def check(raw: bytes) -> None:
    """Raises ApiError if the body exceeds a limit. It need not be valid JSON."""
    num_parts = num_values = depth = 0
    for outside, num_strings in _outside_strings(raw):
        num_parts += num_strings + outside.count(b"[") + outside.count(b"{")
        num_values += outside.count(b",")
        if num_parts > MAX_PARTS or num_values > MAX_VALUES:
            raise _beyond(f"more than {MAX_PARTS:,} arrays, objects and strings, or {MAX_VALUES:,} values")
        if len(outside) >= _SCAN_BYTES and not outside.translate(None, _IN_NUMBERS):
            raise _beyond(f"a number of more than {_SCAN_BYTES:,} digits")
        for bracket in outside.translate(None, _NO_BRACKETS):
            depth += 1 if bracket in b"[{" else -1
            if depth > MAX_DEPTH:
                raise _beyond(f"arrays or objects more than {MAX_DEPTH} deep")


def _outside_strings(raw: bytes | memoryview) -> Iterator[tuple[bytes, int]]:
    """Returns, for each slice, the bytes outside of strings, and the number of strings that begin. Raises ApiError for
    an endless key."""
    start = string_start = 0
    is_inside = False
    while start < len(raw):
        text = bytes(raw[start : start + _SCAN_BYTES])
        # the slice would end between a backslash and its escaped character
        if (len(text) - len(text.rstrip(b"\\"))) % 2:
            text = bytes(raw[start : start + _SCAN_BYTES + 1])
        pieces = text.replace(b"\\\\", b"__").replace(b'\\"', b"__").split(b'"')
        if is_inside and len(pieces) > 1:
            end = start + len(pieces[0])
            if end - string_start > _SCAN_BYTES and _END_OF_KEY.match(raw, end + 1):
                raise _beyond(f"a key of more than {_SCAN_BYTES:,} bytes")
        yield b"".join(pieces[is_inside::2]), (len(pieces) - is_inside) // 2
        is_inside ^= len(pieces) % 2 == 0
        start += len(text)
        if is_inside and len(pieces) > 1:
            string_start = start - len(pieces[-1])


def _check_elements(raw: memoryview) -> None:
    """Raises ApiError if an array with elements other than numbers has too many elements to be split in one call."""
    num_elements = depth = 0
    for outside, _ in _outside_strings(raw):
        start = 0
        for bracket in _BRACKET.finditer(outside):
            num_elements += outside.count(b",", start, bracket.start()) if depth == 1 else 0
            depth += 1 if bracket[0] in b"[{" else -1
            start = bracket.end()
        num_elements += outside.count(b",", start) if depth == 1 else 0
        if num_elements > MAX_PARTS:
            raise _beyond(f"an array of more than {MAX_PARTS:,} values that are not all numbers")


def _beyond(what: str) -> ApiError:
    return ApiError(400, f"the body has {what}", "body_too_complex")


# Steps. The decoder has already split their input, so its structure is valid. They read the body in place, because a
# copy for each level of nesting would multiply the memory of a long body.


def _decode(raw: memoryview) -> Any:
    """The value, decoded in calls for at most `_STEP_BYTES` or `MAX_PARTS` each."""
    if len(raw) <= _STEP_BYTES:
        return msgspec.json.decode(raw)
    first = raw[0]
    if first == _QUOTE:
        return _decode_string(raw)
    if first == _BRACE:
        fields = msgspec.json.decode(raw, type=Fields)
        return {name: _decode(memoryview(value)) for name, value in fields.items()}
    if first == _BRACKET_BYTE and _NOT_IN_NUMBERS.search(raw, 1):
        if _has_many(raw, b",", MAX_PARTS):
            _check_elements(raw)
        return [_decode(memoryview(value)) for value in msgspec.json.decode(raw, type=list[Raw])]
    return _decode_numbers(raw) if first == _BRACKET_BYTE else msgspec.json.decode(raw)


def _has_many(raw: memoryview, byte: bytes, most: int) -> bool:
    """Whether the byte occurs more than `most` times."""
    starts = range(0, len(raw), _SCAN_BYTES)
    return sum(bytes(raw[start : start + _SCAN_BYTES]).count(byte) for start in starts) > most


def _decode_numbers(raw: memoryview) -> list[Any]:
    """An array of numbers, true, false and null."""
    values: list[Any] = []
    start, end = 1, len(raw) - 1
    while start < end:
        comma = _COMMA.search(raw, start + _STEP_BYTES, end)
        stop = end if comma is None else comma.start()
        values += msgspec.json.decode(b"[%b]" % bytes(raw[start:stop]))
        start = stop + 1
    return values


def _decode_string(raw: memoryview) -> str:
    text, start, end = "", 1, len(raw) - 1
    while start < end:
        stop = _character_end(raw, start, start + _STEP_BYTES)
        text += msgspec.json.decode(
            b'"%b"' % bytes(raw[start:stop]), type=str
        )  # in place, because nothing else refers to the text
        start = stop
    return text


def _character_end(raw: memoryview, start: int, stop: int) -> int:
    """The first position from `stop` on that is not inside a character of the string that is read from `start`."""
    end = len(raw) - 1
    if stop >= end:
        return end
    while raw[stop] & 0xC0 == 0x80:  # inside a character of several bytes
        stop += 1
    first = max(start, stop - 6)
    at = first + bytes(raw[first:stop]).rfind(b"\\")
    if at >= first:
        run = bytes(raw[start : at + 1])
        if (len(run) - len(run.rstrip(b"\\"))) % 2:  # the backslash begins an escape
            stop = max(stop, at + (6 if bytes(raw[at + 1 : at + 2]) == b"u" else 2))
    if _HIGH_SURROGATE.match(raw, stop - 6, stop) and bytes(raw[stop : stop + 2]) == b"\\u":
        stop += 6
    return min(stop, end)
