"""The step-time model: the seconds of one iteration of a batch, as a linear function of the iteration number.

An iteration is the sum of its operators on one GPU of the replica: matrix products (the larger of weights over
bandwidth and FLOPs over peak), attention of prompt chunks and of decoding sequences, experts, all-reduces, the head,
and the engine's own time. Only attention depends on the context, and the dependence is linear; so an unchanged batch
takes `a + k*b` seconds in its k-th iteration.

A pipeline of `pp` stages keeps `pp` equal micro-batches in flight on one clock: an iteration is the time in which one
micro-batch passes every stage, while the others do the same one stage apart.

Data parallel ranks step together (vLLM's data parallelism with expert parallelism). Every iteration lasts as long as
its slowest rank, and ranks without work run dummy batches. The model does not track which sequence is on which rank:
sequences are spread as evenly as possible, with contexts of the mean length, and chunks one by one. A balancing router
aims for such a spread; where it fails, iterations take longer than predicted.
"""

from __future__ import annotations

from collections.abc import Sequence

from headway.catalog.coefficients import Coefficients, Overhead
from headway.catalog.load import coefficients as measured
from headway.core.fleet import Engine, Gpu, Model, Parallel
from headway.perf.attention import AttentionCosts, attention_costs, windowed_pairs
from headway.perf.memory import check_shape
from headway.perf.operators import Operators
from headway.perf.params import num_dense_layers, num_moe_layers

MOST_GRAPH_TOKENS = 512
"""Engines capture graphs for batches of up to twice `max_num_seqs` tokens, and no more than this (vLLM)."""

Chunk = tuple[int, int]
"""(new tokens, context before them)."""


