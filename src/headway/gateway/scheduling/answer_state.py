"""The state of an answer, besides its tokens, that only the process that relays the answer knows. This module is
separate from `in_flight.py`, because that module is compiled, and msgspec needs the annotations of the fields.
"""

from __future__ import annotations

from msgspec import Struct


class AnswerState(Struct, array_like=True, gc=False):
    """Part of a request in flight. Workers send it whole."""

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
