"""Lower bounds on the p95 latency of sets of replicas, from the step-time model instead of a simulation.

If a set's p95 latency is L, 95% of the requests take at most L each, and all of them end within the span of the
arrivals plus L. This gives two bounds.

A decoding step of a batch of B sequences takes at least a + b B plus the time of its sequences' contexts. Charge each
sequence its part: a / B + b and its own context. A request of T steps that is done in L had steps of t seconds on
average, hence batches of at most (t - a) / b, hence (the part is convex in t) at least T t b / (t - a) charged. The
charges add up to the busy time of the replica. L therefore bounds how many requests a replica can serve in time. The
cheapest requests are counted, for each shape separately, with every replica always busy.

Likewise a request's prompt takes at least its tokens times the cheapest prompt token.

In a combo the prefill replicas compute all prompts, and the decode replicas write the answers; or the prefill replicas
write them in the time that prompts leave, as an answer stays there if no decode replica has room for its KV cache. The
bound covers this case, the estimate does not. If the router may place whole requests on either (`in_place`), or the
prefill replicas have no room for the longest request, all replicas of a combo are assumed to serve both phases.

L is searched on a grid. The bound is the largest L on the grid for which the count is too small. The estimate is the
interpolated L at which the count reaches the number needed; sets are tried in the order of their estimates.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise
from math import floor
from typing import Protocol

import numpy as np
import numpy.typing as npt

from headway.catalog.coefficients import Coefficients
from headway.core.fleet import Engine, Gpu, Model, Parallel
from headway.perf import memory
from headway.perf.speculation import step_model
from headway.planning.cascade.problem import Floats, Lengths, coefficients_key, longest_request_tokens
from headway.planning.cascade.replica_sets import ReplicaSets

Ints = npt.NDArray[np.int64]
SLACK = 0.97
"""Factor on the step-time model's times, because costs may fall as a batch grows."""
QUANTILE = 0.95
GRID = 64
"""Number of latency limits at which bounds are computed, each a constant factor above the one before."""
REACH = 20.0
"""The grid ends at this multiple of the unloaded p95."""
MOST_LINES = 6


class Bounds(Protocol):
    """Lower bounds and estimates of p95 latencies, in seconds."""

    def estimate(self, model: Model, sets: ReplicaSets, rate_rps: float, lengths: Lengths) -> tuple[Floats, Floats]:
        """Lower bounds, and estimates: one element per set."""
        ...


class NoBounds:
    """Bounds that exclude nothing."""

    def estimate(self, model: Model, sets: ReplicaSets, rate_rps: float, lengths: Lengths) -> tuple[Floats, Floats]:
        return np.zeros(len(sets)), np.ones(len(sets))


@dataclass
class StepTimeBounds:
    """Bounds from the step-time model.

    `repeats`: how often the evaluator repeats the lengths of a stage. `coefficients`: replace the catalog's, by
    `coefficients_key`. `other_gpus`: further types of GPU, by name. `in_place`: replicas of combos may serve both
    phases of a request.
    """

    gpu: Gpu
    engine: Engine
    repeats: int = 1
    coefficients: Mapping[str, Coefficients] = field(default_factory=dict)
    other_gpus: Mapping[str, Gpu] = field(default_factory=dict)
    in_place: bool = False

    def __post_init__(self) -> None:
        self._shapes: dict[tuple[str, Parallel, str], _ShapeBounds] = {}

    def estimate(self, model: Model, sets: ReplicaSets, rate_rps: float, lengths: Lengths) -> tuple[Floats, Floats]:
        if not len(sets):
            return np.zeros(0), np.zeros(0)
        shapes = [self._shape(model, shape, sets.gpu_of(j)) for j, shape in enumerate(sets.shapes)]
        num = len(lengths)
        needed = (floor(QUANTILE * (num * self.repeats - 1)) + 1) / self.repeats
        columns = _SetBounds(shapes, sets, lengths, needed, self.in_place)
        unloaded = float(np.sort(columns.alone.min(axis=0))[min(int(np.ceil(needed)), num) - 1])
        grid = unloaded * REACH ** (np.arange(GRID) / (GRID - 1))
        window = num / rate_rps + grid / self.repeats
        eligible = columns.eligible(grid)
        most, expected = columns.in_time(grid, window)
        lower, estimate = _crossing(np.minimum(most, eligible), needed, grid)
        if expected is not None:
            estimate = np.maximum(_crossing(np.minimum(expected, eligible), needed, grid)[1], lower)
        return lower, estimate

    def _shape(self, model: Model, parallel: Parallel, on: str) -> _ShapeBounds:
        key = (model.name, parallel, on)
        if key not in self._shapes:
            gpu = self.other_gpus.get(on, self.gpu)
            own = self.coefficients.get(coefficients_key(model, on if on in self.other_gpus else ""))
            self._shapes[key] = _ShapeBounds(model, gpu, self.engine, parallel, own)
        return self._shapes[key]


