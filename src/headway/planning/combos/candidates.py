"""Candidates for a deployment: combos are enumerated, filtered by direction, profiled and ranked (Cauchy 3.3.1,
3.3.2)."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import product
from math import inf
from typing import Literal

from headway.core.errors import HeadwayError
from headway.core.fleet import Engine, Model, Parallel
from headway.perf import memory
from headway.perf.roofline import peak_flops
from headway.planning.combos.cost_efficiency import (
    PhaseCosts,
    a1,
    a2,
    closed_form,
    of_shape,
    served_tokens_per_usd,
    stated,
    summed_tokens_per_usd,
)
from headway.planning.combos.estimate import FluidEstimate
from headway.planning.combos.problem import (
    ComboCandidate,
    ComboService,
    Counts,
    GpuCombo,
    Group,
    Offer,
    Profiler,
    Rejected,
    Selection,
)
from headway.planning.together import Together, in_turn

Directions = Literal["closed-form", "estimate", "both"]
Ranking = Literal["goodput", "eq15"]
"""How candidates are ranked: by served tokens per dollar, or by Eq. 15 as in the paper."""


def group(model: Model, engine: Engine, offer: Offer, num_gpus: int) -> Group:
    """`num_gpus` GPUs in as few instances as possible. Raises HeadwayError if the model fits into none of the
    shapes."""
    if offer.limit is not None and num_gpus > offer.limit:
        raise HeadwayError(f"{num_gpus} x {offer.gpu.name}: there are {offer.limit}")
    reason: HeadwayError | None = None
    for tp in range(min(num_gpus, offer.server), 0, -1):
        if num_gpus % tp:
            continue
        try:
            memory.plan(model, offer.gpu, engine, Parallel(tp))
        except HeadwayError as error:
            reason = reason or error
        else:
            return Group(offer.gpu.name, tp, num_gpus // tp)
    raise HeadwayError(f"{num_gpus} x {offer.gpu.name}: {reason}")


def usd_per_hour(groups: Sequence[Group], offers: Mapping[str, Offer]) -> float:
    """Price of a combo for each hour of service.

    A combo serves only with all of its instances. The interruption of one instance stops the combo, and all of its GPUs
    are paid for until that instance is back. With R interruptions per hour in all, each of s seconds: price * (1 + R s
    / 3600).
    """
    price = sum(group.num_gpus * offers[group.gpu].price for group in groups)
    lost_s = sum(
        group.instances * offers[group.gpu].interruptions_per_hour * offers[group.gpu].restart_s for group in groups
    )
    return price * (1 + lost_s / 3600)


def enumerate_combos(
    model: Model, engine: Engine, offers: Sequence[Offer], counts: Counts | None = None
) -> tuple[tuple[GpuCombo, ...], tuple[Rejected, ...]]:
    """Every combo of these GPUs that holds the model and is within the limits; and the rejected ones, with reasons."""
    counts = counts or Counts()
    by_type = {offer.gpu.name: offer for offer in offers}
    if len(by_type) < len(offers):
        raise HeadwayError("offers: a GPU type is listed twice")
    rejected: dict[str, str] = {}
    groups: dict[tuple[str, int], Group] = {}
    for offer, num in product(offers, sorted({*counts.prefill, *counts.decode, *counts.aggregated})):
        try:
            groups[offer.gpu.name, num] = group(model, engine, offer, num)
        except HeadwayError as error:
            rejected[f"{num} x {offer.gpu.name}"] = str(error)
    combos = []
    for combo in _all_pairs(model.name, groups, by_type, counts):
        limits = {gpu: by_type[gpu].limit for gpu in combo.gpus}
        if all(limit is None or combo.gpus[gpu] <= limit for gpu, limit in limits.items()):
            combos.append(combo)
        else:
            rejected[combo.label] = "more GPUs of a type than there are"
    return tuple(combos), tuple(Rejected(what, why) for what, why in rejected.items())


def _all_pairs(
    model: str, groups: Mapping[tuple[str, int], Group], offers: Mapping[str, Offer], counts: Counts
) -> Iterator[GpuCombo]:
    for first, second in product(offers, offers):
        if first == second and not counts.same_type:
            continue
        for num_first, num_second in product(counts.prefill, counts.decode):
            prefill, decode = groups.get((first, num_first)), groups.get((second, num_second))
            if prefill is not None and decode is not None:
                yield GpuCombo(model, usd_per_hour((prefill, decode), offers), prefill=prefill, decode=decode)
    for gpu, num in product(offers, counts.aggregated):
        if (gpu, num) in groups:
            alone = groups[gpu, num]
            yield GpuCombo(model, usd_per_hour((alone,), offers), aggregated=alone)


def better_directions(
    combos: Iterable[GpuCombo], efficiency: Callable[[GpuCombo], float | None]
) -> tuple[tuple[GpuCombo, ...], tuple[Rejected, ...]]:
    """The Pareto filter of 3.3.1: for each pair of types, only the direction with the higher best CE is kept.

    Every size of the better direction stays. An `efficiency` of None is infinite.
    """
    combos = tuple(combos)
    best: dict[tuple[str, str], float] = {}
    for combo in combos:
        pair = (combo.phases[0].gpu, combo.phases[1].gpu)
        best[pair] = max(best.get(pair, 0.0), _or_infinite(efficiency(combo)))
    kept, rejected = [], []
    for combo in combos:
        pair = (combo.phases[0].gpu, combo.phases[1].gpu)
        reverse = (pair[1], pair[0])
        other = best.get(reverse, -1.0)
        if combo.aggregated is None and (other > best[pair] or (other == best[pair] and reverse < pair)):
            rejected.append(Rejected(combo.label, f"{pair[1]} to {pair[0]} has the higher cost-efficiency"))
        else:
            kept.append(combo)
    return tuple(kept), tuple(rejected)


def select(
    services: Sequence[ComboService],
    offers: Sequence[Offer],
    profiler: Profiler,
    counts: Counts | None = None,
    top: int | None = None,
    per_pair: int | None = None,
    directions: Directions = "closed-form",
    together: Together = in_turn,
    ranking: Ranking = "goodput",
) -> Selection:
    """Candidates for every service; of each, the `top` best by served tokens per dollar, or all.

    With the ranking "eq15" they are the best by the paper's Eq. 15 (4.2 takes the top four). Eq. 15 does not
    distinguish sizes of the same types, so one size of each pair of types stays: the one that serves the most tokens
    per dollar.

    Combos without goodput are left out. One direction of each pair of types stays: by the closed form, as in the paper,
    or by the estimate of served tokens per dollar; or `both` stay. The choices may differ, because the closed form
    assumes byte-bound decode, which on an H20 holds only for small batches. `per_pair`: number of profiled sizes for
    each pair of types and each aggregated type, those with the highest estimate; so every type remains a choice with
    few profiles. `together` makes the calls of the profiler. Raises HeadwayError if two services have one name.
    """
    if len({service.name for service in services}) < len(services):
        raise HeadwayError("services: a name is listed twice")
    candidates: list[ComboCandidate] = []
    rejected: dict[str, tuple[Rejected, ...]] = {}
    for service in services:
        some, rejected[service.name] = _of_service(service, offers, profiler, counts, per_pair, directions, together)
        if ranking == "eq15":
            some, smaller = _by_closed_form(some)
            rejected[service.name] = (*rejected[service.name], *smaller)
        if top is not None:
            what = f"not among the {top} best by {'Eq. 15' if ranking == 'eq15' else 'served tokens per dollar'}"
            rejected[service.name] = (
                *rejected[service.name],
                *(Rejected(each.combo.label, what) for each in some[top:]),
            )
        candidates += some[:top]
    return Selection(tuple(candidates), rejected)


def _of_service(
    service: ComboService,
    offers: Sequence[Offer],
    profiler: Profiler,
    counts: Counts | None,
    per_pair: int | None,
    directions: Directions,
    together: Together,
) -> tuple[list[ComboCandidate], tuple[Rejected, ...]]:
    every, too_large = enumerate_combos(service.model, service.engine, offers, counts)
    efficiencies = Efficiencies(service, offers)
    by = efficiencies.closed_form if directions == "closed-form" else efficiencies.estimated
    kept, wrong_direction = (every, ()) if directions == "both" else better_directions(every, by)
    unlikely: list[Rejected] = []
    if per_pair is not None:
        kept, unlikely = _likely(kept, efficiencies, per_pair)
    candidates, late = [], []
    profiles = [partial(profiler.goodput_rps, combo, service.pattern, service.slo) for combo in kept]
    for combo, goodput in zip(kept, together(profiles), strict=True):
        if goodput > 0:
            candidates.append(efficiencies.candidate(combo, goodput))
        else:
            late.append(Rejected(combo.label, "no request is in time, at any rate"))
    candidates.sort(key=lambda each: (-_or_infinite(each.tokens_per_usd), each.combo.usd_per_hour, each.combo.label))
    return candidates, (*too_large, *wrong_direction, *unlikely, *late)


def _by_closed_form(ranked: Sequence[ComboCandidate]) -> tuple[list[ComboCandidate], list[Rejected]]:
    """The first combo of each pair of types, by Eq. 15; and the other combos, as rejected."""
    firsts: dict[tuple[str, ...], ComboCandidate] = {}
    for each in ranked:
        firsts.setdefault(tuple(group.gpu for group in each.combo.phases), each)
    others = [each for each in ranked if each not in firsts.values()]
    kept = sorted(firsts.values(), key=lambda each: -_or_infinite(each.closed_form_tokens_per_usd))
    return kept, [Rejected(each.combo.label, "another size of its types serves more per dollar") for each in others]


def _likely(
    every: Sequence[GpuCombo], efficiencies: Efficiencies, per_pair: int
) -> tuple[tuple[GpuCombo, ...], list[Rejected]]:
    """The sizes of each pair of types with the highest estimate, without those with an estimate of zero."""
    pairs: dict[tuple[str, ...], list[tuple[float, int]]] = {}
    for i, combo in enumerate(every):
        served = efficiencies.estimated(combo)
        if served != 0:
            pairs.setdefault(tuple(group.gpu for group in combo.groups), []).append((-_or_infinite(served), i))
    best = {i for some in pairs.values() for _, i in sorted(some)[:per_pair]}
    reason = f"not among the {per_pair} best sizes of its types by the estimate"
    rejected = [Rejected(combo.label, reason) for i, combo in enumerate(every) if i not in best]
    return tuple(combo for i, combo in enumerate(every) if i in best), rejected


def _or_infinite(value: float | None) -> float:
    return inf if value is None else value


class Efficiencies:
    """The cost-efficiencies of combos for one service, with decode batches as large as memory allows."""

    def __init__(self, service: ComboService, offers: Sequence[Offer]) -> None:
        self.service = service
        self.offers = {offer.gpu.name: offer for offer in offers}
        models, gpus = {service.model.name: service.model}, {offer.gpu.name: offer.gpu for offer in offers}
        self.estimate = FluidEstimate(
            models, gpus, service.engine, service.network_bytes_per_s, service.coefficients_on
        )

    def closed_form(self, combo: GpuCombo) -> float | None:
        """Eq. 15 with the paper's C1 to C4."""
        return self._closed_form(combo, lambda tp, batch: stated(self.service.model))

    def of_shape(self, combo: GpuCombo) -> float | None:
        """Eq. 15 with C1 to C4 of the model's real shape."""
        kv = self.service.engine.kv_dtype_bytes
        return self._closed_form(combo, lambda tp, batch: of_shape(self.service.model, tp, batch, kv))

    def step(self, combo: GpuCombo) -> float | None:
        """Eq. 14 with calibrated throughputs."""
        first, second = combo.phases
        pattern = self.service.pattern
        return summed_tokens_per_usd(
            first.instances * self.estimate.speed(combo.model, first).prefill_tokens_per_s(pattern),
            first.num_gpus * self.offers[first.gpu].price,
            second.instances * self.estimate.speed(combo.model, second).decode_tokens_per_s(pattern),
            second.num_gpus * self.offers[second.gpu].price,
        )

    def goodput_rps(self, combo: GpuCombo) -> float:
        """Estimated requests per second within the SLO; 0: none."""
        return self.estimate.goodput_rps(combo, self.service.pattern, self.service.slo)

    def estimated(self, combo: GpuCombo) -> float | None:
        """Estimated served tokens per dollar; 0: no goodput."""
        goodput = self.goodput_rps(combo)
        return self._served(combo, goodput) if goodput > 0 else 0.0

    def candidate(self, combo: GpuCombo, goodput_rps: float) -> ComboCandidate:
        served = self._served(combo, goodput_rps)
        others = (self.closed_form(combo), self.of_shape(combo), self.step(combo))
        missing = self.service.uncalibrated(combo)
        return ComboCandidate(
            self.service.name, combo, goodput_rps, served, *others, calibrated=not missing, uncalibrated=missing
        )

    def _served(self, combo: GpuCombo, goodput_rps: float) -> float | None:
        pattern = self.service.pattern
        return served_tokens_per_usd(goodput_rps, pattern.prompt_tokens, pattern.output_tokens, combo.usd_per_hour)

    def _closed_form(self, combo: GpuCombo, costs: Callable[[int, int], PhaseCosts]) -> float | None:
        first, second = combo.phases
        pattern = self.service.pattern
        batch = self.estimate.speed(combo.model, second).batch(pattern)
        prefill, decode = self.offers[first.gpu], self.offers[second.gpu]
        return closed_form(
            a1(costs(first.tp, 1), pattern.prompt_tokens),
            a2(costs(second.tp, batch), batch, pattern.prompt_tokens, pattern.output_tokens),
            peak_flops(prefill.gpu, "bf16"),
            prefill.price,
            decode.gpu.bandwidth_bytes_per_s,
            decode.price,
        )
