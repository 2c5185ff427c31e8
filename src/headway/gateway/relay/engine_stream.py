"""One engine's stream on its way to the client: each read is split into events, counted, rewritten and written."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from time import monotonic
from typing import Final

from headway.gateway.relay.engine_request import EngineRequest
from headway.gateway.relay.partial_answer import PartialAnswer
from headway.gateway.relay.passthrough import Passthrough
from headway.gateway.scheduling.in_flight import InFlightRequest
from headway.gateway.scheduling.scheduler import Scheduler
from headway.gateway.upstream import sse
from headway.gateway.upstream.errors import EngineError

_MAX_KEPT = 16
"""Maximum number of events without tokens that are held back. Then all events are sent to the client."""
_MAX_TRIED: Final = 4
"""Maximum number of pieces of a read that are split one by one until an event is learnt."""
_field_remover = cache(sse.FieldRemover)


class EngineStream:
    """One engine's stream: split into events, counted, rewritten for the client, and written."""

    def __init__(
        self,
        partial: PartialAnswer,
        in_flight: InFlightRequest,
        scheduler: Scheduler,
        sent: EngineRequest | None,
        wants_usage: bool,
        write: Callable[[bytes], bool],
        pace: Callable[[bytes, int], bool] | None = None,
        has_begun: bool = False,
    ) -> None:
        """`sent`: the request, if this gateway has built it. `write` writes events for the client, and returns False
        if reading must pause. `pace` does the same for an event with a number of answer tokens, at their pace.
        `has_begun`: the client has received events."""
        self._partial, self._write, self._wants_usage = partial, write, wants_usage
        self._resumed = resumed = None if sent is None else sent.resumed
        self._hidden_fields = hidden_fields = () if sent is None else sent.hidden_fields
        self._pace = pace
        self._in_flight, self._live, self._scheduler = in_flight, in_flight.live, scheduler
        self._phase, self._histogram = in_flight.live.phase, scheduler.metrics.inter_token(in_flight)
        self._tokens, self._last_s = in_flight.live.generated_tokens, 0.0
        """(tokens, time) of the last read with tokens."""
        self._remover = _field_remover(hidden_fields) if hidden_fields else None
        self._is_rewritten = resumed is not None or partial.hides_logprobs
        self._splitter = sse.EventSplitter()
        is_plain = not self._is_rewritten and pace is None and partial.passthrough is None
        self._is_plain = is_plain
        """Whether events are passed on unchanged, except for hidden fields."""
        self._repeated = sse.RepeatedEvent() if is_plain and partial.takes_texts else None
        """The recogniser of repeated events; None if each event is decoded."""
        self._may_read = True
        """Whether the client reads as fast as the engine generates."""
        self._num_unlike = 0
        """Number of events since the last learnt event that differ from it."""
        self._kept: list[bytes] | None = None if has_begun else []
        """Events before the first token. They are held back, because the engine may still refuse the request. None once
        the engine has begun to answer."""
        self.last_events = b""
        """Events of the last read, which are sent with the end of the response."""
        self.is_done = False
        """Whether [DONE] has come."""
        self.is_too_long = False
        """Whether the engine generates more than allowed. Later data is not passed on."""
        self.error: EngineError | None = None
        """The error with which the engine ended its answer, passed on unchanged."""

    def has_ended(self, num_choices: int) -> bool:
        """Whether the answer is complete although the stream ended without [DONE]."""
        passthrough = self._partial.passthrough
        if passthrough is not None:
            return passthrough.has_ended or self.error is not None
        return self.is_done or self._partial.num_finished >= num_choices

    def end(self) -> None:
        """Handle the end of the stream: read the last event if only its blank line is missing."""
        output: list[bytes] = []
        self._may_read = True
        try:
            self._take(self._splitter.take_rest(), output, is_end=True)
        finally:
            self._finish_read(output, is_end=True)

    def feed(self, parts: list[bytes]) -> bool:
        """Split, count, rewrite and write the data of one read, in pieces of any length. False: pause reading.

        Raises EngineError for a reported error.
        """
        output: list[bytes] = []
        repeated, num, index, is_open, self._may_read = self._repeated, len(parts), 0, True, True
        try:
            while is_open and repeated is not None and not repeated.is_set and index < min(num, _MAX_TRIED):
                is_open = self._take(self._splitter.split(parts[index]), output)
                index += 1
            if is_open and index < num and repeated is not None and repeated.is_set and not self._splitter.has_rest:
                index += self._pass_repeated(repeated, parts, index, output)
            if is_open and index < num:
                rest = parts[index] if index == num - 1 else b"".join(parts[index:])
                self._take(self._splitter.split(rest), output)
        finally:  # events before an error are counted and written
            self._finish_read(output)
        return self._may_read and not self.is_done and not self.is_too_long

    def _pass_repeated(self, repeated: sse.RepeatedEvent, parts: list[bytes], start: int, output: list[bytes]) -> int:
        """Count the parts from `start` on that are repeated events, and pass them on. Returns their number; 0 if one of
        them must be handled by itself."""
        num, whole, text, last = repeated.texts_of(parts, start)
        if not text or not self._partial.measure_texts(text, last, num):
            return 0
        output.append(whole)
        return num

    def _take(self, events: list[bytes], output: list[bytes], is_end: bool = False) -> bool:
        """Handle these events of the stream, and add their data for the client. False if later events do not belong to
        the answer."""
        partial, repeated = self._partial, self._repeated
        for event in events:
            num_before = len(output)
            if repeated is not None and repeated.is_set and (text := repeated.text_of(event)):
                partial.measure_text(text)
                output.append(event)
            elif not self._take_event(event, output, is_end):
                return False
            if partial.is_beyond_limit:
                self.is_too_long = True
                del output[num_before:]
                self._forget_end(event)
                return False
        return True

    def _finish_read(self, output: list[bytes], is_end: bool = False) -> None:
        self._observe_gap()
        self._write_out(output, is_end)

    def _observe_gap(self) -> None:
        """Observe the inter-token latencies of a read. Its tokens count as evenly spread over the time since the
        previous read, in each of the answer's sequences; the tokens of the first read count as simultaneous."""
        live = self._live
        tokens = live.generated_tokens - self._tokens
        if tokens <= 0:
            return
        now = monotonic()
        if live.phase is not self._phase:
            self._phase, self._histogram = live.phase, self._scheduler.metrics.inter_token(self._in_flight)
        if self._last_s:
            gap_s = now - self._last_s
            self._histogram.observe(gap_s * live.num_sequences / tokens, tokens)
            if gap_s > self._in_flight.answer.longest_gap_s:
                self._in_flight.answer.longest_gap_s = gap_s
        else:
            if tokens > 1:
                self._histogram.observe(0.0, tokens - 1)
            if self._tokens:
                self._in_flight.answer.resumed_s = self._scheduler.clock.now
        self._tokens, self._last_s = live.generated_tokens, now

    def _take_event(self, event: bytes, output: list[bytes], is_end: bool) -> bool:
        """Count an event's tokens, and rewrite the event for the client. False if it is the last event, or cut off."""
        payload, passthrough = sse.payload(event), self._partial.passthrough
        if payload is None:
            output.append(event)
            if self._kept is not None and event.startswith(b":"):  # a comment that keeps the connection alive
                self._begin(output)
            return True
        if len(payload) < sse.MAX_DONE_BYTES and sse.is_done(payload):
            self.is_done = True
            output.append(sse.DONE)  # in the usual spelling
            return False
        if is_end and not sse.is_json(payload):
            return False
        is_framed = len(event) - len(payload) == sse.FRAME_BYTES
        error = None if is_framed else sse.error_of_event(event, payload)
        if error is not None:
            if not self._reports(error, event, output):
                raise error
        elif self._is_plain:
            self._pass_plain(event, payload, output)
        elif passthrough is not None:
            self._pass_on(passthrough, event, payload, output)
        elif self._pace is not None:
            self._may_read = self._write_paced(self._pace, event, payload)
        else:
            output += self._rewrite(event, payload)
        return True

    def _pass_plain(self, event: bytes, payload: bytes, output: list[bytes]) -> None:
        """Count an event's tokens and pass the event on unchanged, except for hidden fields. Most events are handled
        here."""
        chunk, unread = sse.read_chunk(payload)
        if unread:
            self._partial.note_unread(unread)
        self._partial.measure(chunk)
        if not chunk.choices and chunk.usage is not None and not self._wants_usage:
            return  # only the gateway had asked for this event
        if chunk.choices:
            if self._remover is not None and (rest := self._remover.remove(payload)) is not payload:
                event = b"data: " + rest + b"\n\n"
            elif self._repeated is not None and not unread:
                self._num_unlike += 1  # the more the events differ, the more rarely one of them is learnt
                if self._num_unlike & (self._num_unlike - 1) == 0 and self._repeated.learn(event, chunk):
                    self._num_unlike = 0
        output.append(event)

    def _forget_end(self, event: bytes) -> None:
        """Ignore an end in this event, because the client does not get the event."""
        payload = sse.payload(event)
        if payload is not None and self._partial.passthrough is None:
            self._partial.forget_end(sse.read_chunk(payload)[0])

    def _write_out(self, output: list[bytes], is_end: bool) -> None:
        """Write the events of a read. Keep events while the engine has not begun to answer, and keep the last events
        for the end of the response."""
        kept, partial = self._kept, self._partial
        if kept is not None:
            kept += output
            is_answer = partial.passthrough is None and (partial.has_progress or len(kept) > _MAX_KEPT)
            if is_answer or self.is_done or is_end:
                output, self._kept = kept, None
            else:
                return
        if self.is_done or is_end:
            self.last_events += b"".join(output)
        elif output:
            self._may_read = self._write(b"".join(output))

    def _begin(self, output: list[bytes]) -> None:
        """The engine has begun to answer: write the kept events first."""
        if self._kept is not None:
            output[:0] = self._kept
            self._kept = None

    def _reports(self, error: EngineError, event: bytes, output: list[bytes]) -> bool:
        """Whether the client gets an error event unchanged; otherwise the caller raises the error."""
        if self._partial.passthrough is None or self._kept is not None:
            return False
        self.error = error
        output.append(event)
        return True

    def _pass_on(self, passthrough: Passthrough, event: bytes, payload: bytes, output: list[bytes]) -> None:
        """Count the tokens of an event in an answer that is passed on unchanged."""
        self._partial.measure_passthrough(passthrough, payload)
        if passthrough.error is not None:
            error = passthrough.error
            if not self._reports(error, event, output):
                raise error
            return
        output.append(event)
        if self._kept is not None and not passthrough.is_first:
            self._begin(output)

    def _write_paced(self, pace: Callable[[bytes, int], bool], event: bytes, payload: bytes) -> bool:
        """Count and rewrite an event, and write it at the pace of its tokens. False: pause reading."""
        tokens = self._partial.answer_tokens
        events = self._rewrite(event, payload)
        if self._partial.is_beyond_limit:
            return True
        if self._kept is not None:
            if not self._partial.has_progress:
                self._kept += events
                return True
            self._begin(events)
        new, may_read = self._partial.answer_tokens - tokens, True
        for each in events[:-1]:
            may_read &= pace(each, 0)
        return (pace(events[-1], new) if events else True) and may_read

    def _rewrite(self, event: bytes, payload: bytes) -> list[bytes]:
        """Count and rewrite an event of a resumed stream, or of a stream with log probabilities that only the gateway
        requested."""
        value = sse.decoded(payload)
        chunk, unread = sse.chunk_in(value)
        if unread:
            self._partial.note_unread(unread)
        if not isinstance(value, dict):
            return [event]
        if self._resumed is not None:
            self._resumed.convert(chunk)
        self._partial.measure(chunk)
        if not chunk.choices and chunk.usage is not None and not self._wants_usage:
            return []
        if self._resumed is not None and not self._resumed.rewrite(value):
            return []
        if chunk.choices:
            sse.remove_fields(self._hidden_fields, value)
        if self._partial.hides_logprobs:
            sse.remove_fields(("logprobs",), value)
        return [sse.encode_event(value)]
