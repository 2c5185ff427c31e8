"""Which combos may serve which service: enumerated, filtered by direction, profiled and ranked (Cauchy 3.3.1)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import inf
from typing import Literal, Protocol

from msgspec import Struct

from headway.core.errors import HeadwayError
from headway.core.fleet import Engine, Gpu, Model
from headway.perf.operators import peak_flops
from headway.planning.combos.combos import Counts, GpuCombo, Offer, Rejected, better_directions, combos
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
from headway.planning.combos.speeds import DEFAULT_NETWORK_BYTES_PER_S, Estimate, Pattern, Slo

Directions = Literal["closed-form", "estimate", "both"]


class Profiler(Protocol):
    """Says how many requests per second a combo serves within an SLO. The same arguments give the same answer."""

    def goodput_rps(self, combo: GpuCombo, workload: Pattern, slo: Slo) -> float:
        """0: at no rate are requests in time."""
        ...


class Service(Struct, frozen=True, forbid_unknown_fields=True):
    """A model under one kind of workload, with its SLO."""

    name: str
    model: Model
    engine: Engine
    pattern: Pattern
    slo: Slo
    network_bytes_per_s: float = DEFAULT_NETWORK_BYTES_PER_S
    """Of one instance, each way; split combos hand KV caches over through it."""


class Candidate(Struct, frozen=True, forbid_unknown_fields=True):
    """A combo for a service. Tokens per dollar count prompts and outputs; None: it costs nothing."""

    service: str
    combo: GpuCombo
    goodput_rps: float
    tokens_per_usd: float | None
    """What it serves at its goodput: the paper's measured CE."""
    closed_form_tokens_per_usd: float | None = None
    """Eq. 15 as the paper states it."""
    shape_tokens_per_usd: float | None = None
    """Eq. 14 with FLOPs and bytes of the model's real shape."""
    step_tokens_per_usd: float | None = None
    """Eq. 14 with the step-time model's throughputs."""


class Selection(Struct, frozen=True, forbid_unknown_fields=True):
    """Candidates by service, highest CE first, and what was left out."""

    candidates: tuple[Candidate, ...]
    rejected: dict[str, tuple[Rejected, ...]]
    """By service."""


def select(
    services: Sequence[Service],
    offers: Sequence[Offer],
    profiler: Profiler,
    counts: Counts | None = None,
    top: int | None = None,
    per_pair: int | None = None,
    directions: Directions = "closed-form",
) -> Selection:
    """Candidates for every service; of each, only the `top` best by served tokens per dollar where that is given.

    Combos that serve nothing in time are left out. Of the two directions of a pair one stays: by the closed form, as
    the paper does it, or by the estimate of served tokens per dollar; or `both` do. They may differ: the closed form
    takes decode to be bound by bytes, which an H20 is for small batches only. `per_pair`: of the sizes of each pair
    of types, and of each type that does both, only so many are profiled, those with the highest estimate; so every
    type stays in the choice while profiles are few. HeadwayError for services of one name.
    """
    if len({service.name for service in services}) < len(services):
        raise HeadwayError("services: a name stands there twice")
    found: list[Candidate] = []
    rejected: dict[str, tuple[Rejected, ...]] = {}
    for service in services:
        some, rejected[service.name] = _of_service(service, offers, profiler, counts, per_pair, directions)
        found += some if top is None else some[:top]
    return Selection(tuple(found), rejected)


def _of_service(
    service: Service,
    offers: Sequence[Offer],
    profiler: Profiler,
    counts: Counts | None,
    per_pair: int | None,
    directions: Directions,
) -> tuple[list[Candidate], tuple[Rejected, ...]]:
    every, too_large = combos(service.model, service.engine, offers, counts)
    efficiencies = Efficiencies(service, offers)
    by = efficiencies.closed_form if directions == "closed-form" else efficiencies.estimated
    kept, turned = (every, ()) if directions == "both" else better_directions(every, by)
    unlikely: list[Rejected] = []
    if per_pair is not None:
        kept, unlikely = _likely(kept, efficiencies, per_pair)
    found, late = [], []
    for combo in kept:
        goodput = profiler.goodput_rps(combo, service.pattern, service.slo)
        if goodput > 0:
            found.append(efficiencies.candidate(combo, goodput))
        else:
            late.append(Rejected(combo.label, "no request is in time, at any rate"))
    found.sort(key=lambda each: (-_number(each.tokens_per_usd), each.combo.usd_per_hour, each.combo.label))
    return found, (*too_large, *turned, *unlikely, *late)


