"""The sets of replicas that a stage may have (3.2, parallelism strategy search), and the kinds of combos in them.

A set has mixed replicas, or one combo, or both. In a combo some replicas prefill and the others decode (Cauchy 3.1,
3.3). A combo has any number of replicas for either phase, and every prefill replica hands over to every decode replica:
one large combo serves whatever several small ones of its kind serve.

Kinds of combos are preselected by Cauchy's costs: the GPU seconds of a mean prompt and of a mean answer in the
step-time model. For each type of GPU and each of `LIMITS`, the shapes within the limit with the fewest GPU seconds per
prompt and per answer are selected. All pairs of selected shapes are kinds. The ratio of prefill to decode replicas
makes both phases serve equally many requests, for limits from the tightest to none. Shapes whose KV cache cannot hold
the longest request are left out.
"""

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
from headway.planning.cascade.allocation import GpuBudget, Ints, budget_of
from headway.planning.cascade.problem import (
    CascadeProblem,
    ComboShapes,
    Replicas,
    ReplicaSet,
    coefficients_key,
    longest_request_tokens,
)
from headway.planning.combos.estimate import InstanceSpeed
from headway.planning.combos.problem import DEFAULT_NETWORK_BYTES_PER_S, Offer, ServiceSlo, WorkloadPattern

LIMITS = (1.25, 2.0, inf)
"""How slow a shape may be: factors on a GPU type's fastest shape, for a lone prompt and for a lone step."""
ROLES: tuple[Role, Role] = ("prefill", "decode")
TypedShape = tuple[int, Parallel]
"""A shape on a type of GPU."""
RoleShape = tuple[Role, TypedShape]


@dataclass(frozen=True, eq=False)
class ReplicaSets:
    """Sets of replicas of one model: row i has `counts[i, j]` replicas of `shapes[j]`."""

    shapes: tuple[Parallel, ...]
    counts: Ints
    types: tuple[int, ...] = ()
    """The type of GPU of each shape; empty if there is one type."""
    type_names: tuple[str, ...] = ()
    budget: GpuBudget | None = None
    """The GPUs of each type, whose limits define the numbers of cells; None if there is one type."""
    roles: tuple[Role, ...] = ()
    """The role of the replicas of each shape; empty if all are mixed."""

    def __len__(self) -> int:
        return len(self.counts)

    @cached_property
    def vectors(self) -> Ints:
        """[set, type]: GPUs of each type."""
        sizes = np.zeros((len(self.shapes), max(len(self.type_names), 1)), "i8")
        for j, shape in enumerate(self.shapes):
            sizes[j, self.types[j] if self.types else 0] = shape.num_gpus
        return np.asarray(self.counts @ sizes)

    @cached_property
    def cells(self) -> Ints:
        """The cell of each set; with one type of GPU, its number of GPUs."""
        return self.vectors[:, 0] if self.budget is None else self.budget.cells(self.vectors)

    def gpu_of(self, j: int) -> str:
        """The type of GPU of a shape; empty if there is one type."""
        return self.type_names[self.types[j]] if self.types else ""

    def role(self, j: int) -> Role:
        return self.roles[j] if self.roles else "mixed"

    @cached_property
    def are_split(self) -> npt.NDArray[np.bool_]:
        """Whether each set has a combo."""
        split = [j for j in range(len(self.shapes)) if self.role(j) != "mixed"]
        return np.asarray((self.counts[:, split] > 0).any(axis=1))

    def select(self, rows: npt.NDArray[np.bool_] | np.bool_) -> ReplicaSets:
        return replace(self, counts=self.counts[np.asarray(rows)])

    def __getitem__(self, i: int) -> ReplicaSet:
        pairs = zip(self.shapes, self.counts[i].tolist(), strict=True)
        return ReplicaSet(
            tuple(Replicas(s.tp, s.pp, n, self.gpu_of(j), self.role(j)) for j, (s, n) in enumerate(pairs) if n)
        )


Unit = tuple[Replicas, ...]
"""A unit that starts and stops together: a replica, or the prefill and decode replicas of one combo."""
NO_SETS = ReplicaSets((), np.zeros((0, 0), "i8"))
StageSets = Callable[[int, tuple[bool, ...]], ReplicaSets]
"""Returns the replica sets of a stage, given the stages that get requests."""


