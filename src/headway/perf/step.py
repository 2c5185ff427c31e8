"""The step-time model: the seconds of one iteration of a batch, as a linear function of the iteration number.

An iteration is the sum of its operators on one GPU of the replica: matrix products (the larger of weights over
bandwidth and FLOPs over peak), attention of prompt chunks and of decoding sequences, experts, all-reduces, the head,
and the engine's own time. Only attention depends on the context, and the dependence is linear; so an unchanged batch
takes `a + k*b` seconds in its k-th iteration.

A pipeline of `pp` stages keeps `pp` micro-batches in flight on one clock. An iteration is the time in which the fullest
micro-batch passes every stage, while the others follow one stage apart. Engines do not balance micro-batches: a
sequence stays in the micro-batch that was scheduled next when it arrived, and a prompt chunk belongs to one
micro-batch. Before an engine schedules pipelines ahead, a micro-batch also waits for the host between two of its
passes.

Data parallel ranks step together (vLLM's data parallelism with expert parallelism). Every iteration lasts as long as
its slowest rank, and ranks without work run dummy batches. The model does not track which sequence is on which rank:
sequences are spread as evenly as possible, with contexts of the mean length, and chunks one by one. Where a router
fails to balance like this, iterations take longer than predicted.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import chain
from math import ceil, comb, log2, sqrt

from headway.catalog.coefficients import Coefficients, Overhead
from headway.catalog.load import coefficients as measured
from headway.core.fleet import Engine, Gpu, Model, Parallel
from headway.perf.attention import AttentionCosts, attention_costs, windowed_pairs
from headway.perf.memory import check_shape
from headway.perf.operators import Operators
from headway.perf.params import expert_dtype, num_dense_layers, num_moe_layers
from headway.perf.sampler import Sampler, is_before

MOST_GRAPH_TOKENS = 512
"""Engines capture graphs for batches of up to twice `max_num_seqs` tokens, and no more than this (vLLM)."""

PIPELINE_IMBALANCE = 0.8
"""By how much the fuller of two random halves exceeds the mean, on average, in standard deviations. For more parts,
this is multiplied by the root of log2 of their number."""
Chunk = tuple[int, int]
"""(new tokens, context before them)."""


class StepModel:
    """Step times of one kind of replica, built once. `line` is pure apart from its caches.

    `calibrated` is False unless the coefficients were measured on this GPU and engine. Raises HeadwayError if the model
    cannot be divided as `parallel` requires.
    """

    __slots__ = (
        "_attention", "_chunk_costs", "_decode", "_decode_factor", "_dp", "_graph_tokens", "_host_s", "_joint",
        "_launch_parts_s", "_launch_s", "_most_chunk_tokens", "_operators", "_pp", "_prefill_factor", "_queries",
        "_rows", "_rows_of_sequence", "_sampler", "_slots", "_tokens", "_window", "calibrated",
    )  # fmt: skip

    def __init__(
        self,
        model: Model,
        gpu: Gpu,
        engine: Engine,
        parallel: Parallel,
        coefficients: Coefficients | None = None,
        queries: int = 1,
        rows: int = 1,
    ) -> None:
        """`queries`: tokens of each decoding sequence in an iteration; `rows` of them pass through the head."""
        check_shape(model, parallel)
        used = coefficients or measured(gpu.name, engine.name, engine.version)
        self.calibrated = used.calibrated
        self._operators = Operators(model, gpu, parallel, used)
        self._queries, self._rows_of_sequence = queries, rows
        self._attention: AttentionCosts = attention_costs(model, gpu, engine, parallel, used.kernels, queries)
        costs = self._attention
        self._chunk_costs = (costs.decode_s, costs.pair_s, costs.read_s, costs.up_s, costs.half_tile)
        self._window = model.sliding_window_tokens
        self._pp, self._dp = parallel.pp, parallel.dp
        self._sampler = Sampler(model, gpu, engine, used.overhead)
        waits = self._pp > 1 and is_before(engine.version, used.overhead.pipeline_waits_before)
        self._host_s = used.overhead.pipeline_step_s if waits else 0.0
        self._most_chunk_tokens = engine.max_num_batched_tokens
        self._graph_tokens = most_graph_tokens(engine, parallel, queries)
        self._slots = engine.max_num_seqs if engine.passes_by_slot else 0
        self._launch_s = 0.0 if self._slots else _launch_s(model, used.overhead)
        self._launch_parts_s = 0.0 if self._slots else model.num_layers * used.overhead.launch_part_layer_s
        self._prefill_factor, self._decode_factor = used.overhead.prefill_factor, used.overhead.decode_factor
        self._decode: dict[int, tuple[float, float, float]] = {}
        self._tokens: dict[int, float] = {}
        self._rows: dict[int, float] = {}
        self._joint: dict[int, float] = {}

    def line(
        self,
        num_decode: int,
        context_tokens: int,
        chunks: Sequence[Chunk] = (),
        window_tokens: int = 0,
        num_growing: int = 0,
    ) -> tuple[float, float, int | None]:
        """Return `(a_s, b_s, iterations)`: iteration k of this batch takes `a_s + k*b_s`, for that many iterations.

        None = any number of iterations. `num_decode` sequences each decode a token over `context_tokens` KV tokens in
        all, and each of `chunks` computes new prompt tokens. For a model with a sliding window, `window_tokens` is the
        sum of min(context, window) over the decoding sequences and `num_growing` counts those below the window; the
        line holds until one of them reaches the window, which the caller checks.

        With chunks it holds for one iteration, and `b_s` is the host's time to launch that iteration (`launched_s`).
        """
        if chunks:
            if self._dp > 1 or self._pp > 1:
                mixed_s, launch_s = self._parts_s(num_decode, context_tokens, chunks, window_tokens)
            else:
                mixed_s, launch_s = self._mixed_s(num_decode, context_tokens, chunks, window_tokens)
            if self._prefill_factor != 1.0 or self._decode_factor != 1.0:
                mixed_s = self._corrected_s(mixed_s, num_decode, context_tokens, window_tokens)
                launch_s *= self._prefill_factor
            return mixed_s, launch_s, 1
        try:
            base_s, per_token_s, per_window_s = self._decode[num_decode]
        except KeyError:
            base_s, per_token_s, per_window_s = self._compute_decode(num_decode)
        if per_window_s:
            return (
                base_s + context_tokens * per_token_s + window_tokens * per_window_s,
                num_decode * per_token_s + num_growing * per_window_s,
                None,
            )
        return base_s + context_tokens * per_token_s, num_decode * per_token_s, None

    def least_s(self, num_tokens: int) -> float:
        """A lower bound on the seconds of any iteration in which a rank has `num_tokens` tokens."""
        return min(self._prefill_factor, self._decode_factor) * (self._tokens_s(num_tokens) + self._rows_s(1))

    def _corrected_s(self, mixed_s: float, num_decode: int, context_tokens: int, window_tokens: int) -> float:
        """Time of an iteration with prompts, corrected by factors: the time of its decoding sequences alone, plus the
        time that the prompts add."""
        decode_s = self.line(num_decode, context_tokens, (), window_tokens)[0] if num_decode else 0.0
        prompts_s = mixed_s - decode_s / self._decode_factor
        return decode_s + self._prefill_factor * (prompts_s if prompts_s > 0.0 else 0.0)

    def _parts_s(
        self, num_decode: int, context_tokens: int, chunks: Sequence[Chunk], window_tokens: int
    ) -> tuple[float, float]:
        """Seconds of the slowest rank and micro-batch, and to launch the longest one, with the chunks distributed over
        all of them."""
        own = self._fullest(num_decode)
        share = own / num_decode if num_decode else 0.0
        joint_s = self._joint_s(self._dp * ceil(own) * self._queries + ceil(sum(new for new, _ in chunks) / self._pp))
        context, window = context_tokens * share, window_tokens * share
        if self._pp > 1:
            chunks = list(chain.from_iterable(_pieces(chunk, self._most_chunk_tokens) for chunk in chunks))
        parts = [
            self._mixed_s(ceil(own), context, part, window, joint_s)
            for part in spread_over_ranks(chunks, self._dp * self._pp)
        ]
        return max(step_s for step_s, _ in parts), max(launch_s for _, launch_s in parts)

    def _fullest(self, num_decode: int) -> float:
        """Mean number of sequences in the fullest micro-batch of the fullest rank."""
        own = _on_fullest_rank(num_decode, self._dp)
        if self._pp == 1 or own <= 1:
            return own
        deviation = sqrt(own * (1 - 1 / self._pp) / self._pp)
        return min(own, own / self._pp + PIPELINE_IMBALANCE * sqrt(log2(self._pp)) * deviation)

    def _mixed_s(
        self,
        num_decode: int,
        context_tokens: float,
        chunks: Sequence[Chunk],
        window_tokens: float,
        joint_s: float = 0.0,
    ) -> tuple[float, float]:
        """Seconds of the GPU, and of the host to launch its work."""
        decode_s, pair_s, read_s, up_s, half_tile = self._chunk_costs
        attention_s = context_tokens * decode_s
        num_tokens = num_decode * self._queries
        for new, before in chunks:
            num_tokens += new
            computed_s = new * (before + 0.5 * new + half_tile) * pair_s
            loaded_s = (before + new) * read_s
            attention_s += (computed_s if computed_s > loaded_s else loaded_s) + before * up_s
        if self._window is not None:
            costs = self._attention
            attention_s += window_tokens * costs.decode_window_s
            for new, before in chunks:
                attention_s += (windowed_pairs(new, before, self._window) + new * half_tile) * costs.pair_window_s
        if self._slots:
            return self._slot_passes_s(num_decode, chunks) + attention_s, 0.0
        num_rows = num_decode * self._rows_of_sequence + len(chunks)
        try:
            step_s = self._tokens[num_tokens] + self._rows[num_rows] + attention_s + joint_s
        except KeyError:
            step_s = self._tokens_s(num_tokens) + self._rows_s(num_rows) + attention_s + joint_s
        return step_s, self._launch_s if num_tokens > self._graph_tokens else self._launch_parts_s

    def _compute_decode(self, num_decode: int) -> tuple[float, float, float]:
        factor = self._decode_factor
        if self._slots:
            costs = self._attention
            self._decode[num_decode] = (
                factor * self._runs_s(num_decode),
                factor * costs.decode_s,
                factor * costs.decode_window_s,
            )
            return self._decode[num_decode]
        own = self._fullest(num_decode)
        costs, share = self._attention, own / num_decode if num_decode else 1.0
        share *= factor
        rows = ceil(own)
        tokens = rows * self._queries
        base_s = self._tokens_s(tokens) + self._rows_s(rows * self._rows_of_sequence)
        base_s += self._joint_s(self._dp * tokens)
        self._decode[num_decode] = (factor * base_s, costs.decode_s * share, costs.decode_window_s * share)
        return self._decode[num_decode]

    def _slot_passes_s(self, num_decode: int, chunks: Sequence[Chunk]) -> float:
        """Seconds, without attention, of an iteration of slots with separate KV caches.

        A pass has equally many tokens of neighbouring slots: first one token of each slot that decodes or has a prompt,
        then the rest of each prompt separately.
        """
        if not num_decode:
            return sum(self._tokens_s(new) + self._rows_s(1) for new, _ in chunks)
        rest_s = sum(self._tokens_s(new - 1) + self._rows_s(1) for new, _ in chunks if new > 1)
        return self._runs_s(min(num_decode + len(chunks), self._slots)) + rest_s

    def _runs_s(self, num: int) -> float:
        """Mean seconds, without attention, of one token for each of `num` slots, with one pass for each run of
        neighbouring slots."""
        return sum(
            share * (self._tokens_s(length * self._queries) + self._rows_s(length * self._rows_of_sequence))
            for length, share in enumerate(runs_of_slots(num, self._slots), start=1)
            if share
        )

    def _tokens_s(self, num_tokens: int) -> float:
        """Seconds that depend only on the number of a rank's tokens."""
        if num_tokens not in self._tokens:
            computed = num_tokens
            if self._launch_s and num_tokens <= self._graph_tokens:
                computed = graph_tokens(num_tokens, self._queries)
            self._tokens[num_tokens] = self._operators.tokens_s(computed) + self._host_s
        return self._tokens[num_tokens]

    def _joint_s(self, num_tokens: int) -> float:
        """Seconds of the experts, which the data-parallel ranks compute together; 0 with one rank."""
        if self._dp == 1:
            return 0.0
        if num_tokens not in self._joint:
            self._joint[num_tokens] = self._operators.joint_s(num_tokens)
        return self._joint[num_tokens]

    def _rows_s(self, num_rows: int) -> float:
        """Seconds that depend on the number of sequences only."""
        if num_rows not in self._rows:
            self._rows[num_rows] = self._operators.rows_s(num_rows) + self._sampler.seconds(num_rows)
        return self._rows[num_rows]


