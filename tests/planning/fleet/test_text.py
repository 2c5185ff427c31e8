"""Sentences of a fleet plan against the numbers beside them."""

from __future__ import annotations

import re

from hypothesis import given
from hypothesis import strategies as st
from msgspec import structs

from headway.planning.capacity.bounds import too_long
from headway.planning.combos.problem import GpuCombo, Group
from headway.planning.fleet import text
from headway.planning.fleet.plan import split_verdict
from headway.planning.fleet.problem import WORTH, FleetPart, FleetPlan, FleetPoint, FleetRun, SizedOption

USD = st.floats(1, 2000).map(lambda value: round(value, 2))


def planned(usd: float, apart: float | None, is_met: bool = True) -> FleetPlan:
    part = FleetPart("m", GpuCombo("m", usd, aggregated=Group("h100-80gb-sxm")), 1)
    run = FleetRun(0.995, {"m": 0.995}, 0.1, 0.01, 1.0, 1000, False)
    point = FleetPoint("plan", "the plan", {"routing": "least-loaded"}, (part,), usd, (run,), 0.995, None, True)
    return FleetPlan(
        status="met",
        sentences=(),
        target=0.99,
        slo={"ttft_s": 1.0},
        models={"m": 1000},
        limits={},
        parts=(part,),
        policies=point.policies,
        gpus=part.gpus,
        usd_per_hour=usd,
        points=(point,),
        split=split_verdict(apart, usd, is_met),
    )


def amounts(sentence: str) -> list[float]:
    return [float(each.replace(",", "")) for each in re.findall(r"\$([\d,]+\.\d\d)", sentence)]


@given(USD, USD, st.booleans())
def test_separation_is_judged_by_the_prices_that_are_shown(usd: float, apart: float, is_met: bool) -> None:
    """A cheaper fleet is never called not worth it without what it saves, or that it is late."""
    plan = planned(usd, apart, is_met)
    fleet, split, _ = text.sentences(plan)
    (cost,) = amounts(fleet)
    (shown,) = amounts(split)
    assert cost == usd
    if "not worth it" in split:
        assert shown == apart
        if shown < cost and is_met:
            (saved,) = re.findall(r"which saves ([\d.]+)%", split)
            assert abs(float(saved) - 100 * (1 - shown / cost)) < 0.006
            assert shown * (1 + WORTH) >= cost
        elif shown < cost:
            assert split.endswith("and keeps too few requests in time.")
        else:
            assert "saves" not in split
    else:
        assert shown == cost and apart * (1 + WORTH) < cost and is_met


@given(st.integers(1, 500), st.integers(0, 500))
def test_the_share_that_is_too_long_is_that_of_its_numbers(num: int, more: int) -> None:
    sentence = too_long(num, num + more, "its context of 4,096 tokens")
    counted, total = (int(each.replace(",", "")) for each in re.findall(r"([\d,]+) of ([\d,]+) requests", sentence)[0])
    (share,) = re.findall(r"\(([\d.e+]+)%\)", sentence)
    assert (counted, total) == (num, num + more)
    assert abs(float(share) - 100 * num / (num + more)) <= 0.005 * float(share) + 1e-9


def test_a_model_whose_requests_are_too_long_is_no_matter_of_gpus() -> None:
    reason = "17 of 1,000 requests (1.7%) are longer, prompt and output, than its context of 4,096 tokens"
    plan = FleetPlan(
        status="short", sentences=(), target=0.99, slo={}, models={"m": 1000}, limits={}, unservable={"m": reason}
    )
    (sentence,) = text.short(plan)
    assert sentence == f"No fleet keeps 99% of each model's requests in time: m: {reason}."


def test_what_is_left_where_latencies_are_as_long_as_measured_runs_allow() -> None:
    run = FleetRun(
        0.995,
        {"m": 0.995, "n": 1.0},
        0.1,
        0.01,
        1.0,
        1000,
        False,
        longest={"ttft": 1.5, "tpot": 1.16},
        by_model_if_longest={"m": 0.914, "n": 0.99},
    )
    assert list(text.if_longest(run)) == [
        "9 of 10 measured runs are within TTFT x1.50, TPOT x1.16 of the predicted latencies: if all were so much"
        " longer, at least 91.4% of each model's requests would be in time"
    ]
    assert not list(text.if_longest(FleetRun(0.995, {"m": 0.995}, 0.1, 0.01, 1.0, 1000, False)))


def test_options_that_were_only_bounded_say_so_and_follow_by_price() -> None:
    units = [GpuCombo("m", price, aggregated=Group(gpu)) for gpu, price in (("l40s", 2.0), ("h100-80gb-sxm", 4.0))]
    options = (
        SizedOption("m", units[0], None, None, at_least=14),
        SizedOption("m", units[1], 3, 0.995),
        SizedOption("m", units[0], None, 0.5, "misses attainment with 64 replicas"),
    )
    rows = text.option_rows(structs.replace(planned(1.0, None), options=options))
    assert [row[2:5] for row in rows] == [["3", "$12.00", "99.5%"], ["≥ 14", "≥ $28.00", "-"], ["-", "-", "50%"]]
