"""The records of a run, as columns: everything that metrics may read.

There are six tables. `requests`: one row per request, in order of ending. `segments`: one row per stay of a request in
a batch. `stretches`: one row per series of a replica's iterations with a constant batch. `moves`: one row per move of a
request between replicas. `drafts`: one row per iteration in which a request accepted drafted tokens. `replicas`: one
row per replica. Times are seconds since the start of the workload; NaN: the event never happened.

A *tick* is an iteration in which each decoding request of a replica gains a token; each replica numbers its ticks from
1. Tick `tick + k` of a stretch (k = 1..iterations) ends at `start_s + k*a_s + b_s*k*(k-1)/2`, as
`sim.timeline.boundary_s` rounds it. A segment with `joined_tick` j and `left_tick` l produced a token at each of the
ticks j+1..l, preceded by one at `prefill_end_s` unless that is NaN. With speculative decoding, `drafts` has the tokens
of a tick beyond the first.
"""

from __future__ import annotations

from enum import IntEnum
from typing import TYPE_CHECKING

from msgspec import Struct, field

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt
    import pyarrow as pa

Columns = dict[str, "npt.NDArray[np.generic]"]


class Outcome(IntEnum):
    """How a request ended."""

    FINISHED = 0
    CANCELLED = 1
    """The client gave up."""
    REJECTED = 2
    """No replica took the request: all queues were full, or it exceeds every KV cache."""
    UNFINISHED = 3
    """The request was still in the system when the run stopped."""


class Cause(IntEnum):
    """Why a request's stay in a batch ended."""

    FINISHED = 0
    PREEMPTED = 1
    SWAPPED = 2
    CANCELLED = 3
    CRASHED = 4
    UNFINISHED = 5
    MOVED = 6
    """The KV cache was sent to another replica. Also if the request came back because that replica could not take
    it."""


class MoveOutcome(IntEnum):
    """How a move to another replica ended."""

    DONE = 0
    ENDED = 1
    """The request ended before the move did."""
    PREEMPTED = 2
    """The request was preempted before the move ended."""
    FULL = 3
    """The target ran out of KV blocks."""
    CRASHED = 4
    """Source or target crashed."""
    UNFINISHED = 5
    """The move was in progress when the run stopped."""
    BROKEN = 6
    """The streams broke. If another row of the request has the same start, the transfer was resumed."""


REQUEST_COLUMNS = (
    "request", "outcome", "attempts", "preemptions", "replica", "placed_s", "admitted_s", "first_token_s",
    "answer_s", "end_s", "generated_tokens", "cached_prompt_tokens", "reasoning_end_s", "moves",
    "stage", "score",
)  # fmt: skip
"""Columns of `requests`.

`request` is the id (row of the workload table); `replica` the last replica, -1 if never placed; `placed_s` the first
placement; `admitted_s` the start of the first prefill; `answer_s` the first answer token; `reasoning_end_s` the last
reasoning token, if the request also answers; `moves` the number of completed moves; `stage` the cascade stage that
answered, -1 without a cascade; `score` the judge's score of that answer, NaN if unjudged. With a cascade, tokens and
first token are those of the last stage; `segments` has those of the other stages.
"""

FALLBACK = "fallback"
"""Optional column of `requests`, if the fleet has fallbacks: why a fallback answered. 0: no fallback answered, 1: the
requested model was down, 2: the model rejected the request, 3: the model was slow."""
FALLBACK_REASONS = ("down", "rejects", "slow")
REFUSED = "refused"
"""Optional column of `requests`, if tenants have limits: the limit that denied the request, counted from 1 in
`REFUSAL_REASONS`. 0: none."""
REFUSAL_REASONS = ("requests", "tokens", "budget")
"""Limits of requests per minute, of tokens per minute, and budgets."""
LONGEST_GAP, RESUMED = "longest_gap_s", "resumed_s"
"""Optional columns of a gateway's `requests`: the longest time between two reads that brought tokens from one replica's
stream (0: fewer than two reads), and the time of the first token from the last replica of an answer that another
replica had begun."""
NUM_SEQUENCES = "num_sequences"
"""Optional column of a gateway's `requests`: the number of sequences of an answer (`n`, several prompts) whose tokens
`generated_tokens` counts together. 0: one."""
OPTIONAL_COLUMNS = (FALLBACK, REFUSED, LONGEST_GAP, RESUMED, NUM_SEQUENCES)
"""Columns of `requests` that only some runs have. Where missing they read as 0, or NaN if they are seconds."""
DURATIONS = (LONGEST_GAP,)
"""Columns whose seconds are durations. All other columns of seconds are times."""
REQUEST_ID = "request_id"
"""Optional column of `requests.parquet` in a gateway's records: the client's request id, else the gateway's."""

SEGMENT_COLUMNS = (
    "request",
    "replica",
    "attempt",
    "stage",
    "enqueued_s",
    "admitted_s",
    "prefill_end_s",
    "joined_tick",
    "left_tick",
    "end_s",
    "cause",
)
"""Columns of `segments`. `prefill_end_s` is NaN if no prefill ended with a token (the request was swapped in, or left
earlier)."""

STRETCH_COLUMNS = (
    "replica",
    "tick",
    "start_s",
    "a_s",
    "b_s",
    "num_decode",
    "prefill_tokens",
    "context_tokens",
    "num_waiting",
    "iterations",
    "advances",
)
"""Columns of `stretches`. `advances` is 1 if the iterations are ticks, 0 if no request decoded (prefill only).
`context_tokens` counts the KV tokens of the decoding requests at the start."""

