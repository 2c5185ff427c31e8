"""What arrives: one request, and the phases it goes through."""

from __future__ import annotations

from enum import IntEnum

from msgspec import Struct


class Phase(IntEnum):
    """What the tokens that a request is producing are for."""

    REASONING = 0
    ANSWERING = 1


class Segment(Struct, frozen=True, gc=False):
    """A run of prompt tokens with a content identity.

    Two requests whose leading segments have the same ids share those tokens, so that a prefix cache can serve
    them. An id stands for its tokens *and all before them*, as a chained block hash does.
    """

    id: int
    tokens: int


class Request(Struct, frozen=True, gc=False):
    """What arrives. `id` is the row in the workload's table.

    `output_tokens` and `reasoning_tokens` are the truth that only the run (and a policy marked `oracle`) knows:
    the request stops after `output_tokens`, of which the first `reasoning_tokens` are reasoning.
    `deadline_s` is absolute, as `arrival_s` is; SLOs are durations. `tier` 0 is the most urgent.
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
    """Identity of the output as a prefix segment of a later turn."""
    slo_ttft_s: float | None = None
    slo_tpot_s: float | None = None
    slo_e2e_s: float | None = None
    deadline_s: float | None = None
    timeout_s: float | None = None
    """The client gives up this long after arrival."""
    quality: tuple[tuple[str, float], ...] = ()
    """(model, score) pairs: what each model's answer to this request would be worth, 0 to 100."""
    lengths: tuple[tuple[str, int], ...] = ()
    """(model, output tokens) pairs: how long each model's answer would be, where that is not `output_tokens`."""
