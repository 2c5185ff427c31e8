"""Sizes that are found only as far as a plan uses them: the plan of all exact sizes, with fewer rehearsals."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from math import inf

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headway import catalog
from headway.core.errors import HeadwayError
from headway.planning.capacity.problem import RehearsalMetrics, stopped
from headway.planning.combos.problem import GpuCombo, Group, Offer
from headway.planning.fleet.allocation import Parts, bound_usd, cheapest, usd
from headway.planning.fleet.problem import SizedOption
from headway.planning.fleet.sizes import Kind, Sizes, UnitSizes

A, B = "a100-80gb", "h100-80gb-sxm"
MOST = 16
TARGET = 0.99


def unit(model: str, gpu: str, tp: int, usd_per_hour: float, is_split: bool = False) -> GpuCombo:
    if is_split:
        return GpuCombo(model, usd_per_hour, prefill=Group(gpu, tp), decode=Group(gpu, tp))
    return GpuCombo(model, usd_per_hour, aggregated=Group(gpu, tp))


@dataclass
class World:
    """Which numbers of each unit suffice, and what was rehearsed."""

    is_met: Callable[[GpuCombo, int], bool]
    asked: list[tuple[GpuCombo, int]] = field(default_factory=list)

    def __call__(self, of: GpuCombo, number: int) -> RehearsalMetrics:
        self.asked.append((of, number))
        if not self.is_met(of, number):
            return stopped(10 + 5 * number)
        return RehearsalMetrics(None, None, None, 1.0, None, None, 100, 100, True)

    def sizes(self, kinds: Sequence[Kind]) -> Sizes:
        return Sizes(kinds, self, TARGET)


@dataclass(frozen=True)
class Fleet:
    """A drawn problem: units with their fewest sufficient number and an estimate, by model and kind."""

    models: list[list[list[tuple[GpuCombo, int | None, float]]]]
    limits: tuple[int | None, int | None]

    def kinds(self) -> dict[str, list[Kind]]:
        return {
            f"m{i}": [Kind([UnitSizes(of, likely, MOST) for of, _, likely in kind]) for kind in kinds]
            for i, kinds in enumerate(self.models)
        }

    @property
    def least(self) -> dict[GpuCombo, int | None]:
        return {of: n for kinds in self.models for kind in kinds for of, n, _ in kind}

    @property
    def offers(self) -> tuple[Offer, ...]:
        return Offer(catalog.gpu(A), self.limits[0]), Offer(catalog.gpu(B), self.limits[1])

    def world(self) -> World:
        least = self.least
        return World(lambda of, n: (fewest := least[of]) is not None and n >= fewest)

    def exact(self) -> list[SizedOption]:
        """Each kind's cheapest unit, known in advance."""
        found = []
        for kinds in self.models:
            for kind in kinds:
                able = [(n * of.usd_per_hour, of.usd_per_hour, of, n) for of, n, _ in kind if n is not None]
                of, n = min(able, key=lambda each: each[:2])[2:] if able else (kind[0][0], None)
                found.append(SizedOption(of.model, of, n, None))
        return found


@st.composite
def fleets(draw: st.DrawFn) -> Fleet:
    """Prices are few and round, so that kinds of equal price are common; estimates may be wrong by any factor."""
    leasts, likelies = st.one_of(st.none(), st.integers(1, MOST)), st.sampled_from([0.3, 1.0, 2.6, 7.0, 40.0, inf])
    models = []
    for i in range(draw(st.integers(1, 3))):
        kinds = []
        for gpu, price in ((A, 1.0), (B, 2.0)):
            tps = [1, 2, 4][: draw(st.integers(1, 3))]
            kinds.append([(unit(f"m{i}", gpu, tp, price * tp), draw(leasts), draw(likelies)) for tp in tps])
        if draw(st.booleans()):
            kinds.append([(unit(f"m{i}", A, 1, 2.0, is_split=True), draw(leasts), draw(likelies))])
        models.append(kinds)
    limits = st.one_of(st.none(), st.integers(0, 24))
    return Fleet(models, (draw(limits), draw(limits)))


def always(some: Sequence[Parts]) -> list[bool]:
    return [True for _ in some]


