"""Adds a request's rank to the engine's request, as a priority and as hints for Headway's own orderings. The hints are
in vLLM's `vllm_xargs`; their keys are those of `headway.vllm`.
"""

from __future__ import annotations

from typing import Any, Protocol

from headway.control.live import Live
from headway.gateway.upstream.engine import EngineEndpoint

_FIELD = "vllm_xargs"
_WAITED, _OUTPUT_TOKENS = "headway_waited_s", "headway_output_tokens"


class HintedRequest(Protocol):
    """The attributes of a client's request that are read."""

    @property
    def is_passthrough(self) -> bool: ...
    @property
    def slo_ttft_s(self) -> float | None: ...
    @property
    def slo_tpot_s(self) -> float | None: ...


def add_order(
    body: dict[str, Any],
    request: HintedRequest,
    live: Live,
    engine: EngineEndpoint,
    has_priority: bool,
    tokens: int,
    now: float,
) -> None:
    """Replace the client's `priority` in the body for an engine, and add the hints if it runs a Headway ordering.

    `tokens`: number of answer tokens that are part of the prompt, because the engine continues the answer.
    """
    body.pop("priority", None)
    if has_priority and engine.adapter.priority_sign is not None:
        body["priority"] = engine.adapter.priority_sign * live.tier
    if engine.engine_ordering and not request.is_passthrough:
        body[_FIELD] = _hints(body.get(_FIELD), request, live, tokens, now)


def _hints(from_client: object, request: HintedRequest, live: Live, tokens: int, now: float) -> dict[str, Any]:
    """Hints in seconds after the request's arrival, so that an engine ranks it like the gateway, also after a move.

    Keys that the client sends take precedence. Without a hint, the length is the body's `max_tokens`, from which
    `tokens` are already subtracted.
    """
    deadline_s = None if live.deadline_s is None else live.deadline_s - live.arrival_s
    promoted_s = None if live.tier_since_s == live.arrival_s else live.tier_since_s - live.arrival_s
    values = {
        "headway_deadline_s": deadline_s,
        "headway_promoted_s": promoted_s,
        "headway_slo_ttft_s": request.slo_ttft_s,
        "headway_slo_tpot_s": request.slo_tpot_s,
    }
    hints = {name: round(value, 6) for name, value in values.items() if value is not None}
    if isinstance(from_client, dict):
        hints |= from_client
    if tokens and type(length := hints.get(_OUTPUT_TOKENS)) is int:
        hints[_OUTPUT_TOKENS] = max(length - tokens, 0)
    hints[_WAITED] = round(max(now - live.arrival_s, 0.0), 6)
    return hints
