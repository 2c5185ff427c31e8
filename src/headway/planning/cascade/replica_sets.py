"""Every set of replicas that so many GPUs can make (3.2, parallelism strategy search)."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import combinations, product
from math import ceil, floor, inf, sqrt

import numpy as np
import numpy.typing as npt

from headway.catalog.coefficients import Coefficients
from headway.core.errors import HeadwayError
from headway.core.fleet import Engine, Gpu, Model, Parallel, Role
from headway.perf import memory
from headway.planning.cascade.allocation import Ints, Room, as_room
from headway.planning.cascade.problem import Problem, Replicas, ReplicaSet, Split, longest_tokens, of_type
from headway.planning.combos.estimate import InstanceSpeed
from headway.planning.combos.problem import DEFAULT_NETWORK_BYTES_PER_S, Offer, ServiceSlo, WorkloadPattern


@dataclass(frozen=True, eq=False)
class Sets:
    """Sets of replicas of one model: row i has `counts[i, j]` replicas of `shapes[j]`, `gpus[i]` GPUs in all."""

    shapes: tuple[Parallel, ...]
    counts: Ints
    kinds: tuple[int, ...] = ()
    """The type of GPU of each shape; empty: there is one type only."""
    names: tuple[str, ...] = ()
    """Of the types."""
    room: Room | None = None
    """How GPUs of several types are numbered; None: there is one type only."""
    roles: tuple[Role, ...] = ()
    """Of the replicas of each shape; empty: all are mixed."""

    def __len__(self) -> int:
        return len(self.counts)

    @cached_property
    def gpus(self) -> Ints:
        """GPUs of each set."""
        sizes = np.array([shape.num_gpus for shape in self.shapes], "i8")
        found: Ints = self.counts @ sizes
        return found

    @cached_property
    def vectors(self) -> Ints:
        """[set, type]: GPUs of each type."""
        sizes = np.zeros((len(self.shapes), max(len(self.names), 1)), "i8")
        for j, shape in enumerate(self.shapes):
            sizes[j, self.kinds[j] if self.kinds else 0] = shape.num_gpus
        found: Ints = self.counts @ sizes
        return found

    @cached_property
    def cells(self) -> Ints:
        """What each set takes, as tables number it: with one type of GPU, how many."""
        return self.gpus if self.room is None else self.room.cells(self.vectors)

    def on(self, j: int) -> str:
        """The type of GPU of a shape; empty where there is one only."""
        return self.names[self.kinds[j]] if self.kinds else ""

    def role(self, j: int) -> Role:
        """What the replicas of a shape are for."""
        return self.roles[j] if self.roles else "mixed"

    @cached_property
    def are_split(self) -> npt.NDArray[np.bool_]:
        """Whether each set has a combo."""
        split = [j for j in range(len(self.shapes)) if self.role(j) != "mixed"]
        return np.asarray((self.counts[:, split] > 0).any(axis=1))

    def some(self, rows: npt.NDArray[np.bool_] | np.bool_) -> Sets:
        """These sets only."""
        return replace(self, counts=self.counts[np.asarray(rows)])

    def __getitem__(self, i: int) -> ReplicaSet:
        pairs = zip(self.shapes, self.counts[i].tolist(), strict=True)
        return ReplicaSet(
            tuple(Replicas(s.tp, s.pp, n, self.on(j), self.role(j)) for j, (s, n) in enumerate(pairs) if n)
        )


SetsOf = Callable[[int, tuple[bool, ...]], Sets]
"""The replica sets of a stage, given which stages get any requests."""


def shapes(
    model: Model, gpu: Gpu, engine: Engine, num_gpus: int, server: int, max_pp: int
) -> tuple[tuple[Parallel, ...], str]:
    """Shapes that hold the model, smallest first; and, where there are none, why.

    A tensor-parallel group lies within a server: its size is a power of two that divides the server's, so that
    groups of whatever sizes fill servers without gaps. Stages of a pipeline may lie in different servers.
    """
    found, reason = [], f"{model.name}: no shape of at most {num_gpus} GPUs"
    for tp in (2**i for i in range(server.bit_length())):
        if server % tp:
            break
        for pp in range(1, max_pp + 1):
            try:
                memory.plan(model, gpu, engine, Parallel(tp, pp))
            except HeadwayError as error:
                reason = str(error)
            else:
                if tp * pp <= num_gpus:
                    found.append(Parallel(tp, pp))
    found.sort(key=lambda shape: (shape.num_gpus, shape.pp))
    return tuple(found), "" if found else reason


def replica_sets(of: Sequence[Parallel], num_gpus: int, max_kinds: int | None) -> Sets:
    """Every set of 1 to `num_gpus` GPUs with at most `max_kinds` different shapes."""
    rows = [row for row in _rows(tuple(of), num_gpus, len(of) if max_kinds is None else max_kinds) if any(row)]
    return Sets(tuple(of), np.array(rows, "i8").reshape(len(rows), len(of)))


def _rows(of: tuple[Parallel, ...], left: int, kinds: int) -> Iterator[tuple[int, ...]]:
    if not of or not kinds:
        yield (0,) * len(of)
        return
    first, rest = of[0], of[1:]
    for count in range(left // first.num_gpus + 1):
        for row in _rows(rest, left - count * first.num_gpus, kinds - (count > 0)):
            yield (count, *row)


def uniform_sets(of: Sequence[Parallel], num_gpus: int, server: int) -> Sets:
    """One set for each number of GPUs: tensor parallelism within a server, replicas across servers (4.3).

    Each server's GPUs, and those of the last one that is not full, are one replica of the largest shape that fits,
    then another of what is left. A model that fits in no part of a server is spread over servers as a pipeline.
    """
    flat = [shape for shape in of if shape.pp == 1] or list(of)
    rows: dict[tuple[int, ...], None] = {}
    for total in range(1, num_gpus + 1):
        servers = [server] * (total // server) + [total % server] if flat[0].pp == 1 else [total]
        row = [0] * len(of)
        for left in servers:
            for i, shape in sorted(enumerate(of), key=lambda pair: -pair[1].num_gpus):
                if shape in flat:
                    row[i] += left // shape.num_gpus
                    left %= shape.num_gpus
        if any(row):
            rows[tuple(row)] = None
    return Sets(tuple(of), np.array(list(rows), "i8").reshape(len(rows), len(of)))


def among(sets: Sets, of: Sequence[Parallel]) -> Sets:
    """Those sets whose replicas all have one of these shapes."""
    others = [i for i, each in enumerate(sets.shapes) if each not in of]
    return sets.some(~sets.counts[:, others].any(axis=1))


def unlike(by_type: Sequence[Sets], names: tuple[str, ...], room: Room, max_types: int | None) -> Sets:
    """Sets of replicas on several types of GPU: of each type one of its own sets or none, of so many types at most."""
    columns = [len(sets.shapes) for sets in by_type]
    starts = np.concatenate([[0], np.cumsum(columns)]).tolist()
    most = len(by_type) if max_types is None else max_types
    rows = [np.zeros((0, starts[-1]), "i8")]
    for num in range(1, most + 1):
        for some in combinations(range(len(by_type)), num):
            picks = np.indices([len(by_type[t]) for t in some]).reshape(num, -1)
            made = np.zeros((picks.shape[1], starts[-1]), "i8")
            for t, pick in zip(some, picks, strict=True):
                made[:, starts[t] : starts[t + 1]] = by_type[t].counts[pick]
            rows.append(made)
    shapes = tuple(shape for sets in by_type for shape in sets.shapes)
    kinds = tuple(t for t, num in enumerate(columns) for _ in range(num))
    return Sets(shapes, np.concatenate(rows), kinds, names, room)


def all_sets(problem: Problem) -> SetsOf:
    """Every feasible set of every model. HeadwayError where the first model fits on no shape."""
    found = []
    for i, model in enumerate(problem.models):
        by_type, reasons = [], list[str]()
        for offer in problem.offers:
            num_gpus = offer.limit or 0
            of, reason = shapes(model, offer.gpu, problem.engine, num_gpus, offer.server, problem.max_pp)
            by_type.append(replica_sets(of, num_gpus, problem.max_kinds))
            reasons.append(f"{num_gpus} x {offer.gpu.name}: {reason}")
        if i == 0 and not any(len(sets) for sets in by_type):
            raise HeadwayError("; ".join(reasons))
        splits = problem.splits.get(model.name, ())
        found.append(with_combos(_together(problem, by_type), splits, problem.offers, problem.max_types))
    return lambda stage, used: found[stage]


def _together(problem: Problem, by_type: Sequence[Sets]) -> Sets:
    """One model's sets of each type, and of several."""
    if not problem.others:
        return by_type[0]
    return unlike(by_type, tuple(offer.gpu.name for offer in problem.offers), as_room(problem), problem.max_types)


