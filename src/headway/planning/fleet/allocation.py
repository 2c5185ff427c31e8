"""Allocates the available GPUs to models: the program of `plan combos` over sized options, checked by rehearsals.

An option of which n units serve a model's requests of D per second counts D / n for each unit. For options of one kind
this is exact. Fleets that mix kinds are rehearsed. If a fleet misses, its model is planned again with more goodput than
that fleet had, as in `plan combos`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from headway.planning.combos.problem import ComboCandidate, ComboPlan, ComboProblem, Offer, ServiceDemand
from headway.planning.combos.search import deploy
from headway.planning.fleet.problem import FleetPart, SizedOption

ABOVE = 1 + 1e-6
ROUNDING = 1 + 1e-9
MOST_PLANS = 12
Parts = tuple[FleetPart, ...]
Holds = Callable[[Sequence[Parts]], list[bool]]
"""Returns, for each of several fleets for one model, whether enough requests are in time."""
Settle = Callable[[Sequence[SizedOption]], Sequence[SizedOption]]
"""Finds the exact numbers of options that are only bounded, and returns all options."""


def cheapest(
    options: Sequence[SizedOption],
    rates: Mapping[str, float],
    offers: Sequence[Offer],
    holds: Holds,
    settle: Settle = lambda _: (),
) -> tuple[Parts, str]:
    """The cheapest parts for all models within the limits; or no parts, and the reason.

    Parts of options that are only bounded are settled, and all is planned again.
    """
    wanted, num_plans = dict(rates), 0
    while num_plans < MOST_PLANS:
        sized = [each for each in options if each.fewest is not None]
        without = [model for model in rates if all(each.model != model for each in sized)]
        if without:
            return (), "; ".join(f"{model}: {_unserved_reason(model, options)}" for model in without)
        found = _planned(sized, rates, wanted, offers)
        if found.status == "short":
            return (), found.why
        parts = tuple(FleetPart(each.service, each.combo, each.count) for each in found.combos)
        used = {(part.model, part.unit) for part in parts}
        if bounded := [each for each in sized if each.at_least is not None and (each.model, each.unit) in used]:
            options = settle(bounded)
            continue
        num_plans += 1
        mixed = [own for own in by_model(parts).values() if not _is_sized(own, sized)]
        missed = {own[0].model for own, is_met in zip(mixed, holds(mixed), strict=True) if not is_met}
        if not missed:
            return parts, ""
        wanted |= {each.service: each.goodput_rps * ABOVE for each in found.services if each.service in missed}
    return (), "no mix of GPU types that was tried keeps enough requests in time"


def bound_usd(options: Sequence[SizedOption], rates: Mapping[str, float], offers: Sequence[Offer]) -> float | None:
    """A lower bound of the price of `cheapest`; None if there are no such parts."""
    sized = [each for each in options if each.fewest is not None]
    found = _planned(sized, rates, rates, offers)
    if found.status == "short":
        return None
    return usd(tuple(FleetPart(each.service, each.combo, each.count) for each in found.combos))


def _planned(
    sized: Sequence[SizedOption], rates: Mapping[str, float], wanted: Mapping[str, float], offers: Sequence[Offer]
) -> ComboPlan:
    """The program's plan. `wanted`: the rates that it must reach."""
    candidates = tuple(
        ComboCandidate(each.model, each.unit, rates[each.model] * ROUNDING / (each.fewest or 1), None) for each in sized
    )
    demands = tuple(ServiceDemand(model, rate) for model, rate in wanted.items())
    limits = {offer.gpu.name: offer.limit for offer in offers if offer.limit is not None}
    return deploy(ComboProblem(demands, candidates, limits, "mc"), explain=False)


def by_model(parts: Parts) -> dict[str, Parts]:
    models = dict.fromkeys(part.model for part in parts)
    return {model: tuple(part for part in parts if part.model == model) for model in models}


def one_less(parts: Parts, part: FleetPart) -> Parts:
    """The parts with one unit of one part removed."""
    fewer = FleetPart(part.model, part.unit, part.count - 1, part.calibrated, part.uncalibrated)
    return tuple(fewer if each == part else each for each in parts if each != part or part.count > 1)


def one_more(parts: Parts, part: FleetPart) -> Parts:
    """The parts with one unit of one part added."""
    more = FleetPart(part.model, part.unit, part.count + 1, part.calibrated, part.uncalibrated)
    return tuple(more if each == part else each for each in parts)


def fits(parts: Parts, offers: Sequence[Offer]) -> bool:
    """Whether the available GPUs suffice."""
    used = gpus(parts)
    return all(offer.limit is None or used.get(offer.gpu.name, 0) <= offer.limit for offer in offers)


def gpus(parts: Parts) -> dict[str, int]:
    used: dict[str, int] = {}
    for part in parts:
        for gpu, num in part.gpus.items():
            used[gpu] = used.get(gpu, 0) + num
    return dict(sorted(used.items()))


def usd(parts: Parts) -> float:
    return sum(part.usd_per_hour for part in parts)


def _is_sized(parts: Parts, options: Sequence[SizedOption]) -> bool:
    """Whether the parts are a single sized option with a sufficient number of units."""
    if len(parts) > 1:
        return False
    part = parts[0]
    return any(
        each.model == part.model and each.unit == part.unit and (each.least or 0) <= part.count for each in options
    )


def _unserved_reason(model: str, options: Sequence[SizedOption]) -> str:
    """Why no option serves a model."""
    own = [each for each in options if each.model == model]
    reasons = dict.fromkeys(f"{'/'.join(each.unit.gpus)}: {each.reason or 'misses the SLOs'}" for each in own)
    return "no GPUs keep enough requests in time" + (f" ({'; '.join(reasons)})" if reasons else "")
