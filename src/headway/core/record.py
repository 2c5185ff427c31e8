"""The records of a run, as columns: all that metrics may read.

There are six tables. `requests`: one row per request, in order of ending. `segments`: one row per stay of a request
in a batch. `stretches`: one row per run of iterations of a replica with a constant batch. `moves`: one row per move of
a request between replicas. `drafts`: one row per iteration of a request that accepted drafted tokens. `replicas`: one
row per replica. Times are seconds since the start of the workload; NaN:
the event never happened.

A *tick* is an iteration in which the decoding requests of a replica each gain a token; ticks are numbered per
replica from 1. Tick `tick + k` of a stretch (k = 1..iterations) ends at
`start_s + k*a_s + b_s*k*(k-1)/2` (`boundary_s`). A segment with `joined_tick` j and `left_tick` l produced a token
at each of the ticks j+1..l, and before them one at `prefill_end_s` where that is not NaN. With speculative decoding,
`drafts` has the tokens that a tick gave it beyond the first.
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
    """The end of a request, as a run's records tell it."""

    FINISHED = 0
    CANCELLED = 1
    """The client gave up."""
    REJECTED = 2
    """No replica took the request: all queues were full, or it is larger than any KV cache."""
    UNFINISHED = 3
    """The request was in the system when the run stopped."""


class Cause(IntEnum):
    """Why a stay in a batch ended."""

    FINISHED = 0
    PREEMPTED = 1
    SWAPPED = 2
    CANCELLED = 3
    CRASHED = 4
    UNFINISHED = 5
    MOVED = 6
    """The KV cache is sent to another replica. Also if the request then returned, as the other could not take it."""


class MoveOutcome(IntEnum):
    """The end of a move to another replica, as a run's records tell it."""

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
    """The move was under way when the run stopped."""
    BROKEN = 6
    """The streams broke. If another row of the request has the same start, the transfer resumed."""


REQUEST_COLUMNS = (
    "request", "outcome", "attempts", "preemptions", "replica", "placed_s", "admitted_s", "first_token_s",
    "answer_s", "end_s", "generated_tokens", "cached_prompt_tokens", "reasoning_end_s", "moves",
    "stage", "score",
)  # fmt: skip
"""`request` is the id (row of the workload table); `replica` the last one, -1 if never placed; `placed_s` the first
placement on a replica; `admitted_s` the start of the first prefill; `answer_s` the first answering token;
`reasoning_end_s` the last reasoning token of a request that answers, too; `moves` the number of completed moves;
`stage` the cascade stage that answered, -1 without a cascade; `score` the judge's score of that answer, NaN if it was
not judged. With a cascade, tokens and first token are those of the last stage; `segments` has the others."""

FALLBACK = "fallback"
"""One more column of `requests` where the fleet has fallbacks: why the model of one answered. 0: none did, 1: the model
asked for was down, 2: it rejected the request, 3: it was slow."""
FALLBACK_REASONS = ("down", "rejects", "slow")
REFUSED = "refused"
"""One more column of `requests` where tenants have limits: by which one the request was refused, counted from 1 in
`REFUSAL_REASONS`. 0: by none."""
REFUSAL_REASONS = ("requests", "tokens", "budget")
"""Requests per minute, tokens per minute, and budgets."""
LONGEST_GAP, RESUMED = "longest_gap_s", "resumed_s"
"""Two more columns of a gateway's `requests`: the longest time between two reads of one replica's stream that brought
tokens (0: there were no two), and the first token from the last replica of an answer that another one had begun."""
OPTIONAL_COLUMNS = (FALLBACK, REFUSED, LONGEST_GAP, RESUMED)
"""Columns of `requests` that some runs have. In others they are 0, and NaN if they are seconds."""
DURATIONS = (LONGEST_GAP,)
"""Columns of seconds that are no points in time."""
REQUEST_ID = "request_id"
"""One more column of `requests.parquet`, of a gateway's records: the client's id of the request, else the gateway's."""

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
"""`prefill_end_s` is NaN if no prefill ended with a token (the request was swapped in, or left before the end)."""

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
"""`advances` is 1 if the iterations are ticks, 0 if no request decoded (a prefill-only iteration).
`context_tokens` is the KV tokens of the decoding requests at the start."""