def all_sets(problem: CascadeProblem) -> StageSets:
    """All feasible sets of every model. Raises HeadwayError if the first model fits on no shape."""
    every = []
    for i, model in enumerate(problem.models):
        by_type, reasons = [], list[str]()
        for offer in problem.offers:
            num_gpus = offer.limit or 0
            shapes, reason = feasible_shapes(model, offer.gpu, problem.engine, num_gpus, offer.server, problem.max_pp)
            by_type.append(replica_sets(shapes, num_gpus, problem.max_kinds))
            reasons.append(f"{num_gpus} x {offer.gpu.name}: {reason}")
        if i == 0 and not any(len(sets) for sets in by_type):
            raise HeadwayError("; ".join(reasons))
        mixed = by_type[0]
        if problem.other_offers:
            names = tuple(offer.gpu.name for offer in problem.offers)
            mixed = across_types(by_type, names, budget_of(problem), problem.max_types)
        kinds = problem.combo_kinds.get(model.name, ())
        every.append(with_combos(mixed, kinds, problem.offers, problem.max_types))
    return lambda stage, used: every[stage]


def feasible_shapes(
    model: Model, gpu: Gpu, engine: Engine, num_gpus: int, server: int, max_pp: int
) -> tuple[tuple[Parallel, ...], str]:
    """Shapes that hold the model, smallest first; without any, the reason.

    A tensor-parallel group lies within a server. Its size is a power of two that divides the server's size, so that
    groups fill servers without gaps. Stages of a pipeline may lie in different servers.
    """
    feasible, reason = [], f"{model.name}: no shape of at most {num_gpus} GPUs"
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
                    feasible.append(Parallel(tp, pp))
    feasible.sort(key=lambda shape: (shape.num_gpus, shape.pp))
    return tuple(feasible), "" if feasible else reason


def replica_sets(shapes: Sequence[Parallel], num_gpus: int, max_kinds: int | None) -> ReplicaSets:
    """All sets of 1 to `num_gpus` GPUs with at most `max_kinds` different shapes."""
    most = len(shapes) if max_kinds is None else max_kinds
    rows = [row for row in _rows(tuple(shapes), num_gpus, most) if any(row)]
    return ReplicaSets(tuple(shapes), np.array(rows, "i8").reshape(len(rows), len(shapes)))