LIMITS = (1.25, 2.0, inf)
"""Times what a type's fastest shape takes for a lone prompt, and for a lone step: how slow a shape may be."""
ROLES: tuple[Role, Role] = ("prefill", "decode")
Shape = tuple[int, Parallel]
"""On a type of GPU."""


def offered(
    problem: Problem, coefficients: Mapping[str, Coefficients], network_bytes_per_s: float = DEFAULT_NETWORK_BYTES_PER_S
) -> dict[str, tuple[Split, ...]]:
    """Kinds of combos for each model. `coefficients`: in place of the catalog's, as in `StepBounds`."""
    return {
        model.name: _Phases(problem, i, coefficients, network_bytes_per_s).splits()
        for i, model in enumerate(problem.models)
    }


class _Phases:
    """What replicas of each shape can do of one model's prompts and answers, each for itself."""

    def __init__(
        self, problem: Problem, stage: int, coefficients: Mapping[str, Coefficients], network_bytes_per_s: float
    ) -> None:
        self.problem, self.model = problem, problem.models[stage]
        lengths = problem.lengths(stage, np.ones(len(problem.scores), np.bool_))
        longest = float((lengths.prompt_tokens + lengths.output_tokens).max())
        self.pattern = WorkloadPattern(None, float(lengths.computed_tokens.mean()), float(lengths.output_tokens.mean()))
        kv_bytes = memory.kv_bytes_per_token(self.model, problem.engine.kv_dtype_bytes)
        self.network_rps = network_bytes_per_s / (kv_bytes * self.pattern.prompt_tokens)
        self.limits = [offer.limit or 0 for offer in problem.offers]
        self.speeds = dict[Shape, InstanceSpeed]()
        for t, offer in enumerate(problem.offers):
            own = coefficients.get(of_type(self.model, offer.gpu.name if t else ""))
            for shape in _flat(problem, self.model, offer):
                found = InstanceSpeed(self.model, offer.gpu, problem.engine, shape.tp, own)
                if longest_tokens(found.kv_tokens, problem.engine) >= longest:
                    self.speeds[t, shape] = found

    def splits(self) -> tuple[Split, ...]:
        """Of every pair of types, and every pair of limits."""
        types = range(len(self.problem.offers))
        prefills, decodes = (
            list(dict.fromkeys(self._cheapest(on, limit, role) for on, limit in product(types, LIMITS)))
            for role in ROLES
        )
        return tuple(
            self._split(prefill, decode)
            for prefill, decode in product(prefills, decodes)
            if prefill is not None and decode is not None and min(_left((prefill, decode), (1, 1), self.limits)) >= 0
        )

    def _cheapest(self, on: int, limit: float, role: Role) -> Shape | None:
        """The shape on a type with the fewest GPU seconds a request, within a limit; None: there is none."""
        rps = {shape: self._rps(shape, limit, role) / shape[1].num_gpus for shape in self.speeds if shape[0] == on}
        best = max(rps, key=lambda shape: rps[shape], default=None)
        return None if best is None or rps[best] <= 0 else best

    def _rps(self, shape: Shape, limit: float, role: Role) -> float:
        alike = [speeds for (on, _), speeds in self.speeds.items() if on == shape[0]]
        speeds = self.speeds[shape]
        if role == "prefill":
            fastest_s = min(each.prompts_s(self.pattern, 1) for each in alike)
            return min(speeds.prefill_rps(self.pattern, ServiceSlo(ttft_s=_times(limit, fastest_s))), self.network_rps)
        fastest_s = min(each.step_s(self.pattern, 1) for each in alike)
        return min(speeds.decode_rps(self.pattern, ServiceSlo(tpot_s=_times(limit, fastest_s))), self.network_rps)

    def _split(self, prefill: Shape, decode: Shape) -> Split:
        prompts_rps = self._rps(prefill, inf, "prefill")
        ratios = [rps / prompts_rps for limit in LIMITS if (rps := self._rps(decode, limit, "decode")) > 0]
        names = [offer.gpu.name for offer in self.problem.offers] if self.problem.others else [""]
        return Split(prefill[1], decode[1], min(ratios), max(ratios), names[prefill[0]], names[decode[0]])