def planned(fleet: Fleet, world: World, kinds: dict[str, list[Kind]]) -> tuple[Parts, dict[str, float]]:
    """The plan over sizes that are found as it uses them, and the models' rates."""
    rates = {model: 3.0 + i for i, model in enumerate(kinds)}
    sizes = {model: world.sizes(own) for model, own in kinds.items()}

    def options() -> list[SizedOption]:
        return [each for own in kinds.values() for kind in own for each in kind.bounds()]

    def settle(bounded: Sequence[SizedOption]) -> list[SizedOption]:
        for each in bounded:
            for kind in kinds[each.model]:
                if any(one.unit == each.unit for one in kind.units):
                    sizes[each.model].size(kind)
        return options()

    for each in sizes.values():
        each.cheapest()
    return cheapest(options(), rates, fleet.offers, always, settle)[0], rates


@settings(max_examples=150, deadline=None)
@given(fleets())
def test_the_plan_costs_what_it_costs_with_all_sizes(fleet: Fleet) -> None:
    kinds, world = fleet.kinds(), fleet.world()
    parts, rates = planned(fleet, world, kinds)
    full, _ = cheapest(fleet.exact(), rates, fleet.offers, always)
    assert bool(parts) == bool(full)
    assert usd(parts) == pytest.approx(usd(full))
    assert len(world.asked) == len(set(world.asked))
    least = fleet.least
    for part in parts:
        option = next(
            each
            for own in kinds[part.model]
            for each in own.bounds()
            if each.unit == part.unit and each.model == part.model
        )
        assert option.least == least[part.unit]


@settings(max_examples=150, deadline=None)
@given(fleets())
def test_a_bound_never_exceeds_the_exact_size(fleet: Fleet) -> None:
    kinds, world = fleet.kinds(), fleet.world()
    _, rates = planned(fleet, world, kinds)
    exact = iter(fleet.exact())
    for own in kinds.values():
        for kind in own:
            known, full = kind.option(), next(exact)
            if known.at_least is None:
                assert known.usd_per_hour == full.usd_per_hour
            elif full.usd_per_hour is not None:
                assert min(each.usd_per_hour or inf for each in kind.bounds()) <= full.usd_per_hour
    bounds = [each for own in kinds.values() for kind in own for each in kind.bounds()]
    parts, _ = cheapest(fleet.exact(), rates, fleet.offers, always)
    if parts:
        least = bound_usd(bounds, rates, fleet.offers)
        assert least is not None and least <= usd(parts) + 1e-9


def test_a_kind_that_costs_more_takes_one_rehearsal() -> None:
    """Three H100 suffice; so does no number of A100 for their price, by the largest one."""
    cheap, dear = unit("m", B, 1, 2.0), unit("m", A, 1, 1.0)
    world = World(lambda of, n: n >= (3 if of == cheap else 12))
    kinds = [Kind([UnitSizes(dear, 9.0, MOST)]), Kind([UnitSizes(cheap, 2.8, MOST)])]
    world.sizes(kinds).cheapest()
    assert kinds[1].option().least == 3 and kinds[0].option().at_least == 7
    assert [n for of, n in world.asked if of == dear] == [6]
    world.sizes(kinds).size(kinds[0])
    assert kinds[0].option().least == 12 and kinds[0].option().at_least is None


def test_an_exact_estimate_takes_three_rehearsals() -> None:
    of = unit("m", A, 1, 1.0)
    world, kind = World(lambda _, n: n >= 9), Kind([UnitSizes(of, 8.6, MOST)])
    world.sizes([kind]).size(kind)
    assert kind.option().least == 9 and [n for _, n in world.asked] == [9, 8, 7]


def test_sizes_that_contradict_the_assumption_are_all_rehearsed() -> None:
    """Eight suffice and seven do not, but six do: then the fewest of all is looked for."""
    of = unit("m", A, 1, 1.0)
    world, kind = World(lambda _, n: n not in (1, 2, 3, 7)), Kind([UnitSizes(of, 8.0, MOST)])
    world.sizes([kind]).size(kind)
    assert kind.option().least == 4


def test_a_kind_that_cannot_be_simulated_says_why() -> None:
    def fails(of: GpuCombo, number: int) -> RehearsalMetrics:
        raise HeadwayError(f"no room on {of.groups[0].gpu}")

    kind = Kind([UnitSizes(unit("m", A, tp, float(tp)), 2.0, MOST) for tp in (1, 2)])
    Sizes([kind], fails, TARGET).size(kind)
    assert (kind.option().least, kind.option().fewest, kind.option().reason) == (None, None, f"no room on {A}")
    split = Kind([UnitSizes(unit("m", A, 1, 2.0, is_split=True), 2.0, MOST)])
    with pytest.raises(HeadwayError):
        Sizes([split], fails, TARGET).size(split)