class StepModel:
    """Step times of one kind of replica, built once. `line` is pure apart from its caches.

    `calibrated` is False unless the coefficients were measured on this very GPU and engine. Raises HeadwayError if the
    model cannot be split as `parallel` asks.
    """

    __slots__ = (
        "_attention", "_decode", "_dp", "_graph_tokens", "_joint", "_launch_s", "_operators", "_pp", "_rows",
        "_tokens", "_window", "calibrated",
    )  # fmt: skip

    def __init__(
        self,
        model: Model,
        gpu: Gpu,
        engine: Engine,
        parallel: Parallel,
        coefficients: Coefficients | None = None,
    ) -> None:
        check_shape(model, parallel)
        used = coefficients or measured(gpu.name, engine.name)
        self.calibrated = used.calibrated
        self._operators = Operators(model, gpu, parallel, used)
        self._attention: AttentionCosts = attention_costs(model, gpu, engine, parallel, used.kernels)
        self._window = model.sliding_window_tokens
        self._pp, self._dp = parallel.pp, parallel.dp
        self._graph_tokens = min(2 * _on_fullest_rank(engine.max_num_seqs, parallel.dp), MOST_GRAPH_TOKENS)
        self._launch_s = _launch_s(model, used.overhead)
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
        line holds until one of them reaches the window, which the caller checks. With chunks it holds for one
        iteration.
        """
        if chunks:
            if self._dp > 1:
                return self._ranks_s(num_decode, context_tokens, chunks, window_tokens), 0.0, 1
            return self._mixed_s(num_decode, context_tokens, chunks, window_tokens), 0.0, 1
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
        """A lower bound on any iteration in which a rank has `num_tokens` tokens."""
        return self._tokens_s(num_tokens) + self._rows_s(1)

    def _ranks_s(self, num_decode: int, context_tokens: int, chunks: Sequence[Chunk], window_tokens: int) -> float:
        own = _on_fullest_rank(num_decode, self._dp)
        share = own / num_decode if num_decode else 0.0
        joint_s = self._joint_s(self._dp * own + sum(new for new, _ in chunks))
        context, window = context_tokens * share, window_tokens * share
        return max(
            self._mixed_s(own, context, rank_chunks, window, joint_s)
            for rank_chunks in spread_over_ranks(chunks, self._dp)
        )

    def _mixed_s(
        self,
        num_decode: int,
        context_tokens: float,
        chunks: Sequence[Chunk],
        window_tokens: float,
        joint_s: float = 0.0,
    ) -> float:
        costs = self._attention
        pair_s, read_s, up_s, half_tile = costs.pair_s, costs.read_s, costs.up_s, costs.half_tile
        attention_s = context_tokens * costs.decode_s
        num_tokens = num_decode
        for new, before in chunks:
            num_tokens += new
            computed_s = new * (before + 0.5 * new + half_tile) * pair_s
            loaded_s = (before + new) * read_s
            attention_s += (computed_s if computed_s > loaded_s else loaded_s) + before * up_s
        if self._window is not None:
            attention_s += window_tokens * costs.decode_window_s
            for new, before in chunks:
                attention_s += (windowed_pairs(new, before, self._window) + new * half_tile) * costs.pair_window_s
        if self._pp > 1:
            attention_s /= min(self._pp, num_tokens) or 1
        num_rows = num_decode + len(chunks)
        try:
            step_s = self._tokens[num_tokens] + self._rows[num_rows] + attention_s + joint_s
        except KeyError:
            step_s = self._tokens_s(num_tokens) + self._rows_s(num_rows) + attention_s + joint_s
        if step_s < self._launch_s and num_tokens > self._graph_tokens:
            return self._launch_s
        return step_s

    def _compute_decode(self, num_decode: int) -> tuple[float, float, float]:
        own = _on_fullest_rank(num_decode, self._dp)
        costs, stages = self._attention, min(self._pp, own) or 1
        share = own / num_decode if num_decode else 1.0
        base_s = self._tokens_s(own) + self._rows_s(own) + self._joint_s(self._dp * own)
        self._decode[num_decode] = (base_s, costs.decode_s * share / stages, costs.decode_window_s * share / stages)
        return self._decode[num_decode]

    def _tokens_s(self, num_tokens: int) -> float:
        """Seconds that depend on the number of a rank's tokens only."""
        if num_tokens not in self._tokens:
            self._tokens[num_tokens] = self._operators.tokens_s(-(-num_tokens // self._pp))
        return self._tokens[num_tokens]

    def _joint_s(self, num_tokens: int) -> float:
        """Seconds of the experts, which the data parallel ranks compute together; 0 with one rank."""
        if self._dp == 1:
            return 0.0
        if num_tokens not in self._joint:
            self._joint[num_tokens] = self._operators.joint_s(-(-num_tokens // self._pp))
        return self._joint[num_tokens]

    def _rows_s(self, num_rows: int) -> float:
        """Seconds that depend on the number of sequences only."""
        if num_rows not in self._rows:
            self._rows[num_rows] = self._operators.rows_s(-(-num_rows // self._pp))
        return self._rows[num_rows]


def _launch_s(model: Model, overhead: Overhead) -> float:
    """Host time to launch the kernels of an iteration one by one."""
    expert_s = overhead.launch_expert_layer_s
    if model.moe is not None and model.moe.shared_intermediate_size:
        expert_s += overhead.launch_shared_expert_s
    return num_dense_layers(model) * overhead.launch_layer_s + num_moe_layers(model) * expert_s


def _on_fullest_rank(num: int, num_ranks: int) -> int:
    """How many of `num` sequences the fullest rank has, if they are spread evenly."""
    return -(-num // num_ranks)


def spread_over_ranks(chunks: Sequence[Chunk], num_ranks: int) -> list[list[Chunk]]:
    """The chunks of each rank that has any: largest chunk first, each to the rank with the fewest new tokens."""
    ranks: list[list[Chunk]] = [[] for _ in range(min(num_ranks, len(chunks)))]
    tokens = [0] * len(ranks)
    for chunk in sorted(chunks, reverse=True):
        rank = tokens.index(min(tokens))
        ranks[rank].append(chunk)
        tokens[rank] += chunk[0]
    return ranks