def _rows(shapes: tuple[Parallel, ...], left: int, kinds: int) -> Iterator[tuple[int, ...]]:
    if not shapes or not kinds:
        yield (0,) * len(shapes)
        return
    first, rest = shapes[0], shapes[1:]
    for count in range(left // first.num_gpus + 1):
        for row in _rows(rest, left - count * first.num_gpus, kinds - (count > 0)):
            yield (count, *row)


def uniform_sets(shapes: Sequence[Parallel], num_gpus: int, server: int) -> ReplicaSets:
    """One set for each number of GPUs: tensor parallelism within a server, replicas across servers (4.3).

    The GPUs of each server, and of a last, partly used server, form replicas: the largest shape that fits, then the
    largest that fits the remaining GPUs, and so on. A model that fits into no part of a server becomes a pipeline over
    servers.
    """
    flat = [shape for shape in shapes if shape.pp == 1] or list(shapes)
    rows: dict[tuple[int, ...], None] = {}
    for total in range(1, num_gpus + 1):
        servers = [server] * (total // server) + [total % server] if flat[0].pp == 1 else [total]
        row = [0] * len(shapes)
        for left in servers:
            for i, shape in sorted(enumerate(shapes), key=lambda pair: -pair[1].num_gpus):
                if shape in flat:
                    row[i] += left // shape.num_gpus
                    left %= shape.num_gpus
        if any(row):
            rows[tuple(row)] = None
    return ReplicaSets(tuple(shapes), np.array(list(rows), "i8").reshape(len(rows), len(shapes)))


def with_units(sets: ReplicaSets, units: Mapping[Unit, int | None]) -> ReplicaSets:
    """The sets that consist of whole units: replicas of pools, and combos. `units` maps each unit to its maximum
    number; None: unlimited."""
    columns = {(sets.gpu_of(j), shape, sets.role(j)): j for j, shape in enumerate(sets.shapes)}
    counts, most = sets.counts, np.zeros(len(sets.shapes), "i8")
    is_split, is_whole = sets.are_split, np.zeros(len(sets), np.bool_)
    split = [j for j in range(len(sets.shapes)) if sets.role(j) != "mixed"]
    for unit, limit in units.items():
        own = {columns.get((part.gpu, part.parallel, part.role)): part.count for part in unit}
        if None in own:
            continue
        bound = int(counts.max(initial=0)) if limit is None else limit
        if len(unit) == 1:
            most[next(iter(own))] = bound
            continue
        num = np.min([counts[:, j] // count for j, count in own.items()], axis=0)
        same = [counts[:, j] == num * own.get(j, 0) for j in split]
        is_whole |= np.logical_and.reduce(same) & (num >= 1) & (num <= bound)
    mixed = [j for j in range(len(sets.shapes)) if sets.role(j) == "mixed"]
    return sets.select((counts[:, mixed] <= most[mixed]).all(axis=1) & (~is_split | is_whole))


def across_types(
    by_type: Sequence[ReplicaSets], names: tuple[str, ...], budget: GpuBudget, max_types: int | None
) -> ReplicaSets:
    """Sets on several types of GPU: one set of each type or none, on at most `max_types` types."""
    columns = [len(sets.shapes) for sets in by_type]
    starts = np.concatenate([[0], np.cumsum(columns)]).tolist()
    most = len(by_type) if max_types is None else max_types
    rows = [np.zeros((0, starts[-1]), "i8")]
    for num in range(1, most + 1):
        for types in combinations(range(len(by_type)), num):
            picks = np.indices([len(by_type[t]) for t in types]).reshape(num, -1)
            counts = np.zeros((picks.shape[1], starts[-1]), "i8")
            for t, pick in zip(types, picks, strict=True):
                counts[:, starts[t] : starts[t + 1]] = by_type[t].counts[pick]
            rows.append(counts)
    shapes = tuple(shape for sets in by_type for shape in sets.shapes)
    type_of_shape = tuple(t for t, num in enumerate(columns) for _ in range(num))
    return ReplicaSets(shapes, np.concatenate(rows), type_of_shape, names, budget)


# Combos.


def combo_kinds_of(
    problem: CascadeProblem,
    coefficients: Mapping[str, Coefficients],
    network_bytes_per_s: float = DEFAULT_NETWORK_BYTES_PER_S,
) -> dict[str, tuple[ComboShapes, ...]]:
    """The kinds of combos of each model. `coefficients`: replace the catalog's, as in `StepTimeBounds`."""
    return {
        model.name: _PhaseRates(problem, i, coefficients, network_bytes_per_s).combo_kinds()
        for i, model in enumerate(problem.models)
    }


class _PhaseRates:
    """Prompts and answers per second of the replicas of each shape, for one model."""

    def __init__(
        self, problem: CascadeProblem, stage: int, coefficients: Mapping[str, Coefficients], network_bytes_per_s: float
    ) -> None:
        self.problem, model, engine = problem, problem.models[stage], problem.engine
        lengths = problem.lengths(stage, np.ones(len(problem.scores), np.bool_))
        longest = float((lengths.prompt_tokens + lengths.output_tokens).max())
        self.pattern = WorkloadPattern(None, float(lengths.computed_tokens.mean()), float(lengths.output_tokens.mean()))
        kv_bytes = memory.kv_bytes_per_token(model, engine.kv_dtype_bytes)
        self.network_rps = network_bytes_per_s / (kv_bytes * self.pattern.prompt_tokens)
        self.limits = [offer.limit or 0 for offer in problem.offers]
        self.speeds = dict[TypedShape, InstanceSpeed]()
        for t, offer in enumerate(problem.offers):
            own = coefficients.get(coefficients_key(model, offer.gpu.name if t else ""))
            flat, _ = feasible_shapes(model, offer.gpu, engine, offer.limit or 0, offer.server, 1)
            for shape in flat:
                speeds = InstanceSpeed(model, offer.gpu, engine, shape.tp, own)
                if longest_request_tokens(speeds.kv_tokens, engine) >= longest:
                    self.speeds[t, shape] = speeds

    def combo_kinds(self) -> tuple[ComboShapes, ...]:
        """Kinds for every pair of types and every pair of limits."""
        types = range(len(self.problem.offers))
        prefills, decodes = (
            list(dict.fromkeys(self._cheapest(t, limit, role) for t, limit in product(types, LIMITS))) for role in ROLES
        )
        return tuple(
            self._combo_kind(prefill, decode)
            for prefill, decode in product(prefills, decodes)
            if prefill is not None
            and decode is not None
            and min(_gpus_left((prefill, decode), (1, 1), self.limits)) >= 0
        )

    def _cheapest(self, gpu_type: int, limit: float, role: Role) -> TypedShape | None:
        """The shape on a type with the fewest GPU seconds per request within a limit; None if there is none."""
        rps = {
            shape: self._rps(shape, limit, role) / shape[1].num_gpus for shape in self.speeds if shape[0] == gpu_type
        }
        best = max(rps, key=lambda shape: rps[shape], default=None)
        return None if best is None or rps[best] <= 0 else best

    def _rps(self, shape: TypedShape, limit: float, role: Role) -> float:
        same_type = [speeds for (t, _), speeds in self.speeds.items() if t == shape[0]]
        speeds = self.speeds[shape]
        if role == "prefill":
            fastest_s = min(each.prompts_s(self.pattern, 1) for each in same_type)
            rps = speeds.prefill_rps(self.pattern, ServiceSlo(ttft_s=None if limit == inf else limit * fastest_s))
        else:
            fastest_s = min(each.step_s(self.pattern, 1) for each in same_type)
            rps = speeds.decode_rps(self.pattern, ServiceSlo(tpot_s=None if limit == inf else limit * fastest_s))
        return min(rps, self.network_rps)

    def _combo_kind(self, prefill: TypedShape, decode: TypedShape) -> ComboShapes:
        prompts_rps = self._rps(prefill, inf, "prefill")
        ratios = [rps / prompts_rps for limit in LIMITS if (rps := self._rps(decode, limit, "decode")) > 0]
        names = [offer.gpu.name for offer in self.problem.offers] if self.problem.other_offers else [""]
        return ComboShapes(prefill[1], decode[1], min(ratios), max(ratios), names[prefill[0]], names[decode[0]])


def with_combos(
    mixed: ReplicaSets, kinds: Sequence[ComboShapes], offers: Sequence[Offer], max_types: int | None
) -> ReplicaSets:
    """The given sets, plus sets with a combo: alone, or beside mixed replicas with the shape of one of its parts.

    Beside mixed replicas, only combos in the middle of their range of ratios are used.
    """
    if not kinds:
        return mixed
    most = len(offers) if max_types is None else max_types
    limits = [offer.limit or 0 for offer in offers]
    names = mixed.type_names or ("",)
    pairs = [
        ((names.index(kind.prefill_gpu), kind.prefill), (names.index(kind.decode_gpu), kind.decode)) for kind in kinds
    ]
    mixed_shapes = zip(mixed.types or (0,) * len(mixed.shapes), mixed.shapes, strict=True)
    columns: list[RoleShape] = [("mixed", each) for each in mixed_shapes]
    columns += dict.fromkeys((role, pair[i]) for i, role in enumerate(ROLES) for pair in pairs)
    column_of = {each: j for j, each in enumerate(columns)}
    rows = []
    for kind, pair in zip(kinds, pairs, strict=True):
        if len({t for t, _ in pair}) <= most:
            for nums in _combo_counts(kind, pair, limits):
                rows.append([0] * len(columns))
                for each, num in nums.items():
                    rows[-1][column_of[each]] = num
    counts = np.pad(mixed.counts, ((0, 0), (0, len(columns) - len(mixed.shapes))))
    return replace(
        mixed,
        shapes=tuple(shape for _, (_, shape) in columns),
        counts=np.concatenate([counts, np.unique(np.array(rows, "i8"), axis=0)]) if rows else counts,
        types=tuple(t for _, (t, _) in columns) if mixed.type_names else (),
        roles=tuple(role for role, _ in columns),
    )


def _combo_counts(
    kind: ComboShapes, pair: tuple[TypedShape, TypedShape], limits: Sequence[int]
) -> Iterator[dict[RoleShape, int]]:
    """Numbers of replicas by role and shape, within the kind's ratios and the GPUs of each type."""
    prefill, decode = pair
    middle = sqrt(kind.least * kind.most)
    for num_decode in range(1, limits[decode[0]] // decode[1].num_gpus + 1):
        for num_prefill in range(max(1, floor(kind.least * num_decode)), max(1, ceil(kind.most * num_decode)) + 1):
            left = _gpus_left(pair, (num_prefill, num_decode), limits)
            if min(left) < 0:
                break
            nums: dict[RoleShape, int] = {("prefill", prefill): num_prefill, ("decode", decode): num_decode}
            yield nums
            if num_prefill in (max(1, floor(middle * num_decode)), max(1, ceil(middle * num_decode))):
                for t, shape in dict.fromkeys(pair):
                    for num_mixed in range(1, left[t] // shape.num_gpus + 1):
                        yield {**nums, ("mixed", (t, shape)): num_mixed}


def _gpus_left(parts: tuple[TypedShape, TypedShape], nums: tuple[int, int], limits: Sequence[int]) -> list[int]:
    """GPUs of each type that remain beside a combo with `nums` replicas of its two parts; negative if there are too
    few."""
    left = list(limits)
    for (t, shape), count in zip(parts, nums, strict=True):
        left[t] -= count * shape.num_gpus
    return left
