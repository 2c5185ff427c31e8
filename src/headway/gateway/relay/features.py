"""The features of a request that control reads, which workers send by msgspec.

Separate from `request.py`, because that module is compiled, and msgspec needs the annotations of the fields.
"""

from __future__ import annotations

from msgspec import Struct

from headway.core.request import Segment


class CostFeatures(Struct, frozen=True, array_like=True, gc=False):
    """The possible cost of a request, apart from its prompt's text."""

    max_tokens: int = 0
    """Limit of one sequence's tokens: the limit from any of the fields that engines know, including a reasoning budget;
    0: no limit."""
    num_sequences: int = 1
    num_chars: int = 0
    """Characters of the body outside of the prompt's text: tools, schemas, tool calls."""
    num_tokens: int = 0
    """Prompt tokens outside of the prompt's text: the maximum for images, audio and files, and the number of token ids
    in lists."""
    echoes: bool = False


NO_COST = CostFeatures()


class Features(Struct, array_like=True, gc=False):
    """The features of a request that control reads: everything but its text."""

    arrival_s: float
    """Time of arrival, on the clock of the process that received the request."""
    model: str
    is_passthrough: bool
    num_chars: int
    """Characters of the prompt's text."""
    prompt_tokens: int | None
    """Set if the prompt was given as token ids, or an engine has counted it."""
    max_tokens: int | None
    tier: int
    region: str
    session_id: int | None
    prefix: tuple[Segment, ...]
    slo_ttft_s: float | None
    slo_tpot_s: float | None
    has_media: bool = False
    """Whether the prompt may have tokens outside of its text."""
    keeps_model: bool = False
    """Whether the answer is meaningful only together with answers of the same model."""
    is_flex: bool = False
    """Whether the service tier is `flex`: the request may then wait until a deadline."""
    cost: CostFeatures = NO_COST
    response_id: str | None = None
    """The id of the earlier response that the request continues. The engine that made the response stores it."""
    num_sequences: int = 1
    """Number of sequences of the answer."""
