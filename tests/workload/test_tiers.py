"""Mixes of tiers: the shares of K-tier Llumnix, and how a scenario asks for them."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest

from headway.core.errors import HeadwayError
from headway.workload.generate import generate
from headway.workload.spec import WorkloadSpec, resolved
from headway.workload.tiers import MAX_TIERS, MIXES, enterprise, gaussian, tier_shares, uniform

ALL = range(1, MAX_TIERS + 1)


@pytest.mark.parametrize("mix", MIXES)
def test_every_tier_has_a_share_and_they_sum_to_one(mix: str) -> None:
    for num_tiers in ALL:
        drawn = tier_shares(mix, num_tiers)  # type: ignore[arg-type]
        assert len(drawn) == num_tiers and min(drawn) > 0
        assert sum(drawn) == pytest.approx(1, abs=1e-12)
    assert tier_shares(mix, 1) == (1.0,)  # type: ignore[arg-type]


def test_uniform_shares_are_equal() -> None:
    assert uniform(4) == (0.25,) * 4


@pytest.mark.parametrize("num_tiers", ALL)
def test_gaussian_has_its_centre_and_spread(num_tiers: int) -> None:
    drawn = gaussian(num_tiers)
    centre, deviation = num_tiers // 2, num_tiers / 4
    assert max(drawn) == drawn[centre]
    for tier, share in enumerate(drawn):
        distance = abs(tier - centre)
        assert np.log(drawn[centre] / share) == pytest.approx(distance**2 / (2 * deviation**2))
        mirrored = 2 * centre - tier
        if 0 <= mirrored < num_tiers:
            assert share == pytest.approx(drawn[mirrored])


@pytest.mark.parametrize("num_tiers", range(3, MAX_TIERS + 1))
def test_enterprise_matches_the_paper(num_tiers: int) -> None:
    drawn = enterprise(num_tiers)
    assert drawn[0] == pytest.approx(0.1)
    assert sum(drawn[1:-1]) == pytest.approx(0.7)
    assert 0.05 <= drawn[-1] <= 0.2


def test_enterprise_of_two_keeps_the_critical_tenth() -> None:
    assert enterprise(2) == (0.1, 0.9)


@pytest.mark.parametrize("num_tiers", [-1, 0, MAX_TIERS + 1])
def test_how_many_tiers_there_may_be(num_tiers: int) -> None:
    with pytest.raises(HeadwayError, match=rf"num_tiers: {num_tiers}; expected 1 to 10"):
        tier_shares("uniform", num_tiers)


def test_a_scenario_names_a_mix() -> None:
    text = "{num_requests: 40000, arrivals: 9, prompt_tokens: 5, output_tokens: 5, slo: {ttft_s: 3}, tiers: %s}"
    named = msgspec.yaml.decode(text % "{mix: enterprise, num_tiers: 4}", type=WorkloadSpec)
    listed = "[{tier: 0, share: 0.1}, {tier: 1, share: 0.35}, {tier: 2, share: 0.35}, {tier: 3, share: 0.2}]"
    spelled = msgspec.yaml.decode(text % listed, type=WorkloadSpec)
    rows = generate(named, 3)
    assert (rows.column("tier") == generate(spelled, 3).column("tier")).all()
    assert np.bincount(rows.column("tier")) / 40_000 == pytest.approx([0.1, 0.35, 0.35, 0.2], abs=0.01)
    assert (rows.column("slo_ttft_s") == 3).all()
    # What a plan or a sweep writes down and reads again is the same workload.
    again = msgspec.convert(msgspec.to_builtins(resolved(named)), WorkloadSpec)
    assert (generate(again, 3).column("tier") == rows.column("tier")).all()
