"""A lower bound on the GPU-hours of any fleet plan that serves a trace in time: a fluid relaxation, a linear program.

No plan needs less, whatever scales it, routes or orders: work may be cut as finely as one likes, done anywhere its
model is, all at once and in any order, start-up takes no time, instances come in fractions, and the future is known.

Sets and parameters
    s           slots of time, h_s seconds long; p places (pools of a region), k their kinds of instance
    c           classes of requests: of one model, that arrive in one slot and are due by the end of one other; a
                request is in one class for its prompt, due with its first token, and in one for its other tokens
    e           what an instance has: seconds of computing, KV cache, seats
    R_cke       what the whole of c takes of e on k: tokens at the least time that any iteration needs for one (the best
                batch there is), and contexts read; KV tokens times seconds, and seats times seconds, as each token
                takes one iteration, and no iteration is shorter than the shortest
    C_ke        what an instance of k has of it in a second: 1, its KV tokens, its seats
    m_cbe       the most that one request of bucket b of c takes of e, as a share of R_ce; n_cb how many there are
    V_g         requests of a group (a tier's first tokens, or its ends) that may miss: allowed violations
    g_p, L_rj   GPUs of an instance; GPUs of type j in region r
Variables       x_ps instances, at least as many as there must be; y_cske the share of c done there and then;
                d_cb requests that miss
Minimise        sum of g_p h_s x_ps over slots that are paid for
Subject to      sum over c of R_cke y_cske <= C_ke h_s sum over p of kind k of x_ps          for every k, s, e
                sum over s, k of y_cske + sum over b of m_cbe d_cb >= 1                      for every c, e
                d_cb <= n_cb;  sum over g of d_cb <= V_g;  sum over r, j of g_p x_ps <= L_rj
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import inf

import numpy as np
import numpy.typing as npt
from msgspec import Struct

from headway.core.errors import HeadwayError
from headway.planning.solver import Floats, matrix, minimise

BUCKETS = 6
"""By size, of the requests of a class: only large ones are worth leaving late."""
SAFE = 1.0 - 1e-6
"""The solver's tolerance, taken off."""
TIME_LIMIT_S = 60.0
RESOURCES = 3


class Best(Struct, frozen=True):
    """What one instance does at its best."""

    token_s: float
    """Of any iteration's time, the least to each of its tokens, prompt or output."""
    context_s: float
    """To each KV token that a decoding request reads."""
    tick_s: float
    """The shortest iteration."""
    kv_tokens: float
    """inf: what is held is not bounded (shared prefixes)."""
    seats: float


class Place(Struct, frozen=True):
    """A pool."""

    model: str
    region: str
    gpu: str
    gpus: int
    least: float
    best: Best


@dataclass(frozen=True)
class Work:
    """One model's requests, an element each. Times that are `inf`: nothing is due."""

    arrival_s: Floats
    first_by_s: Floats
    """When the first token is due; not after `done_by_s`."""
    done_by_s: Floats
    prompt_tokens: Floats
    output_tokens: Floats
    first_group: npt.NDArray[np.int64]
    """Its tier, where some first tokens of that tier may be late; -1: this one may not."""
    done_group: npt.NDArray[np.int64]
    """The same of its end."""


class Span(Struct, frozen=True):
    """What is paid for, and how finely time is cut."""

    from_s: float
    to_s: float
    num_slots: int = 48


@dataclass(frozen=True)
class _Class:
    """One class: which slots it may be done in, what it takes (kinds by resources), what its largest requests take."""

    model: str
    slots: range
    needs: Floats
    group: tuple[str, int] | None
    counts: Floats
    """By bucket."""
    most: Floats
    """Buckets by resources: share of the class that one request of the bucket is, at most."""


def least_gpu_hours(
    works: Mapping[str, Work],
    places: Sequence[Place],
    limits: Mapping[tuple[str, str], float],
    span: Span,
    allowed: float,
) -> float:
    """GPU-hours from `span.from_s` to `to_s` that no plan goes below.

    `allowed`: share of each group's requests whose first token may be late, and share that may end late or never.
    `limits`: GPUs by region and type. HeadwayError where no plan is there, or without SciPy.
    """
    edges = np.unique(np.concatenate([np.linspace(0.0, span.to_s, span.num_slots + 1), [span.from_s]]))
    kinds = list(dict.fromkeys((place.model, place.best) for place in places))
    classes = [found for model, work in works.items() for found in _classes(model, work, edges, kinds)]
    return _Relaxed(edges, places, kinds, classes).solve(limits, span, _misses(works, allowed))


