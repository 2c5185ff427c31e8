"""One engine's stream on its way to the client: each read is split into events, metered, rewritten and written."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

from headway.gateway.relay.continuation import ResumedStream
from headway.gateway.relay.metering import ItlMeter, ResponseMeter
from headway.gateway.upstream import sse

_field_remover = cache(sse.FieldRemover)


class EngineStream:
    """One engine's stream: split into events, metered, rewritten for the client, and written."""

    def __init__(
        self,
        meter: ResponseMeter,
        itl: ItlMeter,
        resumed: ResumedStream | None,
        hidden_fields: tuple[str, ...],
        wants_usage: bool,
        write: Callable[[bytes], bool],
        pace: Callable[[bytes, int], bool] | None = None,
    ) -> None:
        """`write` writes events for the client, and returns False if no more must be read for now. `pace` does the
        same for an event with so many answering tokens, at their pace."""
        self._meter, self._itl, self._write = meter, itl, write
        self._resumed, self._hidden_fields, self._wants_usage = resumed, hidden_fields, wants_usage
        self._pace = pace
        self._remover = _field_remover(hidden_fields) if hidden_fields else None
        self._is_rewritten = resumed is not None or meter.hides_logprobs
        self._splitter = sse.EventSplitter()
        self.last_events = b""
        """Events of the last read, which go with the end of the response."""
        self.is_done = False
        """[DONE] has come."""
        self.is_too_long = False
        """The engine generates more than it may; nothing that has come since is passed on."""

    @property
    def has_ended(self) -> bool:
        """The stream may end here."""
        passthrough = self._meter.passthrough
        return self.is_done or (passthrough is not None and passthrough.has_ended)

    def feed(self, data: bytes) -> bool:
        """Split, meter, rewrite and write what one read brought. False: read no more for now.

        EngineError for an invalid event or a reported error.
        """
        output: list[bytes] = []
        may_read = True
        try:
            for event in self._splitter.split(data):
                payload, num_before = sse.payload(event), len(output)
                if payload is None:
                    output.append(event)
                elif payload == b"[DONE]":
                    self.is_done = True
                    output.append(sse.DONE)  # in the usual spelling
                    break  # nothing belongs to the answer any more
                elif self._meter.passthrough is not None:
                    self._meter.measure_passthrough(self._meter.passthrough, payload)
                    output.append(event)
                elif self._pace is not None:
                    may_read = self._write_paced(self._pace, payload)
                elif self._is_rewritten:
                    output += self._rewrite(payload)
                else:
                    chunk = sse.decode_chunk(payload)
                    self._meter.measure(chunk)
                    if (
                        self._remover is not None
                        and chunk.choices
                        and (rest := self._remover.remove(payload)) is not payload
                    ):
                        event = b"data: " + rest + b"\n\n"
                    if chunk.choices or chunk.usage is None or self._wants_usage:
                        output.append(event)
                if self._meter.is_beyond_limit:
                    self.is_too_long = True
                    del output[num_before:]
                    break
        finally:  # events before an invalid one have been metered, and are written
            self._itl.observe()
            if self.is_done:
                self.last_events = b"".join(output)
            elif output:
                may_read = self._write(b"".join(output))
        return may_read and not self.is_done and not self.is_too_long

    def _write_paced(self, pace: Callable[[bytes, int], bool], payload: bytes) -> bool:
        """Meter and rewrite an event, and write it at the pace of its tokens. False: read no more for now."""
        tokens = self._meter.answer_tokens
        events = self._rewrite(payload)
        if self._meter.is_beyond_limit:
            return True
        return all([pace(event, self._meter.answer_tokens - tokens) for event in events])

    def _rewrite(self, payload: bytes) -> list[bytes]:
        """Meter and rewrite an event of a resumed stream, or of one with log probabilities for the gateway only."""
        value = sse.decode_object(payload)
        chunk = sse.decode_chunk(value)
        if self._resumed is not None:
            self._resumed.convert(chunk)
        self._meter.measure(chunk)
        if not chunk.choices and chunk.usage is not None and not self._wants_usage:
            return []
        if self._resumed is not None and not self._resumed.rewrite(value):
            return []
        if chunk.choices:
            sse.remove_fields(self._hidden_fields, value)
        if self._meter.hides_logprobs:
            sse.remove_fields(("logprobs",), value)
        return [sse.encode_event(value)]