def _times(limit: float, fastest_s: float) -> float | None:
    return None if limit == inf else limit * fastest_s


def _flat(problem: Problem, model: Model, offer: Offer) -> list[Parallel]:
    """Shapes without pipelines, as Cauchy's."""
    found, _ = shapes(model, offer.gpu, problem.engine, offer.limit or 0, offer.server, 1)
    return list(found)


def with_combos(mixed: Sets, splits: Sequence[Split], offers: Sequence[Offer], max_types: int | None) -> Sets:
    """The same sets, and those with a combo: alone, or beside mixed replicas that have the shape of one of its parts.

    Beside mixed replicas, only combos in the middle of their balance.
    """
    if not splits:
        return mixed
    columns = _Columns(mixed, splits)
    most = len(offers) if max_types is None else max_types
    limits = [offer.limit or 0 for offer in offers]
    rows = [row for split in splits for row in columns.rows(split, limits) if columns.num_types(split) <= most]
    counts = np.zeros((len(mixed), len(columns.shapes)), "i8")
    counts[:, : len(mixed.shapes)] = mixed.counts
    more = np.array(rows, "i8").reshape(len(rows), len(columns.shapes))
    kinds = tuple(t for t, _ in columns.shapes) if mixed.names else ()
    every = np.unique(more, axis=0) if len(more) else more
    return replace(
        mixed,
        shapes=tuple(shape for _, shape in columns.shapes),
        counts=np.concatenate([counts, every]),
        kinds=kinds,
        roles=columns.roles,
    )