MOVE_COLUMNS = ("request", "source", "target", "start_s", "paused_s", "end_s", "kv_tokens", "num_bytes", "outcome")
"""Columns of `moves`. `paused_s` is when the request stopped decoding at the source (NaN: it never did, or was not
decoding)."""

DRAFT_COLUMNS = ("request", "replica", "tick", "tokens")
"""Columns of `drafts`. `tokens`: accepted drafted tokens of the tick, without the one token that every tick gives."""


class ReplicaPower(Struct, frozen=True):
    """Power of all GPUs of one replica, and how much of it an iteration uses (see `perf.power`).

    An idle replica uses `idle_w`. Take an iteration of t seconds whose reads need m seconds at peak bandwidth and whose
    products need c seconds at peak FLOP/s: it adds `active_w + memory_w * m/t + compute_w * sqrt(c/t)`, up to a total
    of `limit_w`.
    """

    limit_w: float
    idle_w: float
    active_w: float
    memory_w: float
    compute_w: float
    weights_s: float
    """Seconds to read, at peak bandwidth, the weights used by every iteration."""
    experts: tuple[tuple[float, float], ...]
    """(seconds to read some routed experts, probability that a token chooses one of them)."""
    micro_batches: int
    """Number of equal parts of a batch that pass through the experts in turn."""
    context_s: float
    """Seconds to read, at peak bandwidth, one KV token of a decoding sequence."""
    window_s: float
    """Seconds of reads per KV token in sliding-window layers, up to `window_tokens` per sequence."""
    window_tokens: int
    token_s: float
    """Seconds to compute one token's matrix products at peak FLOP/s."""
    sequence_s: float
    """Seconds of a decoding sequence's further products at peak FLOP/s, per token of the sequence."""
    tokens_per_sequence: int
    """Tokens that a decoding sequence computes in one iteration: 1 plus the drafted tokens."""


class ReplicaRecord(Struct, frozen=True):
    """One replica and its lifetime."""

    id: int
    pool: str
    model: str
    gpu: str
    region: str
    num_gpus: int
    usd_per_hour: float
    watts: float
    kv_capacity_tokens: int
    max_num_seqs: int
    up: tuple[tuple[float, float], ...]
    """Billed (start, end) intervals. A crashed replica is billed while it is down."""
    down: tuple[tuple[float, float], ...] = ()
    """Intervals within `up` during which the replica was starting or crashed."""
    origin: str = "initial"
    """Its source: `initial`, `new`, `reclaimed` (a spot instance of its model), `redeployed` (a spot instance of
    another model)."""
    replaces: int = -1
    """The stopped replica whose spot instance this replica uses; -1: none."""
    for_prefill: tuple[tuple[float, float], ...] = ()
    """Intervals with the role `prefill`."""
    for_decode: tuple[tuple[float, float], ...] = ()
    """Intervals with the role `decode`; at other times the role was `mixed`."""
    usd_per_million_input_tokens: float = 0.0
    """A hosted replica's price of prompt tokens."""
    usd_per_million_output_tokens: float = 0.0
    usd_per_million_cached_tokens: float | None = None
    """A hosted replica's price of prompt tokens in its prefix cache; None: the normal input price."""
    name: str = ""
    """The gateway's name for the replica in headers, logs and metrics: pool and number. Empty: simulated."""
    power: ReplicaPower | None = None
    """Power of its GPUs; None: unknown (a hosted or unsimulated replica)."""


class Ended(Struct, frozen=True, gc=False):
    """The end of a request, for a policy's `learn`."""

    id: int
    outcome: Outcome
    model: str
    tier: int
    replica: int
    arrival_s: float
    first_token_s: float | None
    end_s: float
    prompt_tokens: int
    generated_tokens: int
    slo_ttft_s: float | None = None
    slo_tpot_s: float | None = None
    slo_e2e_s: float | None = None
    tenant: str = ""
    num_sequences: int = 1
    """Number of sequences of the answer. `generated_tokens` counts the tokens of all of them."""


class Prefixes(Struct, frozen=True):
    """Prompt segments of all requests, ragged: request i has `offsets[i]:offsets[i + 1]`.

    `ids` and `tokens` are as in `core.request.Segment`.
    """

    offsets: npt.NDArray[np.int64]
    ids: npt.NDArray[np.int64]
    tokens: npt.NDArray[np.int32]


class Records(Struct):
    """The records of a run. Row i of `workload`, the table of arrivals, is request id i."""

    workload: Columns
    models: tuple[str, ...]
    """Model names by the workload's `model` codes."""
    regions: tuple[str, ...]
    """Region names by the workload's `region` codes."""
    requests: Columns
    segments: Columns
    stretches: Columns
    replicas: tuple[ReplicaRecord, ...]
    end_s: float
    """Virtual time at which the run stopped."""
    prefixes: Prefixes | None = None
    """Prompt segments with content identities; None: there are none."""
    judge_usd: float = 0.0
    """Cost of judging one cascade answer."""
    moves: Columns = field(default_factory=dict)
    """The table `moves`; empty if no request could move."""
    drafts: Columns = field(default_factory=dict)
    """The table `drafts`; empty if no replica speculates."""
    tenants: tuple[str, ...] = ()
    """Tenants' names by the workload's `tenant` codes."""
    loras: tuple[str, ...] = ()
    """LoRA adapters' names by the workload's `lora` codes."""
    request_ids: pa.ChunkedArray | None = None
    """Each request's id in answers and logs, by workload row; None: a simulation, which logs the row number."""