def _crossing(total: Floats, needed: float, grid: Floats) -> tuple[Floats, Floats]:
    """For each set, the latency from which enough requests can be in time: the last grid value below it, and the
    interpolated value."""
    enough = total >= needed * (1 - 1e-9)
    first = np.where(enough.any(axis=1), enough.argmax(axis=1), len(grid))
    before = np.maximum(first - 1, 0)
    after, rows = np.minimum(first, len(grid) - 1), np.arange(len(total))
    gain = total[rows, after] - total[rows, before]
    share = np.where(gain > 0, (needed - total[rows, before]) / np.where(gain > 0, gain, 1.0), 0.0)
    estimate = grid[before] + np.clip(share, 0.0, 1.0) * (grid[after] - grid[before])
    never = first == len(grid)
    return grid[before], np.where(never, grid[-1] * needed / np.maximum(total[:, -1], 1e-3), estimate)


class _SetBounds:
    """Bounds of sets under one load, combined from the bounds of their shapes."""

    def __init__(
        self, shapes: Sequence[_ShapeBounds], sets: ReplicaSets, lengths: Lengths, needed: float, in_place: bool
    ) -> None:
        self.shapes, self.sets, self.lengths, self.needed = shapes, sets, lengths, needed
        roles = [sets.role(j) for j in range(len(shapes))]
        longest = float((lengths.prompt_tokens + lengths.output_tokens).max())
        self.prefills = [j for j, role in enumerate(roles) if role == "prefill"]
        self.decodes = [j for j, role in enumerate(roles) if role == "decode"]
        if in_place or any(
            longest > longest_request_tokens(shapes[j].room_tokens, shapes[j].engine) for j in self.prefills
        ):
            self.prefills = self.decodes = self.prefills + self.decodes
        self.mixed = [j for j, role in enumerate(roles) if role == "mixed"]
        first_s = [shape.prefill_s(lengths.computed_tokens) for shape in shapes]
        least_s = np.min([first_s[j] for j in self.prefills], axis=0) if self.prefills else first_s[0]
        self.first_s = [own if j in self.mixed else least_s for j, own in enumerate(first_s)]
        self.alone = np.stack([shape.alone_s(lengths, s) for shape, s in zip(shapes, self.first_s, strict=True)])
        """[shape, request]: latency of a request that runs alone and is decoded by this shape."""

    def in_time(self, grid: Floats, window: Floats) -> tuple[Floats, Floats | None]:
        """[set, L]: the largest possible number of requests in time; with combos, also the expected number."""
        most = self.sets.counts.max(axis=0).tolist()
        total = np.zeros((len(self.sets), len(grid)))
        for j in self.mixed:
            if most[j]:
                self._add(total, j, self._served(j, grid, window, most[j]))
        if not self.prefills:
            return total, None
        rooms = [window[:, None] * np.arange(num + 1) for num in most]
        prompts, answers, left = np.zeros_like(total), np.zeros_like(total), np.zeros_like(total)
        for j in self.prefills:
            self._add(prompts, j, _count(self._prompts_s(j), rooms[j]))
        for j in self.decodes:
            self._add(answers, j, _count(self._answers_s(j, grid), rooms[j]))
        if self.prefills is not self.decodes:
            alone = (self.sets.counts[:, self.mixed] == 0).all(axis=1)
            for j in self.prefills:
                self._add(left, j, _count(self._answers_s(j, grid), rooms[j]), ~alone)
                self._add(left, j, _count(self._answers_s(j, grid), self._after_prompts(j, rooms[j])), alone)
        return total + np.minimum(prompts, answers + left), total + np.minimum(prompts, answers)

    def _add(self, total: Floats, j: int, count: Floats, rows: npt.NDArray[np.bool_] | None = None) -> None:
        """Add the requests that a shape's replicas can serve to the sets that contain the shape."""
        there = self.sets.counts[:, j] > 0
        chosen = np.flatnonzero(there if rows is None else there & rows)
        total[chosen] += count[self.sets.counts[chosen, j]]

    def _served(self, j: int, grid: Floats, window: Floats, num: int) -> Floats:
        """[replicas, L]: the largest number of requests that up to `num` replicas or more of a shape can serve in time,
        both phases. Kept with the shape, for searches with other sets under the same load."""
        served, key = self.shapes[j].served, (self.lengths.key, float(grid[0]), float(window[0]))
        if key not in served or len(served[key]) <= num:
            room = window[:, None] * np.arange(num + 1)
            served[key] = np.minimum(_count(self._answers_s(j, grid), room), _count(self._prompts_s(j), room))
        return served[key]

    def _prompts_s(self, j: int) -> Floats:
        """[request, 1]: the least time of a prompt, the same for every L."""
        return np.asarray(self.lengths.computed_tokens * self.shapes[j].prompt_token_s)[:, None]

    def _answers_s(self, j: int, grid: Floats) -> Floats:
        """Array [request, L] of the least replica time of an answer in time; infinite if no answer is in time."""
        charged = self.shapes[j].charged_s(self.lengths, grid, self.first_s[j])
        charged[self.alone[j][:, None] > grid] = np.inf
        return charged

    def _after_prompts(self, j: int, room: Floats) -> Floats:
        """The replica time left by the prompts that must be in time."""
        prompts_s = np.sort(self.lengths.computed_tokens * self.shapes[j].prompt_token_s)
        return np.asarray(np.maximum(room - float(prompts_s[: floor(self.needed)].sum()), 0.0))

    def eligible(self, grid: Floats) -> Floats:
        """[set, L]: requests that some shape of the set could serve alone in time; all requests for sets of many
        shapes."""
        num = len(self.alone)
        first, second = np.triu_indices(num)
        faster = np.sort(np.minimum(self.alone[first], self.alone[second]), axis=1)
        both = np.zeros((num, num, len(grid)))
        both[first, second] = both[second, first] = _num_up_to(faster, np.broadcast_to(grid, (len(faster), len(grid))))
        kinds = self.sets.counts > 0
        one, num_kinds = kinds.argmax(axis=1), kinds.sum(axis=1)
        other = num - 1 - kinds[:, ::-1].argmax(axis=1)
        return np.asarray(np.where((num_kinds <= 2)[:, None], both[one, other], float(self.alone.shape[1])))