def _misses(works: Mapping[str, Work], allowed: float) -> dict[tuple[str, int], float]:
    """V_g: how many of each group may be late."""
    found: dict[tuple[str, int], float] = {}
    for work in works.values():
        for what, due_s, group in _dues(work):
            for tier in np.unique(group[group >= 0]):
                num = float((np.isfinite(due_s) & (group == tier)).sum())
                found[what, int(tier)] = found.get((what, int(tier)), 0.0) + allowed * num
    return found


def _dues(work: Work) -> tuple[tuple[str, Floats, npt.NDArray[np.int64]], ...]:
    """What requests are due for, when, and with whom they may miss it."""
    return ("first", work.first_by_s, work.first_group), ("done", work.done_by_s, work.done_group)


def _classes(model: str, work: Work, edges: Floats, kinds: Sequence[tuple[str, Best]]) -> Iterator[_Class]:
    """The requests of a model, put together by what they are due for, when they come, and when that is due."""
    last = len(edges) - 2
    came = np.clip(np.searchsorted(edges, work.arrival_s, "right") - 1, 0, last)
    for what, due_s, group in _dues(work):
        due = np.clip(np.searchsorted(edges, np.where(np.isfinite(due_s), due_s, 0.0), "left") - 1, came, last)
        code = (came * (last + 1) + due) * 1024 + group + 1
        code[~np.isfinite(due_s)] = -1
        order = np.argsort(code, kind="stable")
        for rows in np.split(order, np.flatnonzero(np.diff(code[order])) + 1):
            if not len(rows) or code[rows[0]] < 0:
                continue
            sizes = np.stack([_sizes(what, work, rows, best) if name == model else np.zeros((len(rows), RESOURCES))
                              for name, best in kinds])  # fmt: skip
            if not sizes.any():
                continue
            tier = int(group[rows[0]])
            counts, most = _buckets(sizes)
            yield _Class(
                model, range(int(came[rows[0]]), int(due[rows[0]]) + 1), sizes.sum(axis=1),
                None if tier < 0 else (what, tier), counts, most,
            )  # fmt: skip


def _sizes(what: str, work: Work, rows: npt.NDArray[np.intp], best: Best) -> Floats:
    """Requests by resources: seconds of computing, KV token-seconds, seat-seconds."""
    prompt = work.prompt_tokens[rows]
    found = np.zeros((len(rows), RESOURCES))
    if what == "first":
        found[:, 0] = prompt * best.token_s
        return found
    ticks = np.maximum(work.output_tokens[rows] - 1, 0.0)
    contexts = ticks * (prompt + np.maximum(ticks - 1, 0.0) / 2)
    found[:, 0] = ticks * best.token_s + contexts * best.context_s
    found[:, 1] = contexts * best.tick_s if best.kv_tokens < inf else 0.0
    found[:, 2] = ticks * best.tick_s
    return found


def _buckets(sizes: Floats) -> tuple[Floats, Floats]:
    """How many requests each bucket has, and the largest share of the whole that one of them takes of each resource."""
    total = sizes.sum(axis=1, keepdims=True)
    shares = np.divide(sizes, total, out=np.zeros_like(sizes), where=total > 0).max(axis=0)
    some = np.array_split(np.argsort(shares.max(axis=1), kind="stable"), min(BUCKETS, len(shares)))
    return np.array([float(len(rows)) for rows in some]), np.array([shares[rows].max(axis=0) for rows in some])


