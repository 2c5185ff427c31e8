"""Takes the report of a stream's tokens out of it, byte for byte as it is else."""

from __future__ import annotations

import re

import msgspec

from headway.gateway.errors import DECODE_ERRORS
from headway.gateway.upstream import sse

_BLANK_LINE = re.compile(rb"\r\n\r\n|\n\n|\r\r|\n\r\n|\r\n\n")
"""Ends of events, however their lines end."""
_NO_CHOICES = re.compile(rb'"choices"\s*:\s*\[\s*\]')
_MAX_HELD_BYTES = 1 << 20
"""Longer beginnings of events are passed on: they report no tokens."""


class UsageHider:
    """What of a stream of events is passed on: all of it but events that report tokens and nothing else.

    The beginning of an event is held until its end shows what it is; `rest` has it where the stream ends within it.
    """

    def __init__(self) -> None:
        self._held = b""

    def feed(self, data: bytes) -> bytes:
        """What is to be passed on, now that `data` has come."""
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
        """What is held, as nothing follows."""
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
