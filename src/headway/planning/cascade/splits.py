"""Combos for the stages of a cascade: some replicas prefill, others decode (Cauchy 3.1, 3.3).

A stage's set has mixed replicas, or one combo, or both. A combo has any number of replicas for either phase, and each
that prefills hands over to each that decodes: one large combo does whatever several small ones of its kind do.

Which kinds there are is preselected by Cauchy's costs, that is GPU seconds of a prompt and of an answer of mean lengths
in the step-time model (`planner.speeds`). On each type of GPU and for each of `LIMITS`: the shape that prefills in the
fewest GPU seconds a prompt, and the one that decodes in the fewest an answer, of those that keep the limit; and each of
the ones with each of the others. How many prefill for how many that decode is where both phases can do as many
requests, from the tightest limit to none. Shapes whose KV cache does not hold the longest request are left out.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import product
from math import ceil, floor, inf, sqrt

import numpy as np

from headway.catalog.coefficients import Coefficients
from headway.core.fleet import Model, Parallel, Role
from headway.perf import memory
from headway.planning.cascade.bounds import longest_tokens, of_type
from headway.planning.cascade.problem import Problem, Split
from headway.planning.cascade.shapes import Sets, shapes
from headway.planning.combos.combos import Offer
from headway.planning.combos.speeds import DEFAULT_NETWORK_BYTES_PER_S, Pattern, Slo, Speeds

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
        self.pattern = Pattern(None, float(lengths.computed_tokens.mean()), float(lengths.output_tokens.mean()))
        kv_bytes = memory.kv_bytes_per_token(self.model, problem.engine.kv_dtype_bytes)
        self.network_rps = network_bytes_per_s / (kv_bytes * self.pattern.prompt_tokens)
        self.limits = [offer.limit or 0 for offer in problem.offers]
        self.speeds = dict[Shape, Speeds]()
        for t, offer in enumerate(problem.offers):
            own = coefficients.get(of_type(self.model, offer.gpu.name if t else ""))
            for shape in _flat(problem, self.model, offer):
                found = Speeds(self.model, offer.gpu, problem.engine, shape.tp, own)
                if longest_tokens(found.room_tokens, problem.engine) >= longest:
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
            return min(speeds.prefill_rps(self.pattern, Slo(ttft_s=_times(limit, fastest_s))), self.network_rps)
        fastest_s = min(each.step_s(self.pattern, 1) for each in alike)
        return min(speeds.decode_rps(self.pattern, Slo(tpot_s=_times(limit, fastest_s))), self.network_rps)

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