class _Relaxed:
    """The program: variables x, then y, then d; rows as they are added."""

    def __init__(
        self, edges: Floats, places: Sequence[Place], kinds: Sequence[tuple[str, Best]], classes: Sequence[_Class]
    ) -> None:
        self.widths_s = np.diff(edges)
        self.edges, self.places, self.kinds, self.classes = edges, places, kinds, classes
        self.num_slots = len(self.widths_s)
        self.num = len(places) * self.num_slots
        self.upper = [inf] * self.num
        self.entries: list[tuple[int, int, float]] = []
        self.low: list[float] = []
        self.high: list[float] = []

    def solve(
        self, limits: Mapping[tuple[str, str], float], span: Span, misses: Mapping[tuple[str, int], float]
    ) -> float:
        """GPU-hours."""
        capacity = self._capacities()
        missing: dict[tuple[str, int], list[int]] = {}
        for each in self.classes:
            self._serve(each, capacity, missing)
        for group, columns in missing.items():
            self._row([(column, 1.0) for column in columns], -inf, misses[group])
        self._limit(limits)
        cost = np.zeros(self.num)
        paid = (self.edges[:-1] >= span.from_s) * self.widths_s / 3600
        for p, place in enumerate(self.places):
            cost[p * self.num_slots : (p + 1) * self.num_slots] = place.gpus * paid
        found = minimise(
            cost, matrix(self.entries, len(self.low), self.num), np.array(self.low), np.array(self.high),
            np.array(self.upper), integer=[False] * self.num, time_limit_s=TIME_LIMIT_S,
        )  # fmt: skip
        if found.status == "infeasible":
            raise HeadwayError("no plan serves this trace in time: GPU limits or max_replicas leave too little")
        if found.status != "optimal":
            raise HeadwayError(f"the bound was not found within {TIME_LIMIT_S:g} s")
        return max(float(cost @ np.array(found.values)) * SAFE, 0.0)

    def _row(self, entries: Sequence[tuple[int, float]], low: float, high: float) -> int:
        self.entries += [(len(self.low), column, value) for column, value in entries]
        self.low.append(low)
        self.high.append(high)
        return len(self.low) - 1

    def _column(self, upper: float) -> int:
        self.upper.append(upper)
        self.num += 1
        return self.num - 1

    def _capacities(self) -> dict[tuple[int, int, int], int]:
        """Rows by kind, slot and resource: what is done there, less what there is."""
        found = {}
        for k, (model, best) in enumerate(self.kinds):
            here = [p for p, place in enumerate(self.places) if (place.model, place.best) == (model, best)]
            for e, has in enumerate((1.0, best.kv_tokens, best.seats)):
                if has < inf:
                    for s, width_s in enumerate(self.widths_s):
                        own = [(p * self.num_slots + s, -has * float(width_s)) for p in here]
                        found[k, s, e] = self._row(own, -inf, 0.0)
        return found

    def _serve(
        self, each: _Class, capacity: Mapping[tuple[int, int, int], int], missing: dict[tuple[str, int], list[int]]
    ) -> None:
        """All of a class is done, but for what may miss."""
        late = [] if each.group is None else [self._column(count) for count in each.counts]
        if each.group is not None:
            missing.setdefault(each.group, []).extend(late)
        own = [k for k, (model, _) in enumerate(self.kinds) if model == each.model]
        for e in range(RESOURCES):
            if not all(each.needs[k, e] > 0 and (k, 0, e) in capacity for k in own):
                continue  # somewhere it costs nothing of this
            done = []
            for k in own:
                for s in each.slots:
                    done.append(self._column(1.0))
                    self.entries.append((capacity[k, s, e], done[-1], float(each.needs[k, e])))
            shares = zip(late, each.most[:, e], strict=False)
            self._row([(column, 1.0) for column in done] + [(d, float(share)) for d, share in shares], 1.0, inf)

    def _limit(self, limits: Mapping[tuple[str, str], float]) -> None:
        """x is what it must be at least, and within the GPUs of each region."""
        for s in range(self.num_slots):
            for p, place in enumerate(self.places):
                if place.least > 0:
                    self._row([(p * self.num_slots + s, 1.0)], place.least, inf)
            for (region, gpu), count in limits.items():
                here = [(p * self.num_slots + s, float(place.gpus)) for p, place in enumerate(self.places)
                        if (place.region, place.gpu) == (region, gpu)]  # fmt: skip
                if here:
                    self._row(here, -inf, count)
