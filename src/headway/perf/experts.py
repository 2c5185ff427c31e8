"""Seconds of the routed experts of one mixture-of-experts layer.

They come from a table if it has the model's shape, otherwise from a smooth roofline. No smooth formula matches the
kernels well, because kernels depend on the shape, pad each expert's rows to a tile, and read only the chosen experts. A
table with balanced routing is looked up at the token count that would touch as many experts as the batch does, while
the touched experts determine the time; for larger batches, at the batch's own token count.
"""

from __future__ import annotations

from bisect import bisect_right
from itertools import pairwise
from math import exp, log

from headway.catalog.coefficients import Coefficients, ExpertCurve, ExpertTable
from headway.core.fleet import Gpu, Model, Moe, Parallel
from headway.perf.params import dtype_bytes, expert_dtype, expert_params, kernel_dtype
from headway.perf.roofline import compute_dtype, peak_flops, roofline_s

ROUTING_SKEW = 0.4
"""Exponent of the power law of expert popularity; 0: all equally popular."""
SKEW_BINS = 16


class Experts:
    """The experts of one layer on one GPU of a replica, for the tokens of all data parallel ranks."""

    def __init__(self, model: Model, gpu: Gpu, parallel: Parallel, coefficients: Coefficients) -> None:
        self._model, self._gpu, self._parallel = model, gpu, parallel
        self._kernels = coefficients.kernels
        self._dtype = expert_dtype(model)
        self._chances = expert_chances(model)
        self._table = coefficients.experts
        curve = _curve(self._table, model, parallel) if self._table is not None else None
        self._points = _points(self._table, curve) if self._table is not None and curve is not None else []

    @property
    def is_measured(self) -> bool:
        """Whether the table has the model's shape."""
        return bool(self._points)

    def seconds(self, num_tokens: int) -> float:
        """Seconds of a layer; 0 without experts."""
        moe = self._model.moe
        if moe is None:
            return 0.0
        touched = self._touched(num_tokens)
        if self._points:
            return self._from_table(moe, num_tokens, touched)
        return self._from_roofline(moe, num_tokens, touched)

    def num_bytes(self, num_tokens: int) -> float:
        """Bytes of the weights that the GPU reads for a layer."""
        weights = expert_params(self._model) / (self._parallel.tp * self._parallel.dp)
        return self._touched(num_tokens) * weights * dtype_bytes(self._dtype, self._model.name)

    def _touched(self, num_tokens: int) -> float:
        """Mean number of experts that the tokens choose."""
        return sum([count * (1.0 - (1.0 - chance) ** num_tokens) for count, chance in self._chances])

    def _from_table(self, moe: Moe, num_tokens: int, touched: float) -> float:
        assert self._table is not None
        if not self._table.balanced:
            return self._interpolated(num_tokens)
        fewest = touched / moe.experts_per_token
        all_touched = moe.num_experts / moe.experts_per_token
        if num_tokens <= all_touched:
            return self._interpolated(fewest)
        missing_s = self._interpolated(all_touched) - self._interpolated(fewest)
        return self._interpolated(num_tokens) - missing_s

    def _interpolated(self, tokens: float) -> float:
        """Seconds by linear interpolation of the logarithms; beyond the table, proportional to the tokens."""
        at, points = log(max(tokens, 1.0)), self._points
        i = min(max(bisect_right(points, (at,)), 1), len(points) - 1)
        (x0, y0), (x1, y1) = points[i - 1], points[i]
        if at > x1:
            return exp(y1 + at - x1)
        return exp(y0 + (y1 - y0) * (at - x0) / (x1 - x0))

    def _from_roofline(self, moe: Moe, num_tokens: int, touched: float) -> float:
        """Time of loading the touched experts. Each expert pads its rows to a tile.

        Tensor parallelism slices every expert; expert parallelism gives each GPU whole experts. In both cases a GPU
        holds and computes an equal share.
        """
        model = self._model
        c = self._kernels.moe[kernel_dtype(self._dtype)]
        chosen = float(num_tokens * moe.experts_per_token)
        weights = expert_params(model) / (self._parallel.tp * self._parallel.dp)
        memory_s = self.num_bytes(num_tokens) / self._gpu.bandwidth_bytes_per_s
        flops = peak_flops(self._gpu, compute_dtype(self._dtype, self._gpu))
        return roofline_s(c, memory_s, 2.0 * (chosen + touched * c.tile_tokens) * weights / flops)


def expert_chances(model: Model) -> list[tuple[float, float]]:
    """(number of experts, probability that a token chooses one of them), by a power law over the experts' ranks.

    Routers are trained for even choices, but similar texts use experts unevenly, so a batch touches fewer experts than
    with even choices. Experts of similar rank share a bin.
    """
    if model.moe is None:
        return []
    num = model.moe.num_experts
    weights = [rank**-ROUTING_SKEW for rank in range(1, num + 1)]
    bins = min(num, SKEW_BINS)
    edges = [num * i // bins for i in range(bins + 1)]
    scale = model.moe.experts_per_token / sum(weights)
    return [(high - low, min(1.0, scale * sum(weights[low:high]) / (high - low))) for low, high in pairwise(edges)]


def _curve(table: ExpertTable, model: Model, parallel: Parallel) -> ExpertCurve | None:
    """The curve of the model's experts, divided over the replica's GPUs as the engine would; None if the table lacks
    it."""
    moe = model.moe
    if moe is None:
        return None
    dtype = kernel_dtype(expert_dtype(model))
    tp, ep = (1, parallel.tp * parallel.dp) if parallel.ep else (parallel.tp * parallel.dp, 1)
    wanted = (
        dtype,
        model.hidden_size,
        moe.intermediate_size,
        moe.experts_per_token,
        moe.num_experts,
        tp,
        ep,
    )
    for each in table.curves:
        shape = (
            each.dtype,
            each.hidden_size,
            each.intermediate_size,
            each.experts_per_token,
            each.num_experts,
            each.tp,
            each.ep,
        )
        if shape == wanted:
            return each
    return None


def _points(table: ExpertTable, curve: ExpertCurve) -> list[tuple[float, float]]:
    """(log tokens, log seconds) at the table's numbers of tokens."""
    return [(log(tokens), log(us * 1e-6)) for tokens, us in zip(table.tokens, curve.latency_us, strict=True)]