def launched_s(step: tuple[float, float, int | None]) -> float:
    """Seconds of an iteration with prompts whose launch begins with it: those of the GPU or of the host, which work at
    the same time. `step`: what `StepModel.line` returned."""
    return step[0] if step[0] > step[1] else step[1]


def _launch_s(model: Model, overhead: Overhead) -> float:
    """Host time to launch the kernels of an iteration one by one."""
    expert_s = overhead.launch_expert_layer_s
    if expert_dtype(model) == "fp8":
        expert_s += overhead.launch_fp8_expert_s
    if model.moe is not None and model.moe.shared_intermediate_size:
        expert_s += overhead.launch_shared_expert_s
    return num_dense_layers(model) * overhead.launch_layer_s + num_moe_layers(model) * expert_s


def most_graph_tokens(engine: Engine, parallel: Parallel, queries: int = 1) -> int:
    """Tokens of the largest captured graph."""
    return min(2 * _on_fullest_rank(engine.max_num_seqs, parallel.dp) * queries, MOST_GRAPH_TOKENS)


def graph_tokens(num_tokens: int, queries: int = 1) -> int:
    """Tokens that a captured graph computes for a batch. Graphs exist for some sizes, and batches are padded to these
    sizes.

    The sizes are vLLM's: 1, 2, 4, multiples of 8 up to 256, then multiples of 16. Padding tokens choose experts, too.
    With several tokens of each sequence, sizes are rounded up to multiples of that number, as vLLM does
    (`adjust_cudagraph_sizes_for_spec_decode`).
    """
    if queries > 1:
        return -(-graph_tokens(max(num_tokens - queries + 1, 1)) // queries) * queries
    if num_tokens <= 2:
        return num_tokens
    if num_tokens <= 4:
        return 4
    step = 8 if num_tokens <= 256 else 16
    return -(-num_tokens // step) * step


def runs_of_slots(num: int, num_slots: int) -> list[float]:
    """Mean number of runs of 1, 2, ..., `num` neighbouring slots, if all sets of `num` of `num_slots` slots are equally
    likely.

    A run of length l begins at one of `num_slots` - l + 1 places, and ends at a free slot or at the first or last slot.
    """
    if num >= num_slots:
        return [0.0] * (num - 1) + [1.0]
    total = comb(num_slots, num)
    runs = []
    for length in range(1, num + 1):
        inside = max(num_slots - length - 1, 0) * comb(max(num_slots - length - 2, 0), num - length)
        at_edges = 2 * comb(num_slots - length - 1, num - length)
        runs.append((inside + at_edges) / total)
    return runs


def _on_fullest_rank(num: int, num_ranks: int) -> int:
    """How many of `num` sequences the fullest rank has, if they are spread evenly."""
    return -(-num // num_ranks)


def _pieces(chunk: Chunk, most_tokens: int) -> Iterator[Chunk]:
    """A prompt's tokens in one iteration, divided into at most `most_tokens` per micro-batch."""
    new, before = chunk
    while new > 0:
        piece = min(new, most_tokens)
        yield piece, before
        new, before = new - piece, before + piece


def spread_over_ranks(chunks: Sequence[Chunk], num_ranks: int) -> list[list[Chunk]]:
    """The chunks of each non-empty rank: the largest chunk first, each to the rank with the fewest new tokens."""
    ranks: list[list[Chunk]] = [[] for _ in range(min(num_ranks, len(chunks)))]
    tokens = [0] * len(ranks)
    for chunk in sorted(chunks, reverse=True):
        rank = tokens.index(min(tokens))
        ranks[rank].append(chunk)
        tokens[rank] += chunk[0]
    return ranks