def _num_up_to(rows: Floats, values: Floats) -> Ints:
    """[row, value]: how many elements of each ascending row do not exceed that row's values. A single row is compared
    with all values."""
    if len(rows) == 1:
        return np.asarray(np.searchsorted(rows[0], values, side="right"))
    most = 1.0 + max(float(values.max()), float(np.where(np.isfinite(rows), rows, 0.0).max()))
    apart = 2 * most * np.arange(len(rows))[:, None]
    at = np.searchsorted((np.minimum(rows, most) + apart).ravel(), (values + apart).ravel(), side="right")
    return np.asarray(at.reshape(values.shape) - rows.shape[1] * np.arange(len(rows))[:, None])


class _ShapeBounds:
    """Bounds of one replica of one shape."""

    def __init__(self, model: Model, gpu: Gpu, engine: Engine, parallel: Parallel, own: Coefficients | None) -> None:
        self.engine = engine
        self.line = step_model(model, gpu, engine, parallel, own).line
        self.room_tokens = memory.plan(model, gpu, engine, parallel).kv_capacity_tokens
        self.served: dict[tuple[str, float, float], Floats] = {}
        """`_SetBounds` keeps its counts here, by the digest of the lengths, the first L and its window."""

    @cached_property
    def sizes(self) -> Ints:
        """Batch sizes at which step times are sampled."""
        most = self.engine.max_num_seqs
        sizes: Ints = np.unique(np.concatenate([np.arange(1, 9), np.geomspace(8, max(most, 8), 24)]).astype("i8"))
        return np.unique(np.append(sizes[sizes <= most], most))

    @cached_property
    def base_s(self) -> Floats:
        """Decoding steps of these batch sizes, without context."""
        return SLACK * np.array([self.line(n, 0)[0] for n in self.sizes.tolist()])

    @cached_property
    def per_token_s(self) -> float:
        """Time of one context token in one step."""
        most = self.engine.max_num_seqs
        sizes = {1, min(8, most), most}
        return SLACK * max(0.0, min((self.line(n, 1000 * n)[0] - self.line(n, 0)[0]) / (1000 * n) for n in sizes))

    @cached_property
    def lines(self) -> tuple[tuple[float, float], ...]:
        """Pairs (a, b): a + b B is at most the seconds of a decode step of B sequences, for every B."""
        hull = [0]
        for i in range(1, len(self.base_s)):
            while len(hull) > 1 and self._slope(hull[-2], hull[-1]) >= self._slope(hull[-2], i):
                hull.pop()
            hull.append(i)
        sloped = [(self.base_s[i] - self._slope(i, j) * self.sizes[i], self._slope(i, j)) for i, j in pairwise(hull)]
        rising = [(float(a), b) for a, b in sloped if a > 0 and b > 0]
        step = max(1, -(-len(rising) // MOST_LINES))
        return tuple(rising[::step]) or ((float(self.base_s.min()), 0.0),)

    def _slope(self, i: int, j: int) -> float:
        return float((self.base_s[j] - self.base_s[i]) / (self.sizes[j] - self.sizes[i]))

    @cached_property
    def prompt_token_s(self) -> float:
        """Time of the cheapest prompt token, in an iteration full of short chunks."""
        budget = max(self.engine.max_num_batched_tokens, 8192)
        sizes = {min(size, budget) for size in (64, 256, 1024, budget)}
        return SLACK * min(self.line(0, 0, [(n, 0)] * (budget // n))[0] / (n * (budget // n)) for n in sizes)

    @cached_property
    def prompts(self) -> tuple[Ints, Floats]:
        """Prompt lengths, and the least time of a lone prompt of at least that length."""
        sizes: Ints = np.unique(np.round(2.0 ** (np.arange(35) / 2)).astype("i8"))
        times_s = np.array([self.line(0, 0, [(n, 0)])[0] for n in sizes.tolist()])
        return sizes, SLACK * np.minimum.accumulate(times_s[::-1])[::-1]

    def prefill_s(self, tokens: Floats) -> Floats:
        """The least time of a lone prompt: at least the time of any shorter prompt, and at least the time of its own
        tokens."""
        sizes, least_s = self.prompts
        found: Floats = least_s[np.searchsorted(sizes, tokens, side="right") - 1]
        return np.maximum(found, tokens * self.prompt_token_s)

    def alone_s(self, lengths: Lengths, prefill_s: Floats) -> Floats:
        """Latency of each request when it runs alone. `prefill_s`: seconds of each request's prompt."""
        steps = lengths.output_tokens - 1
        contexts = steps * (lengths.prompt_tokens + steps / 2) * self.per_token_s
        return np.asarray(prefill_s + steps * float(self.base_s.min()) + contexts)

    def charged_s(self, lengths: Lengths, grid: Floats, prefill_s: Floats) -> Floats:
        """[request, L]: the least decoding charge of a request in time."""
        steps = (lengths.output_tokens - 1)[:, None]
        context_s = self.per_token_s * (lengths.prompt_tokens[:, None] + steps / 2)
        t = (grid - prefill_s[:, None]) / np.maximum(steps, 1) - context_s
        seats = min(float(self.engine.max_num_seqs), max(1.0, self.room_tokens / float(lengths.prompt_tokens.min())))
        part = np.zeros_like(t)
        for a, b in self.lines:
            wide = t > a + b
            slowest = np.where(wide, b * a / np.where(wide, t - a, 1.0), a)
            part = np.maximum(part, b + np.maximum(a / seats, slowest))
        return np.asarray(np.where(steps > 0, steps * (part + context_s), 0.0))


def _count(work_s: Floats, room: Floats) -> Floats:
    """[replicas, L]: the largest number of requests, cheapest first, whose work fits into the replicas' time; fractions
    count. `work_s`: [request, L], or [request, 1] for all L."""
    ordered = np.sort(work_s.T, axis=1)
    total = np.cumsum(ordered, axis=1)
    at = _num_up_to(total, room)
    rows, last = np.arange(len(ordered))[:, None], ordered.shape[1] - 1
    following = np.where(at > last, np.inf, ordered[rows, np.minimum(at, last)])
    left = room - np.where(at > 0, total[rows, np.maximum(at - 1, 0)], 0.0)
    part = np.where(np.isfinite(following), left / np.maximum(following, 1e-12), 0.0)
    return np.asarray((at + np.clip(part, 0.0, 1.0)).T)
