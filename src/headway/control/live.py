"""The state of a request while it is in the system."""

from __future__ import annotations

import hashlib
from enum import IntEnum
from typing import Any

from headway.core.request import Phase, Request, Segment

NEVER = float("nan")
"""A time of an event that has not happened: NaN, as in the record's columns."""


class Stage(IntEnum):
    """The stage of a request's life."""

    HELD = 0
    """In front of the replicas: in a hold queue, held by an admission policy, or waiting for a judge."""
    WAITING = 1
    """At a replica, in its queue."""
    PREFILLING = 2
    DECODING = 3
    ENDED = 4
    PAUSED = 5
    """Out of its batch while its KV cache is copied to another replica."""


HELD, WAITING, PREFILLING, DECODING, ENDED, PAUSED = Stage
"""Module-level names: reading a member from its enum class takes as long as a dozen other steps."""


class Live(Request, frozen=False, gc=False):  # type: ignore[misc]  # msgspec allows what dataclasses do not
    """A request and its state. Satisfies `core.view.RequestView` and `core.view.PlacedRequestView`.

    The fields form three sections, each with one owner: `Request` (what arrived: constant, except that a
    cascade assigns a model), control's, and the driver's (the simulated engine, or the gateway).
    `generated_tokens` of a request that decodes in the simulator is as of the last sync, which the replica does
    before it calls any policy.
    """

    # Progress: written by the driver, read by control and by policies.

    phase: Phase = Phase.ANSWERING
    stage: Stage = HELD
    """Change it with `enter`."""
    generated_tokens: int = 0
    replica: int = -1
    """Replica of the last placement; -1 = none yet."""
    turn: int = 0
    preemptions: int = 0
    admitted_s: float = NEVER
    first_token_s: float = NEVER
    answer_s: float = NEVER
    reasoning_end_s: float = NEVER
    cached_tokens: int = 0
    """Prompt tokens that a prefix cache served at the first admission."""

    # Control.

    attempt: int = 0
    placed_s: float = NEVER
    cancelled_s: float = NEVER
    moves: int = 0
    stage_index: int = -1
    """Index of the cascade stage that answers; -1 = no cascade."""
    score: float = NEVER
    """The judge's score of the last cascade stage's answer, 0 to 100."""
    decode_replica: int = -1
    """Replica that decodes after the prefill; -1 = the one that prefills."""
    release_region: str = ""
    """Region that an admission policy released the request to; "" = any."""
    sent_to: Any = None
    """What the request's replica was sent (`control.sent_prompts`), where the hold queue shares service."""
    sent_tokens: int = 0
    """Prompt tokens that are counted there."""
    unstarted_tokens: int = 0
    """The same until the first token is out, then 0."""
    rank: object = None
    """Sort key in the queue that the request is in."""

    # The driver: the request's stay at its present replica.

    move: Any = None
    """The driver's migration object while the request is being moved."""
    is_streamed: bool = True
    """Whether the driver sees the first token when it is out, and not with the whole answer."""
    enqueued_s: float = NEVER
    num_before: int = 0
    """Requests that the replica had received before this one."""
    ready_s: float = NEVER
    """Earliest time at which the engine's scheduler sees the request."""
    response_s: float = 0.0
    """Delay from the end of an iteration until the client has its tokens."""
    stay_admitted_s: float = NEVER
    prefill_end_s: float = NEVER
    target_tokens: int = 0
    """KV tokens to compute before decoding: the prompt, plus the tokens generated before a preemption."""
    computed_tokens: int = 0
    """KV tokens computed so far in prefill; while decoding, those at `joined_tick`."""
    swapped_tokens: int = 0
    """KV tokens of a waiting request that are kept, in host memory or in `resident_blocks`; 0 = none."""
    resident_blocks: int = 0
    """GPU blocks that a waiting request holds."""
    shared_blocks: int = 0
    """Leading KV blocks held through the prefix cache."""
    queue: int = 0
    """Index of the ordering's queue (`QueuedOrdering`)."""
    pace_version: int = 0
    """Number of changes of the reader's pace (`sim.stall_tracker`)."""
    joined_tick: int = 0
    joined_generated: int = 0
    quantum_tick: int = 0
    turn_ends_at: int = 0
    """Generated tokens with which the request's turn ends, by its ordering's `next_change_tokens`; 0 = never."""
    check_tick: int = -1
    """Tick at which the replica checks the request next; -1 = not decoding."""

    def enter(self, stage: Stage) -> None:
        """Change the stage: the only place that does."""
        self.stage = stage

    def name_kv_by_adapter(self) -> None:
        """Give the segments ids of the adapter's own: the KV of a prompt differs from adapter to adapter."""
        key = int.from_bytes(hashlib.sha1(self.lora.encode(), usedforsecurity=False).digest()[:8]) >> 1
        self.prefix = tuple(Segment(segment.id ^ key, segment.tokens) for segment in self.prefix)  # type: ignore[misc]
        if self.output_id is not None:
            self.output_id ^= key  # type: ignore[misc]

    @property
    def answer_tokens(self) -> int:
        """Answering tokens generated so far."""
        return max(self.generated_tokens - self.reasoning_tokens, 0)

    @property
    def is_running(self) -> bool:
        return self.stage is DECODING

    @property
    def is_waiting(self) -> bool:
        """Whether the request waits at its replica."""
        return self.stage is WAITING

    @property
    def has_kv(self) -> bool:
        """Whether the request has a KV cache at its replica."""
        return self.stage is not WAITING or self.swapped_tokens > 0

    @property
    def is_moving(self) -> bool:
        """Whether a move of the request is under way."""
        return self.move is not None