def _likely(
    every: Sequence[GpuCombo], efficiencies: Efficiencies, per_pair: int
) -> tuple[tuple[GpuCombo, ...], list[Rejected]]:
    """The best sizes of each pair of types by the estimate, as far as it says that anything is in time."""
    pairs: dict[tuple[str, ...], list[tuple[float, int]]] = {}
    for at, combo in enumerate(every):
        served = efficiencies.estimated(combo)
        if served != 0:
            pairs.setdefault(tuple(group.gpu for group in combo.groups), []).append((-_number(served), at))
    best = {at for some in pairs.values() for _, at in sorted(some)[:per_pair]}
    reason = f"not among the {per_pair} best sizes of its types by the estimate"
    left = [Rejected(combo.label, reason) for at, combo in enumerate(every) if at not in best]
    return tuple(combo for at, combo in enumerate(every) if at in best), left


def _number(value: float | None) -> float:
    return inf if value is None else value


class Efficiencies:
    """The cost-efficiencies of combos for one service; decode batches are as large as memory allows."""

    def __init__(self, service: Service, offers: Sequence[Offer]) -> None:
        self.service = service
        self.offers = {offer.gpu.name: offer for offer in offers}
        gpus: dict[str, Gpu] = {offer.gpu.name: offer.gpu for offer in offers}
        models = {service.model.name: service.model}
        self.estimate = Estimate(models, gpus, service.engine, service.network_bytes_per_s)

    def closed_form(self, combo: GpuCombo) -> float | None:
        """Eq. 15 with the paper's C1 to C4."""
        return self._closed_form(combo, lambda tp, batch: stated(self.service.model))

    def of_shape(self, combo: GpuCombo) -> float | None:
        """The same with those of the real shape."""
        kv = self.service.engine.kv_dtype_bytes
        return self._closed_form(combo, lambda tp, batch: of_shape(self.service.model, tp, batch, kv))

    def step(self, combo: GpuCombo) -> float | None:
        """Eq. 14 with calibrated throughputs."""
        first, second = combo.phases
        pattern = self.service.pattern
        return summed_tokens_per_usd(
            first.instances * self.estimate.speeds(combo.model, first).prefill_tokens_per_s(pattern),
            first.num_gpus * self.offers[first.gpu].price,
            second.instances * self.estimate.speeds(combo.model, second).decode_tokens_per_s(pattern),
            second.num_gpus * self.offers[second.gpu].price,
        )

    def estimated(self, combo: GpuCombo) -> float | None:
        """What it serves per dollar by the estimate; 0: nothing in time."""
        goodput = self.estimate.goodput_rps(combo, self.service.pattern, self.service.slo)
        lengths = (self.service.pattern.prompt_tokens, self.service.pattern.output_tokens)
        return served_tokens_per_usd(goodput, *lengths, combo.usd_per_hour) if goodput > 0 else 0.0

    def candidate(self, combo: GpuCombo, goodput_rps: float) -> Candidate:
        """All that is known of it."""
        lengths = (self.service.pattern.prompt_tokens, self.service.pattern.output_tokens)
        served = served_tokens_per_usd(goodput_rps, *lengths, combo.usd_per_hour)
        others = (self.closed_form(combo), self.of_shape(combo), self.step(combo))
        return Candidate(self.service.name, combo, goodput_rps, served, *others)

    def _closed_form(self, combo: GpuCombo, costs: Callable[[int, int], PhaseCosts]) -> float | None:
        first, second = combo.phases
        pattern = self.service.pattern
        batch = self.estimate.speeds(combo.model, second).batch(pattern)
        prefill, decode = self.offers[first.gpu], self.offers[second.gpu]
        return closed_form(
            a1(costs(first.tp, 1), pattern.prompt_tokens),
            a2(costs(second.tp, batch), batch, pattern.prompt_tokens, pattern.output_tokens),
            peak_flops(prefill.gpu, "bf16"),
            prefill.price,
            decode.gpu.bandwidth_bytes_per_s,
            decode.price,
        )
