"""The state of a request while it is in the system."""

from __future__ import annotations

import hashlib
from enum import IntEnum
from typing import Any, Final

from headway.core.request import Phase, Segment

NEVER: Final = float("nan")
"""The time of an event that has not happened: NaN, as in the columns of the record."""


class Stage(IntEnum):
    """The stage of a request's life."""

    HELD = 0
    """The request is not at a replica: it is in a hold queue, held by an admission policy, or waiting for a judge."""
    WAITING = 1
    """The request is in a replica's queue."""
    PREFILLING = 2
    DECODING = 3
    ENDED = 4
    PAUSED = 5
    """Removed from the batch while its KV cache is copied to another replica."""


# Module-level names: reading a member from its enum class takes as long as a dozen other steps.
_ANSWERING: Final = Phase.ANSWERING
HELD: Final[Stage] = Stage.HELD
WAITING: Final[Stage] = Stage.WAITING
PREFILLING: Final[Stage] = Stage.PREFILLING
DECODING: Final[Stage] = Stage.DECODING
ENDED: Final[Stage] = Stage.ENDED
PAUSED: Final[Stage] = Stage.PAUSED


class Live:
    """A request and its state. Implements `core.view.RequestView` and `core.view.PlacedRequestView`.

    The fields form three sections, each with one owner: the request as it arrived (`core.request.Request`; constant,
    except that a cascade or a fallback assigns the model), control, and the driver (the simulated engine or the
    gateway). In the simulator, `generated_tokens` of a decoding request is the value at the last sync; the replica
    syncs before it calls any policy.

    The parameters are the fields of `Request`, in its order, so a workload row creates an instance. All fields are
    declared here because a compiled class is fast only for declared fields.
    """

    __slots__ = (
        "acceptance", "admitted_s", "allowed", "answer_s", "arrival_s", "attempt", "cached_tokens",
        "cancelled_s", "check_slot", "check_tick", "computed_tokens", "deadline_s", "decode_replica", "enqueued_s",
        "expected_cached_tokens", "fallback", "first_token_s", "generated_tokens", "id", "is_streamed",
        "joined_generated", "joined_tick", "keeps_model", "lengths", "lora", "model", "move", "moves",
        "num_before", "num_sequences", "output_id", "output_tokens", "pace_version", "phase", "placed_s",
        "preemptions", "prefill_end_s", "prefix", "prompt_tokens", "quality", "quantum_tick", "queue", "rank",
        "ready_s", "reasoning_end_s", "reasoning_tokens", "region", "release_region", "replica",
        "resident_blocks", "response_s", "scheduler", "score", "sent_to", "sent_tokens", "session_id",
        "shared_blocks", "shed_s", "slo_e2e_s", "slo_tpot_s", "slo_ttft_s", "stage", "stage_index",
        "stay_admitted_s", "swapped_tokens", "target_tokens", "tenant", "tier", "tier_since_s", "timeout_s",
        "turn", "turn_ends_at", "unstarted_tokens",
    )  # fmt: skip

    # Progress: the driver writes it; control and policies read it.

    phase: Phase
    stage: Stage
    generated_tokens: int
    num_sequences: int
    """Number of sequences of the answer. `generated_tokens` counts the tokens of all of them."""
    replica: int
    """Replica of the last placement; -1 = none yet."""
    turn: int
    preemptions: int
    admitted_s: float
    first_token_s: float
    answer_s: float
    reasoning_end_s: float
    cached_tokens: int
    """Prompt tokens reused from a prefix cache at the first admission."""

    # Control.

    scheduler: int
    """The scheduler that places the request, if there are several (`observe: schedulers`)."""
    attempt: int
    tier_since_s: float
    placed_s: float
    cancelled_s: float
    moves: int
    stage_index: int
    """Index of the current cascade stage; -1 = no cascade."""
    score: float
    """The judge's score of the last cascade answer, 0 to 100."""
    decode_replica: int
    """The replica that decodes after the prefill; -1 = the prefill replica itself."""
    allowed: Any
    """Ids (a frozenset) of the replicas that the sender allows; None = all."""
    release_region: str
    """Region to which an admission policy released the request; "" = any."""
    rank: object
    """Sort key in its current queue."""
    fallback: Any
    """Why another model answers (`control.fallback.FellBack`); None = the requested model answers."""
    keeps_model: bool
    """Whether no other model can answer: the request is an embedding, or part of the answer has been sent."""
    shed_s: float
    """Seconds by which the expected TTFT exceeded the limit, so that the request was shed; 0 = not shed."""
    sent_to: Any
    """The prompt counter of the request's replica (`control.sent_prompts`), if the hold queue shares service."""
    sent_tokens: int
    """Prompt tokens counted at that replica."""
    unstarted_tokens: int
    """Prompt tokens counted as unstarted: as `sent_tokens` until the first token, then 0."""

    # The driver: the request at its current replica.

    move: Any
    """The driver's migration object, while the request moves."""
    is_streamed: bool
    """Whether the driver sees the first token when it is generated. Otherwise it sees the first token with the whole
    answer."""
    enqueued_s: float
    num_before: int
    """Number of requests that the replica received before this one."""
    ready_s: float
    """Earliest time at which the engine's scheduler sees the request."""
    expected_cached_tokens: int
    """Tokens that the router expected in the replica's prefix cache; 0 once the prefill has started."""
    response_s: float
    """Delay from the end of an iteration until the client receives its tokens."""
    stay_admitted_s: float
    prefill_end_s: float
    target_tokens: int
    """KV tokens to compute before decoding: the prompt, plus tokens generated before a preemption."""
    computed_tokens: int
    """KV tokens computed so far in prefill; during decoding, the value at `joined_tick`."""
    swapped_tokens: int
    """KV tokens of a waiting request kept in host memory or in `resident_blocks`; 0 = none."""
    resident_blocks: int
    """GPU blocks held by a waiting request."""
    shared_blocks: int
    """Leading KV blocks shared through the prefix cache."""
    queue: int
    """Index of the request's queue in the ordering (`QueuedOrdering`)."""
    pace_version: int
    """Number of changes of the reader's pace (`sim.stall_tracker`)."""
    joined_tick: int
    joined_generated: int
    quantum_tick: int
    turn_ends_at: int
    """Number of generated tokens at which the request's turn ends, from the ordering's `next_change_tokens`; 0 =
    never."""
    check_slot: int
    """The request's place in the replica's `Checks`; -1: none."""
    check_tick: int
    """Tick at which the replica next checks the request; -1 = not decoding."""

    def __init__(
        self,
        id: int,
        arrival_s: float,
        prompt_tokens: int,
        output_tokens: int,
        model: str = "",
        tier: int = 0,
        reasoning_tokens: int = 0,
        region: str = "",
        session_id: int | None = None,
        prefix: tuple[Segment, ...] = (),
        output_id: int | None = None,
        slo_ttft_s: float | None = None,
        slo_tpot_s: float | None = None,
        slo_e2e_s: float | None = None,
        deadline_s: float | None = None,
        timeout_s: float | None = None,
        quality: tuple[tuple[str, float], ...] = (),
        lengths: tuple[tuple[str, int], ...] = (),
        tenant: str = "",
        acceptance: float | None = None,
        lora: str = "",
    ) -> None:
        self.id, self.arrival_s, self.prompt_tokens, self.output_tokens = id, arrival_s, prompt_tokens, output_tokens
        self.model, self.tier, self.reasoning_tokens, self.region = model, tier, reasoning_tokens, region
        self.session_id, self.prefix, self.output_id = session_id, prefix, output_id
        self.slo_ttft_s, self.slo_tpot_s, self.slo_e2e_s = slo_ttft_s, slo_tpot_s, slo_e2e_s
        self.deadline_s, self.timeout_s = deadline_s, timeout_s
        self.quality, self.lengths, self.tenant, self.acceptance = quality, lengths, tenant, acceptance
        self.lora = lora
        self.phase = _ANSWERING
        self.stage = HELD
        self.admitted_s = self.first_token_s = self.answer_s = self.reasoning_end_s = self.placed_s = NEVER
        self.cancelled_s = self.score = self.enqueued_s = self.ready_s = self.stay_admitted_s = NEVER
        self.prefill_end_s = NEVER
        self.tier_since_s = arrival_s
        self.replica = self.stage_index = self.decode_replica = self.check_slot = self.check_tick = -1
        self.generated_tokens = self.turn = self.preemptions = self.cached_tokens = self.scheduler = self.attempt = 0
        self.moves = self.sent_tokens = self.unstarted_tokens = self.num_before = self.expected_cached_tokens = 0
        self.target_tokens = self.computed_tokens = self.swapped_tokens = self.resident_blocks = 0
        self.shared_blocks = self.queue = self.pace_version = self.joined_tick = self.joined_generated = 0
        self.quantum_tick = self.turn_ends_at = 0
        self.num_sequences = 1
        self.shed_s = self.response_s = 0.0
        self.release_region = ""
        self.allowed = self.rank = self.fallback = self.sent_to = self.move = None
        self.keeps_model = False
        self.is_streamed = True

    def name_kv_by_adapter(self) -> None:
        """Give the segments adapter-specific ids: each adapter has its own KV for the same prompt."""
        key = int.from_bytes(hashlib.sha1(self.lora.encode(), usedforsecurity=False).digest()[:8]) >> 1
        self.prefix = tuple(Segment(segment.id ^ key, segment.tokens) for segment in self.prefix)
        if self.output_id is not None:
            self.output_id ^= key

    def forget_after(self, end_s: float) -> None:
        """The client gave up at `end_s`: undo a later placement and later tokens."""
        if self.placed_s > end_s:
            self.placed_s = NEVER
        if self.first_token_s > end_s:
            self.first_token_s = NEVER
        if self.answer_s > end_s:
            self.answer_s = NEVER

    def take_lengths_of(self, model: str) -> None:
        """Use the output length of this model's answer, if the workload has one length per model."""
        for name, tokens in self.lengths:
            if name == model and tokens != self.output_tokens:
                # Later turns quote the workload's answer, not this model's answer.
                self.output_id = None
                reasoning = round(self.reasoning_tokens * tokens / self.output_tokens)
                self.output_tokens, self.reasoning_tokens = tokens, reasoning

    @property
    def answer_tokens(self) -> int:
        """Answer tokens (after the reasoning) generated so far."""
        return max(self.generated_tokens - self.reasoning_tokens, 0)

    @property
    def is_running(self) -> bool:
        return self.stage is DECODING

    @property
    def is_waiting(self) -> bool:
        """Whether the request waits at a replica."""
        return self.stage is WAITING

    @property
    def has_kv(self) -> bool:
        """Whether the request has KV cache at its replica."""
        return self.stage is not WAITING or self.swapped_tokens > 0

    @property
    def is_moving(self) -> bool:
        """Whether a move is in progress."""
        return self.move is not None
