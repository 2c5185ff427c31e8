"""A request in vLLM's scheduler as an ordering sees it.

A client or the gateway adds information to a request in `vllm_xargs`, which vLLM passes on as the sampling parameters'
`extra_args`. `HINTS` lists the keys. Times are seconds after the request's arrival at the gateway, which is
`headway_waited_s` before its arrival at the engine.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from math import isfinite
from typing import Any, Protocol, cast

from headway.core.request import Phase, Segment

HINTS: Mapping[str, type] = {
    "headway_tier": int,
    "headway_tenant": str,
    "headway_waited_s": float,
    "headway_promoted_s": float,
    "headway_deadline_s": float,
    "headway_slo_ttft_s": float,
    "headway_slo_tpot_s": float,
    "headway_slo_e2e_s": float,
    "headway_output_tokens": int,
    "headway_reasoning_tokens": int,
}
"""Possible keys of `extra_args`. The last two serve orderings that need the lengths."""


class VllmRequest(Protocol):
    """The attributes of a `vllm.v1.request.Request` that are read."""

    request_id: str
    arrival_time: float
    num_prompt_tokens: int
    max_tokens: int
    prompt_token_ids: list[int] | None
    priority: int
    lora_request: Any
    sampling_params: Any
    _output_token_ids: list[int]
    headway: EngineRequest
    """The scheduler's additional attribute."""


class EngineRequest:
    """Implements `core.view.OracleRequestView`. `ranking.Ranking` stores its position in it."""

    __slots__ = (
        "_end", "_output", "_prompt", "_reasoning_end", "_scanned", "_start", "arrival_s", "check_at", "deadline_s",
        "epoch", "id", "is_late", "key", "last_phase", "lora", "output_tokens", "prompt_tokens", "quantum_start",
        "queue", "reasoning_tokens", "slo_e2e_s", "slo_tpot_s", "slo_ttft_s", "tenant", "tier", "tier_since_s",
        "tokens_before", "turn", "turn_ends_at",
    )  # fmt: skip

    model = region = ""
    session_id: int | None = None
    prefix: tuple[Segment, ...] = ()
    quality: tuple[tuple[str, float], ...] = ()
    attempt = replica = 0

    def __init__(
        self,
        request: VllmRequest,
        reasoning_start: tuple[int, ...] = (),
        reasoning_end: tuple[int, ...] = (),
        on_bad: Callable[[str], None] = lambda text: None,
    ) -> None:
        """`on_bad` is called for unreadable hints; the request then goes on without them."""
        hints = _hints(request, on_bad)
        self.id = 0
        self._prompt, self._output = request.prompt_token_ids, request._output_token_ids
        self.arrival_s: float = request.arrival_time - hints.get("headway_waited_s", 0.0)
        self.prompt_tokens = request.num_prompt_tokens
        self.tier: int = hints.get("headway_tier", max(0, request.priority))
        self.tier_since_s: float = self.arrival_s + hints.get("headway_promoted_s", 0.0)
        self.tenant: str = hints.get("headway_tenant", "")
        self.lora: str = "" if request.lora_request is None else request.lora_request.lora_name
        after_s = hints.get("headway_deadline_s")
        self.deadline_s: float | None = None if after_s is None else self.arrival_s + after_s
        self.slo_ttft_s: float | None = hints.get("headway_slo_ttft_s")
        self.slo_tpot_s: float | None = hints.get("headway_slo_tpot_s")
        self.slo_e2e_s: float | None = hints.get("headway_slo_e2e_s")
        self.output_tokens: int = hints.get("headway_output_tokens", request.max_tokens)
        """The output tokens that the client states, otherwise the maximum that the request may generate."""
        self.reasoning_tokens: int = hints.get("headway_reasoning_tokens", 0)
        self._start, self._end = reasoning_start, reasoning_end
        self._reasoning_end: int | None = None
        """Output tokens up to the end of the reasoning; None if the end was not seen."""
        self._scanned = -1
        """Output tokens that were searched for the end of the reasoning; -1 if not even the prompt was searched."""
        # The ranking sets the following attributes.
        self.turn = self.queue = self.turn_ends_at = 0
        self.tokens_before = 0
        """Output tokens when the request last joined the queue."""
        self.check_at = 1
        """Output tokens at which the ranking examines the request next."""
        self.quantum_start = -1
        """Output tokens at which the current quantum began; -1 if the request has no token since its admission."""
        self.last_phase = Phase.REASONING
        self.key: tuple[Any, int] = (0, 0)
        self.epoch = -1
        self.is_late = False
        """Whether the request waits while some of its tokens are still being generated. Its rank then changes in the
        queue."""

    @property
    def generated_tokens(self) -> int:
        return len(self._output)

    @property
    def phase(self) -> Phase:
        if self._scanned < 0:
            self._scanned = 0
            if not self._end or _has_ended(self._prompt or [], self._start, self._end):
                self._reasoning_end = 0
        if self._reasoning_end is None:
            self._scan()
        return Phase.REASONING if self._reasoning_end is None else Phase.ANSWERING

    @property
    def answer_tokens(self) -> int:
        if self.phase is Phase.REASONING:
            return 0
        return self.generated_tokens - (self._reasoning_end or 0)

    def _scan(self) -> None:
        tokens, end = self._output, self._end
        num = len(tokens)
        for i in range(self._scanned, num):
            if tokens[i] == end[-1] and tuple(tokens[max(0, i + 1 - len(end)) : i + 1]) == end:
                self._reasoning_end = i + 1
                break
        self._scanned = num


def _has_ended(prompt: Sequence[int], start: tuple[int, ...], end: tuple[int, ...]) -> bool:
    """Whether a prompt both begins and ends the reasoning, as templates do for models that should not reason."""
    last_start, last_end = (start[-1] if start else None), end[-1]
    for i in range(len(prompt) - 1, -1, -1):
        if prompt[i] == last_end and tuple(prompt[max(0, i + 1 - len(end)) : i + 1]) == end:
            return True
        if prompt[i] == last_start and tuple(prompt[max(0, i + 1 - len(start)) : i + 1]) == start:
            return False
    return False


def _is_amount(value: object) -> bool:
    return type(value) in (int, float) and isfinite(cast(float, value)) and cast(float, value) >= 0


def _hints(request: VllmRequest, on_bad: Callable[[str], None]) -> dict[str, Any]:
    extra = getattr(request.sampling_params, "extra_args", None)
    if not extra:
        return {}
    found: dict[str, Any] = {}
    for key, value in extra.items():
        kind = HINTS.get(key)
        if kind is None:
            if key.startswith("headway_"):
                on_bad(f"request {request.request_id}: unknown {key!r}; expected one of: {', '.join(HINTS)}")
        elif kind is str and isinstance(value, str):
            found[key] = value
        elif kind is not str and _is_amount(value) and kind(value) == value:
            found[key] = kind(value)
        else:
            expected = {int: "a whole number of at least 0", float: "a number of at least 0", str: "a text"}[kind]
            on_bad(f"request {request.request_id}: {key}: expected {expected}, got {value!r}")
    return found
