"""A request while it lives: what arrived, and where it has got to."""

from __future__ import annotations

from enum import IntEnum
from typing import Any

from headway.core.request import Phase, Request

NEVER = float("nan")
"""A time that has not come. NaN, so that the record's columns need no second representation."""


class Stage(IntEnum):
    """Where a request is."""

    HELD = 0
    WAITING = 1
    PREFILLING = 2
    DECODING = 3
    ENDED = 4
    PAUSED = 5
    """Its KV cache is on the way to another replica."""


HELD, WAITING, PREFILLING, DECODING, ENDED, PAUSED = Stage
"""Under names of their own: reading a member from its enum takes as long as a dozen other steps."""


class Live(Request, frozen=False, gc=False):  # type: ignore[misc]  # msgspec allows what dataclasses do not
    """What arrived, and its state. Satisfies `core.view.RequestView`; only control and the engines write to it.

    `generated_tokens` of a decoding request is as of the last time the engine synced it, which it does before
    any policy is asked about the request.
    """

    phase: Phase = Phase.ANSWERING
    generated_tokens: int = 0
    turn: int = 0
    attempt: int = 0
    preemptions: int = 0
    replica: int = -1
    stage_index: int = -1
    """Which model of a cascade it is with; -1: none."""
    score: float = NEVER
    """What the judge gave the last answer."""
    decode: int = -1
    """Where it goes after its prefill; -1: nowhere else."""
    sent_to: str = ""
    """The region that it was let go for; "": any."""
    stage: Stage = HELD
    placed_s: float = NEVER
    admitted_s: float = NEVER
    first_token_s: float = NEVER
    answer_s: float = NEVER
    reasoning_end_s: float = NEVER
    moves: int = 0
    cancelled_s: float = NEVER
    cached_tokens: int = 0
    """Prompt tokens that a prefix cache served at the first admission."""

    # The stay in the present batch, the engine's to keep.
    enqueued_s: float = NEVER
    ready_s: float = NEVER
    """When the engine's scheduler can see it."""
    response_s: float = 0.0
    """From the end of an iteration to the client."""
    stay_admitted_s: float = NEVER
    prefill_end_s: float = NEVER
    target_tokens: int = 0
    """KV tokens to have before decoding (again): the prompt, and what was generated before a preemption."""
    computed_tokens: int = 0
    """KV tokens computed when prefilling; when decoding, those at `joined_tick`."""
    swapped_tokens: int = 0
    """KV tokens of a waiting request that are kept: in host memory, or in `resident_blocks`; 0 = none."""
    resident_blocks: int = 0
    """GPU blocks that a waiting request holds."""
    queue: int = 0
    """Which of the ordering's queues it stands in."""
    pace: int = 0
    """Counts the changes of what is noted of its reader (`sim.pace`)."""
    move: Any = None
    """The driver's, while the request is being moved."""
    shared_blocks: int = 0
    """Leading KV blocks held through the prefix cache."""
    joined_tick: int = 0
    joined_generated: int = 0
    quantum_tick: int = 0
    milestone: int = -1
    """Tick at which the engine looks at the request again; -1 = not decoding."""
    rank: object = None
    """The key under which it stands in a queue."""

    @property
    def answer_tokens(self) -> int:
        """Answering tokens so far."""
        return max(self.generated_tokens - self.reasoning_tokens, 0)

    # What a migration policy sees besides (`core.view.PlacedRequestView`).

    @property
    def is_running(self) -> bool:
        """It decodes."""
        return self.stage is DECODING

    @property
    def is_waiting(self) -> bool:
        """It waits at its replica."""
        return self.stage is WAITING

    @property
    def has_kv(self) -> bool:
        """Its KV cache is at its replica."""
        return self.stage is not WAITING or self.swapped_tokens > 0

    @property
    def is_moving(self) -> bool:
        """A move is under way."""
        return self.move is not None