class _Columns:
    """The shapes of mixed replicas, then those that prefill in combos, then those that decode."""

    def __init__(self, mixed: Sets, splits: Sequence[Split]) -> None:
        self.names = mixed.names
        kinds = mixed.kinds or (0,) * len(mixed.shapes)
        self.mixed = {each: j for j, each in enumerate(zip(kinds, mixed.shapes, strict=True))}
        both = [self.parts(split) for split in splits]
        parts = list(dict.fromkeys((role, pair[i]) for i, role in enumerate(ROLES) for pair in both))
        self.at = {part: len(self.mixed) + j for j, part in enumerate(parts)}
        self.shapes = (*self.mixed, *(shape for _, shape in parts))
        mixed_role: Role = "mixed"
        self.roles = (*(mixed_role for _ in self.mixed), *(role for role, _ in parts))

    def parts(self, split: Split) -> tuple[Shape, Shape]:
        """Who prefills, and who decodes."""
        return (self._type(split.prefill_gpu), split.prefill), (self._type(split.decode_gpu), split.decode)

    def _type(self, gpu: str) -> int:
        return self.names.index(gpu) if gpu else 0

    def num_types(self, split: Split) -> int:
        """That the combo has."""
        return len({on for on, _ in self.parts(split)})

    def rows(self, split: Split, limits: Sequence[int]) -> Iterator[list[int]]:
        """Counts of every shape."""
        parts = self.parts(split)
        middle = sqrt(split.least * split.most)
        for num in _counts(split.least, split.most, parts, limits):
            row = [0] * len(self.shapes)
            for role, part, count in zip(ROLES, parts, num, strict=True):
                row[self.at[role, part]] = count
            yield row
            if num[0] not in (max(1, floor(middle * num[1])), max(1, ceil(middle * num[1]))):
                continue
            left = _left(parts, num, limits)
            for on, shape in dict.fromkeys(parts):
                for more in range(1, left[on] // shape.num_gpus + 1):
                    beside = row.copy()
                    beside[self.mixed[on, shape]] = more
                    yield beside


def _counts(least: float, most: float, parts: tuple[Shape, Shape], limits: Sequence[int]) -> Iterator[tuple[int, int]]:
    """How many prefill and how many decode: what is balanced, and within the GPUs of each type."""
    on, decode = parts[1]
    for answering in range(1, limits[on] // decode.num_gpus + 1):
        for prompting in range(max(1, floor(least * answering)), max(1, ceil(most * answering)) + 1):
            if min(_left(parts, (prompting, answering), limits)) < 0:
                break
            yield prompting, answering


def _left(parts: tuple[Shape, Shape], num: tuple[int, int], limits: Sequence[int]) -> list[int]:
    """GPUs of each type that such a combo leaves over; fewer than none where it takes more than there are."""
    left = list(limits)
    for (on, shape), count in zip(parts, num, strict=True):
        left[on] -= count * shape.num_gpus
    return left
