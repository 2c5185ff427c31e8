"""What an engine says, as it is heard: tokens are counted, and phases told apart."""

from __future__ import annotations

from time import monotonic

from headway.control.live import DECODING, Live
from headway.core.request import Phase
from headway.gateway.relay.continuation import PartialResponse
from headway.gateway.relay.passthrough import Passthrough
from headway.gateway.relay.request import ClientRequest
from headway.gateway.scheduling.in_flight import InFlightRequest
from headway.gateway.scheduling.scheduler import Scheduler
from headway.gateway.scheduling.scorer import ConfidenceMeter
from headway.gateway.upstream import sse
from headway.gateway.upstream.errors import EngineError


class ResponseMeter:
    """To one model's answer, from however many of its replicas it comes."""

    def __init__(self, ask: ClientRequest, ticket: InFlightRequest, driver: Scheduler) -> None:
        self._ask, self._ticket, self._live, self._driver = ask, ticket, ticket.live, driver
        self.said = PartialResponse(ask)
        self.opaque = Passthrough() if ask.is_opaque else None
        self.confidence: ConfidenceMeter | None = driver.confidence_meter() if driver.needs_score(ticket.live) else None
        self.hides_logprobs = self.confidence is not None and not ask.body.get("logprobs")
        """Headway asked for them, and the client did not."""
        self.before = 0
        """Tokens that came from replicas before the present one."""
        self.prompt_tokens: int | None = None
        """As the engine counted them."""
        self._thinks = False
        """The answer's text began with <think>, and is not past its end."""

    def whole(self, data: bytes) -> None:
        """Tokens of a whole answer, which all came now."""
        live, now = self._live, self._driver.now
        live.first_token_s = live.answer_s = now
        self._ticket.is_unstreamed = True
        if self.opaque is not None:
            usage: tuple[int, int] | None = self.opaque.whole(data)
        else:
            usage = self._understand(data)
        if usage is not None:
            self.counted(usage[0])
            self._gain(usage[1])

    def _understand(self, data: bytes) -> tuple[int, int] | None:
        """Tokens read and written, by a whole answer of which Headway may want more."""
        try:
            chunk = sse.decode_chunk(data)
        except EngineError:
            return None
        chunk.check_finish()
        self.said.heard(chunk, 0)
        if self.confidence is not None:
            for choice in chunk.choices:
                self.confidence.observe(choice)
        return None if chunk.usage is None else (chunk.usage.prompt_tokens, chunk.usage.completion_tokens)

    def passed(self, opaque: Passthrough, payload: bytes) -> None:
        """Count what is passed on as it is."""
        tokens, reasons = opaque.hear(payload)
        if tokens:
            before = self._live.generated_tokens
            self._gain(tokens)
            self._phase(reasons, not reasons, before)
        if opaque.read_tokens:
            self.counted(opaque.read_tokens)
        if opaque.written_tokens:
            self._gain(opaque.written_tokens - self._live.generated_tokens)

    def chunk(self, chunk: sse.Chunk) -> None:
        """Count tokens, and see which phase they are of."""
        tokens, reasons, answers = 0, False, False
        for choice in chunk.choices:
            delta = choice.delta
            text = choice.text or (delta.content if delta is not None else None)
            thought = delta is not None and bool(delta.reasoning or delta.reasoning_content)
            called = delta is not None and delta.tool_calls is not None
            if self.confidence is not None:
                self.confidence.observe(choice)
            if choice.token_ids is not None:
                tokens += len(choice.token_ids)
            elif text or thought or called:
                tokens += 1
            if text:
                thought = self._is_thought(text) or thought
            reasons |= thought
            answers |= called or bool(text and not thought)
        if (
            chunk.timings is not None and chunk.timings.predicted_n
        ):  # tokens may have no text, and chunks several tokens
            tokens = max(self.before + chunk.timings.predicted_n - self._live.generated_tokens, 0)
        self.said.heard(chunk, tokens)
        if tokens:
            before = self._live.generated_tokens
            self._gain(tokens)
            self._phase(reasons, answers, before)
        if chunk.usage is not None:
            self.said.prompt_tokens = max(chunk.usage.prompt_tokens - self.before, 0)
            self.counted(self.said.prompt_tokens)
            self._gain(self.before + chunk.usage.completion_tokens - self._live.generated_tokens)

    def _is_thought(self, text: str) -> bool:
        """Text between <think> and </think>, from an engine that does not tell reasoning apart."""
        if not self.said.text and text.lstrip().startswith("<think>"):
            self._thinks = True
        thinks = self._thinks
        if thinks and "</think>" in "".join((*self.said.text[-8:], text)):
            self._thinks = False
        return thinks

    def counted(self, prompt_tokens: int) -> None:
        """The engine has counted the prompt."""
        if prompt_tokens > 0:
            self.prompt_tokens = prompt_tokens
            self._live.prompt_tokens = prompt_tokens  # type: ignore[misc]  # of a frozen base, thawed here

    def _gain(self, tokens: int) -> None:
        live, seat = self._live, self._ticket.reservation
        live.generated_tokens += tokens
        if seat is not None:
            seat.count_tokens(tokens)
        if live.first_token_s != live.first_token_s:
            live.first_token_s = self._driver.now
        if live.stage is not DECODING:
            live.enter(DECODING)
            self._ticket.can_move = self._ask.stream and self._ask.can_go_on

    def _phase(self, reasons: bool, answers: bool, before: int) -> None:
        """Reasoning begins with its first token; the answer with its own, and what came before was reasoning."""
        live, ticket = self._live, self._ticket
        if reasons and live.answer_s != live.answer_s:
            live.phase = Phase.REASONING
            _set_reasoning(live, live.generated_tokens)
        if answers and live.answer_s != live.answer_s:
            live.answer_s = self._driver.now
            reasoned, live.phase = live.reasoning_tokens > 0, Phase.ANSWERING
            if reasoned and not reasons:
                _set_reasoning(live, before)
            if reasoned:
                live.reasoning_end_s = live.answer_s
                self._driver.phase_changed(live)
        if ticket.reservation is not None:
            ticket.reservation.requeue()


class ItlMeter:
    """Times between tokens, while a stream comes from one replica. What one read brings is counted as evenly spread
    over the time since the last; of the first, it is one moment's."""

    def __init__(self, ticket: InFlightRequest, driver: Scheduler) -> None:
        self._ticket, self._live, self._driver = ticket, ticket.live, driver
        self._phase, self._gaps = ticket.live.phase, driver.itl_histogram(ticket)
        self._tokens, self._last_s = ticket.live.generated_tokens, 0.0

    def heard(self) -> None:
        """Some of the stream was read."""
        live = self._live
        tokens = live.generated_tokens - self._tokens
        if tokens <= 0:
            return
        now = monotonic()
        if live.phase is not self._phase:
            self._phase, self._gaps = live.phase, self._driver.itl_histogram(self._ticket)
        if self._last_s:
            self._gaps.observe((now - self._last_s) / tokens, tokens)
        elif tokens > 1:
            self._gaps.observe(0.0, tokens - 1)
        self._tokens, self._last_s = live.generated_tokens, now


def _set_reasoning(live: Live, tokens: int) -> None:
    """So many of its tokens were reasoning."""
    live.reasoning_tokens = tokens  # type: ignore[misc]  # of a frozen base, thawed here
