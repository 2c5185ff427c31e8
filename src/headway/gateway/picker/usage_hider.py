"""Removes the usage events from a stream and keeps all other bytes unchanged."""

from __future__ import annotations

import re

import msgspec

from headway.gateway.errors import DECODE_ERRORS
from headway.gateway.upstream import sse

_BLANK_LINE = re.compile(rb"\r\n\r\n|\n\n|\r\r|\n\r\n|\r\n\n")
"""Ends of events, with any line ending."""
_NO_CHOICES = re.compile(rb'"choices"\s*:\s*\[\s*\]')
_MAX_HELD_BYTES = 1 << 20
"""A longer part of an event is passed on: it reports no usage."""


class UsageHider:
    """Filters a stream of events: all events pass, except events that report only token usage. The bytes of an event
    are held until its end, because only then is its kind known. If the stream ends within an event, `rest` returns the
    held bytes."""

    def __init__(self) -> None:
        self._held = b""

    def feed(self, data: bytes) -> bytes:
        """The bytes to pass on after `data`."""
        if not self._held and data.endswith(b"\n\n") and _NO_CHOICES.search(data) is None:
            return data
        data, start, kept = self._held + data, 0, []
        for blank in _BLANK_LINE.finditer(data):
            event = data[start : blank.end()]
            start = blank.end()
            if not _reports_usage_only(event):
                kept.append(event)
        held = data[start:]
        if len(held) > _MAX_HELD_BYTES:
            kept.append(held)
            held = b""
        self._held = held
        return b"".join(kept)

    def rest(self) -> bytes:
        """The held bytes, once the stream has ended."""
        held, self._held = self._held, b""
        return held


def _reports_usage_only(event: bytes) -> bool:
    if _NO_CHOICES.search(event) is None:
        return False
    payload = sse.payload(event.replace(b"\r\n", b"\n").replace(b"\r", b"\n"))
    try:
        value = msgspec.json.decode(payload or b"")
    except DECODE_ERRORS:
        return False
    return isinstance(value, dict) and value.get("choices") == [] and bool(value.get("usage")) and "error" not in value
