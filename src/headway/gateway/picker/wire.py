"""Encodes the messages that the picker sends for each request and each token, byte for byte as protobuf: there an
object for each nested message takes ten times as long (docs/log.md has the figures)."""

from __future__ import annotations

from typing import Any, Final

from headway.gateway.picker import ext_proc_pb2 as pb

Path = tuple[bytes, ...]
"""Tags of fields within each other, the innermost one first."""
_LENGTH_DELIMITED: Final = 2
"""The wire type of messages, texts and bytes."""
_ONE_BYTE: Final = [bytes((value,)) for value in range(128)]


def path(message: Any, *names: str) -> Path:
    """The way from a type of message to a field of a field (and so on), all of them messages, texts or bytes."""
    tags: list[bytes] = []
    descriptor = message.DESCRIPTOR
    for name in names:
        field = descriptor.fields_by_name[name]
        tags.append(_varint(field.number << 3 | _LENGTH_DELIMITED))
        descriptor = field.message_type
    return tuple(reversed(tags))


def _varint(value: int) -> bytes:
    if value < 128:
        return _ONE_BYTE[value]
    parts = bytearray()
    while value >= 128:
        parts.append(value & 127 | 128)
        value >>= 7
    parts.append(value)
    return bytes(parts)


def within(where: Path, data: bytes) -> bytes:
    """A message with nothing but `data`, an encoded message or bytes, in the field at `where`."""
    for tag in where:
        data = b"".join((tag, _varint(len(data)), data))
    return data


_NAME: Final = path(pb.HeaderValue, "key")
_VALUE: Final = path(pb.HeaderValue, "raw_value")
_PAIR: Final = path(pb.HeaderValueOption, "header")
_OPTION: Final = path(pb.HeaderMutation, "set_headers")
_OVERWRITE: Final[bytes] = pb.HeaderValueOption(
    append_action=pb.HeaderValueOption.OVERWRITE_IF_EXISTS_OR_ADD
).SerializeToString()
_BODY: Final = path(pb.StreamedBodyResponse, "body")
_LAST: Final[bytes] = pb.StreamedBodyResponse(end_of_stream=True).SerializeToString()


def set_header(name: str, value: str) -> bytes:
    """A `HeaderMutation` that sets a header."""
    text = value.encode("latin-1", "replace")
    pair = within(_NAME, name.encode()) + (within(_VALUE, text) if text else b"")
    return within(_OPTION, within(_PAIR, pair) + _OVERWRITE)


def streamed(where: Path, body: bytes, is_last: bool) -> bytes:
    """A message with a `StreamedBodyResponse` at `where`."""
    part = within(_BODY, body) if body else b""
    return within(where, part + _LAST if is_last else part)
