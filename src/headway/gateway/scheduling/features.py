"""What control is told of a request: all that it goes by, and none of the text."""

from __future__ import annotations

from msgspec import Struct

from headway.core.request import Segment
from headway.gateway.relay.request import ClientRequest


class Features(Struct, array_like=True, gc=False):
    """One request's."""

    arrival_s: float
    """As its process saw it."""
    model: str
    is_opaque: bool
    num_chars: int
    """Of the prompt, as far as it is text."""
    prompt_tokens: int | None
    """Where it was given as token ids."""
    max_tokens: int | None
    tier: int
    region: str
    session_id: int | None
    prefix: tuple[Segment, ...]
    slo_ttft_s: float | None
    slo_tpot_s: float | None


def features(ask: ClientRequest, arrival_s: float) -> Features:
    """Of what a client asks for."""
    return Features(
        arrival_s, ask.model, ask.is_opaque, len(ask.text), None if ask.prompt_ids is None else len(ask.prompt_ids),
        ask.max_tokens, ask.tier, ask.region, ask.session_id(), ask.prefix(), ask.slo_ttft_s, ask.slo_tpot_s,
    )  # fmt: skip
