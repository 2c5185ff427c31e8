"""A request as it arrives, and its phases."""

from __future__ import annotations

from enum import IntEnum

from msgspec import Struct


class Phase(IntEnum):
    """The use of the tokens that a request currently generates: reasoning or answer."""

    REASONING = 0
    ANSWERING = 1


class Segment(Struct, frozen=True, gc=False):
    """A run of prompt tokens with a content identity. Requests whose leading segments have equal ids share these
    tokens, so a prefix cache can serve the tokens. An id identifies the segment's tokens *and all tokens before the
    segment*, as a chained block hash does.
    """

    id: int
    tokens: int


class Request(Struct, frozen=True, gc=False):
    """A request as it arrives. `id` is its row in the workload's table.

    Only the run and policies marked `oracle` know `output_tokens` and `reasoning_tokens`: the request stops after
    `output_tokens`, the first `reasoning_tokens` of which are reasoning. `arrival_s` and `deadline_s` are seconds since
    the start of the run; SLOs are durations. `tier` 0 is the most urgent.
    """

    id: int
    arrival_s: float
    prompt_tokens: int
    output_tokens: int
    model: str = ""
    tier: int = 0
    reasoning_tokens: int = 0
    region: str = ""
    session_id: int | None = None
    prefix: tuple[Segment, ...] = ()
    output_id: int | None = None
    """Segment id of the output in a later turn's prompt; None: no later turn contains it."""
    slo_ttft_s: float | None = None
    slo_tpot_s: float | None = None
    slo_e2e_s: float | None = None
    deadline_s: float | None = None
    timeout_s: float | None = None
    """Time from arrival until the client gives up; None: never."""
    quality: tuple[tuple[str, float], ...] = ()
    """(model, score) pairs: the quality of each model's answer, 0 to 100."""
    lengths: tuple[tuple[str, int], ...] = ()
    """(model, output tokens) pairs: the length of each model's answer, if not `output_tokens`."""
    tenant: str = ""
    """The sender: in a gateway, the name of its API key; "": unknown."""
    acceptance: float | None = None
    """Probability that a drafted token is accepted if all drafted tokens before it are; None: the engine's setting."""
    lora: str = ""
    """The LoRA adapter that answers; "": the base model."""
