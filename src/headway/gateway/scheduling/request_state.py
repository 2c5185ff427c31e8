"""What control and relay tell each other about a request, besides the fields of `Live`. Workers send both structs
whole.

This module is separate from `in_flight.py`, because that module is compiled, and msgspec needs the annotations of the
fields.
"""

from __future__ import annotations

from msgspec import Struct


class Assignment(Struct, array_like=True, frozen=True, gc=False):
    """How a request runs at its replica, as control decided."""

    is_prefill_only: bool = False
    """Whether the replica only computes the prompt, and another replica decodes."""
    has_stored_kv: bool = False
    """Whether the prefill replica stores the KV cache for the decode replica."""
    has_alternative: bool = False
    """Whether the model has other replicas, which may confirm a refusal."""
    has_fallback: bool = False
    """Whether another model may answer if this model's replicas cannot."""


class AnswerState(Struct, array_like=True, gc=False):
    """The state of an answer besides its tokens, as its relay observed."""

    is_unstreamed: bool = False
    """Whether all tokens came at once."""
    waits_for_client: bool = False
    """Whether the client reads slowly, so that the engine's answer is not read meanwhile."""
    continued_tokens: tuple[int, int] = (0, 0)
    """Prompt and output tokens with which continuing engines began: (recomputed tokens, tokens found in their KV caches
    or loaded)."""
    unread: dict[str, int] | None = None
    """Number of events and answers that were passed on without being read, by kind."""
    response_id: str | None = None
    """Id of an answer of /v1/responses, which its engine may store."""
    longest_gap_s: float = 0.0
    """The longest time between two reads with tokens in one replica's stream."""
    resumed_s: float | None = None
    """Time of the current replica's first token, for an answer that another replica began; None if there is none."""