MOVE_COLUMNS = ("request", "source", "target", "start_s", "paused_s", "end_s", "kv_tokens", "num_bytes", "outcome")
"""`paused_s` is when the request stopped decoding at the source (NaN: it never did, or did not decode)."""

DRAFT_COLUMNS = ("request", "replica", "tick", "tokens")
"""`tokens` were accepted by the request at this tick of the replica, beyond the one that every tick gives."""


class ReplicaPower(Struct, frozen=True):
    """Power of the GPUs of one replica together, and the work of an iteration that takes power (see `perf.power`).

    An idle replica takes `idle_w`. In an iteration that would take m seconds for its reads at peak bandwidth and c for
    its products at peak FLOP/s, and takes t, there are `active_w + memory_w * m/t + compute_w * sqrt(c/t)` more, up to
    `limit_w` in all.
    """

    limit_w: float
    idle_w: float
    active_w: float
    memory_w: float
    compute_w: float
    weights_s: float
    """Seconds to read, at peak bandwidth, the weights that every iteration reads."""
    experts: tuple[tuple[float, float], ...]
    """(seconds to read some routed experts, chance that a token chooses one of them)."""
    micro_batches: int
    """Equal parts of a batch that go through the experts one after the other."""
    context_s: float
    """Per KV token of decoding sequences."""
    window_s: float
    """The same in layers with a sliding window, up to `window_tokens` of a sequence."""
    window_tokens: int
    token_s: float
    """Seconds of a token's products at peak FLOP/s."""
    sequence_s: float
    """Of a decoding sequence's products beside those of its tokens, for each of its tokens."""
    tokens_per_sequence: int
    """Of a decoding sequence in an iteration: 1 and the drafted ones."""


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
    """(from, to) intervals that are paid for. A crashed replica is paid for while it is down."""
    down: tuple[tuple[float, float], ...] = ()
    """Intervals within `up` in which the replica was starting or crashed."""
    origin: str = "initial"
    """Its source: `initial`, `new`, `reclaimed` (a spot instance of its model), `redeployed` (of another model)."""
    replaces: int = -1
    """The stopped replica that became the spot instance; -1: none."""
    for_prefill: tuple[tuple[float, float], ...] = ()
    """Intervals in which the role was `prefill`."""
    for_decode: tuple[tuple[float, float], ...] = ()
    """Intervals in which the role was `decode`. Otherwise it was `mixed`."""
    usd_per_million_input_tokens: float = 0.0
    """What a hosted replica charges for prompts."""
    usd_per_million_output_tokens: float = 0.0
    usd_per_million_cached_tokens: float | None = None
    """What it charges for tokens of prompts that were in its prefix cache; None: the same as for others."""
    name: str = ""
    """The gateway's name for it, as in headers, logs and metrics: its pool and its number there; empty: simulated."""
    power: ReplicaPower | None = None
    """None: unknown, as of a hosted replica, or of one that was not simulated."""


class Ended(Struct, frozen=True, gc=False):
    """The end of one request, for a policy's `learn`."""

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


class Prefixes(Struct, frozen=True):
    """Prompt segments of the requests, ragged: those of request i are `offsets[i]:offsets[i + 1]`.

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
    """Price of judging one answer of a cascade."""
    moves: Columns = field(default_factory=dict)
    """Empty if no request could move."""
    drafts: Columns = field(default_factory=dict)
    """Empty if no replica speculates."""
    tenants: tuple[str, ...] = ()
    """Tenants' names by the workload's `tenant` codes."""
    loras: tuple[str, ...] = ()
    """LoRA adapters' names by the workload's `lora` codes."""
    request_ids: pa.ChunkedArray | None = None
    """The id of each request by row of the workload, as in answers and logs; None: a simulation, whose logs have the
    row's number."""


def boundary_s(start_s: float, a_s: float, b_s: float, k: int) -> float:
    """End of the k-th iteration of a stretch (k = 0: its start), in seconds. The one clock function."""
    return start_s + k * a_s + b_s * (k * (k - 1) // 2)
