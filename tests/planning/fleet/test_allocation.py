"""GPUs among models: exact for options of one kind, checked where kinds are mixed."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headway import catalog
from headway.planning.combos.problem import GpuCombo, Group, Offer
from headway.planning.fleet.allocation import Parts, cheapest, fits, gpus, one_less, one_more, usd
from headway.planning.fleet.problem import FleetPart, SizedOption

A, B = "a100-80gb", "h100-80gb-sxm"
PRICES = {A: 1.0, B: 2.5}


def option(model: str, gpu: str, least: int | None, tp: int = 1) -> SizedOption:
    unit = GpuCombo(model, PRICES[gpu] * tp, aggregated=Group(gpu, tp))
    return SizedOption(model, unit, least, None, "" if least else "too slow")


def offers(a: int | None, b: int | None) -> tuple[Offer, ...]:
    return Offer(catalog.gpu(A), a), Offer(catalog.gpu(B), b)


def always(fleets: Sequence[Parts]) -> list[bool]:
    return [True for _ in fleets]


def never(fleets: Sequence[Parts]) -> list[bool]:
    return [False for _ in fleets]


def test_each_model_gets_the_cheapest_type_within_the_limits() -> None:
    options = [option("x", A, 4), option("x", B, 1), option("y", A, 2), option("y", B, 2)]
    parts, why = cheapest(options, {"x": 3.0, "y": 9.0}, offers(8, 8), always)
    assert why == "" and {(p.model, p.label) for p in parts} == {("x", f"1 {B}"), ("y", f"2 {A}")}
    parts, _ = cheapest(options, {"x": 3.0, "y": 9.0}, offers(8, 0), always)
    assert gpus(parts) == {A: 6} and usd(parts) == 6.0


def test_a_model_without_an_option_says_why() -> None:
    parts, why = cheapest([option("x", A, 1), option("y", A, None)], {"x": 1.0, "y": 1.0}, offers(8, 8), always)
    assert parts == () and "y: no GPUs keep enough" in why and "too slow" in why


def test_too_few_gpus_say_what_is_missing() -> None:
    parts, why = cheapest([option("x", A, 9)], {"x": 5.0}, offers(8, 8), always)
    assert parts == () and "x: at most" in why


def test_mixed_fleets_are_rehearsed_and_a_miss_gets_more() -> None:
    """Neither type alone is enough for x; half of each is, by the sum, and misses when it is rehearsed."""
    options = [option("x", A, 4), option("x", B, 4)]
    parts, _ = cheapest(options, {"x": 10.0}, offers(3, 3), always)
    assert sum(part.count for part in parts) == 4
    asked: list[Parts] = []

    def five(fleets: Sequence[Parts]) -> list[bool]:
        asked.extend(fleets)
        return [sum(part.count for part in own) > 4 for own in fleets]

    parts, _ = cheapest(options, {"x": 10.0}, offers(3, 3), five)
    assert sum(part.count for part in parts) == 5 and len(asked) == 2
    parts, why = cheapest(options, {"x": 10.0}, offers(3, 3), never)
    assert parts == () and why


def test_one_unit_less_and_more() -> None:
    options = [option("x", A, 2), option("y", B, 1)]
    parts, _ = cheapest(options, {"x": 1.0, "y": 1.0}, offers(8, 8), always)
    x = next(part for part in parts if part.model == "x")
    y = next(part for part in parts if part.model == "y")
    assert gpus(one_less(parts, x)) == {A: 1, B: 1} and gpus(one_less(parts, y)) == {A: 2}
    assert gpus(one_more(parts, y)) == {A: 2, B: 2} and fits(parts, offers(2, 1)) and not fits(parts, offers(1, 1))


leasts = st.one_of(st.none(), st.integers(1, 4))


@pytest.mark.ci
@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(leasts, leasts), min_size=1, max_size=3), st.integers(0, 6), st.integers(0, 6))
def test_no_choice_of_one_type_for_each_model_is_cheaper(
    least: list[tuple[int | None, int | None]], most_a: int, most_b: int
) -> None:
    models = [f"m{i}" for i in range(len(least))]
    options = [
        option(m, gpu, n) for m, pair in zip(models, least, strict=True) for gpu, n in zip((A, B), pair, strict=True)
    ]
    parts, _ = cheapest(options, dict.fromkeys(models, 5.0), offers(most_a, most_b), always)
    best = None
    for chosen in product(*([each for each in options if each.model == m and each.least] for m in models)):
        fleet = tuple(FleetPart(each.model, each.unit, each.least or 0) for each in chosen)
        if fits(fleet, offers(most_a, most_b)) and (best is None or usd(fleet) < best):
            best = usd(fleet)
    if best is not None:
        assert parts and usd(parts) <= best + 1e-6
    assert fits(parts, offers(most_a, most_b))


def test_parts_are_named_by_their_gpus() -> None:
    both = GpuCombo("x", 6.0, prefill=Group(B), decode=Group(A, 2, 1))
    assert FleetPart("x", both, 2).label == f"2 x (1 {B} prefill, 2 {A} (tp 2) decode)"
    assert FleetPart("x", both, 2).gpus == {B: 2, A: 4} and FleetPart("x", both, 2).usd_per_hour == 12.0
    assert option("x", A, 3, tp=2).usd_per_hour == pytest.approx(6.0)
