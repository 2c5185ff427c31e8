"""One replica's stream, event by event: what is counted, and what the client gets of it."""

from __future__ import annotations

from headway.gateway.relay.continuation import ResumedStream, without
from headway.gateway.relay.metering import ItlMeter, ResponseMeter
from headway.gateway.upstream import sse


class Stream:
    """From the first event to the last. `told` is what the client is to get next."""

    def __init__(
        self,
        listener: ResponseMeter,
        pace: ItlMeter,
        continued: ResumedStream | None,
        hides: tuple[str, ...],
        wants_usage: bool,
    ) -> None:
        self._listener, self._pace, self._continued = listener, pace, continued
        self._hides = tuple(name.encode() for name in hides)
        self._names, self._wants_usage = hides, wants_usage
        self._events = sse.EventSplitter()
        self.told: list[bytes] = []
        self.is_done = False
        """The last event has come."""

    @property
    def is_over(self) -> bool:
        """It may end here."""
        opaque = self._listener.opaque
        return self.is_done or (opaque is not None and opaque.is_over)

    def feed(self, data: bytes) -> None:
        """Some more of it. EngineError where it is no stream of completions, or tells of a mistake."""
        try:
            for event in self._events.split(data):
                if told := self._hear(event):
                    self.told.append(told)
        finally:
            self._pace.heard()

    def take(self) -> bytes:
        """What there is to tell, which is told then."""
        told, self.told = self.told, []
        return told[0] if len(told) == 1 else b"".join(told)

    def _hear(self, event: bytes) -> bytes | None:
        """Take note of an event; what the client gets of it."""
        payload, listener = sse.payload(event), self._listener
        if payload is None:
            return event
        if payload == b"[DONE]":
            self.is_done = True
            return sse.DONE  # however it was written
        if listener.opaque is not None:
            listener.passed(listener.opaque, payload)
            return event
        chunk = sse.decode_chunk(payload)
        chunk.check()
        if self._continued is not None:
            self._continued.read(chunk)
        listener.chunk(chunk)
        if not chunk.choices and chunk.usage is not None and not self._wants_usage:
            return None
        changed: bytes | None = payload
        if self._continued is not None:
            changed = self._continued.event(payload)
        if changed is not None and chunk.choices and any(name in changed for name in self._hides):
            changed = without(self._names, changed)
        if changed is not None and listener.hides_logprobs:
            changed = without(("logprobs",), changed)
        return event if changed is payload else changed and b"data: " + changed + b"\n\n"
