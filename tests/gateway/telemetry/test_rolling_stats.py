"""Rolling statistics: latency quantiles, the window, outcomes, rates, and decisions for a reader."""

from __future__ import annotations

import math
from collections.abc import Callable
from random import Random
from types import SimpleNamespace
from typing import Any

import pytest

from headway.control.decisions import Decision, DecisionObserver
from headway.core.record import Outcome
from headway.gateway.telemetry.metrics import LAST_TIER
from headway.gateway.telemetry.rolling_stats import NUM_SLOTS, SLOT_S, RollingStats


def live(arrival_s: float, first_s: float, tokens: int, tier: int = 0, tenant: str = "", **slos: float) -> Any:
    none = {"slo_ttft_s": None, "slo_tpot_s": None, "slo_e2e_s": None, "deadline_s": None}
    return SimpleNamespace(
        tier=tier,
        arrival_s=arrival_s,
        first_token_s=first_s,
        num_sequences=1,
        generated_tokens=tokens,
        prompt_tokens=3,
        tenant=tenant,
        **none | slos,
    )


def rolling(decisions: DecisionObserver | None = None, usd: Callable[[], float] = lambda: 0.0) -> RollingStats:
    return RollingStats(decisions or DecisionObserver(), usd)


def test_quantiles_are_right_to_two_percent() -> None:
    rng, stats = Random(1), rolling()
    times = [rng.lognormvariate(-1.0, 1.5) for _ in range(2_000)]
    for i, ttft_s in enumerate(times):
        end_s = 100 + 100 * i / len(times)
        stats.count_end(live(end_s - 0.5 - ttft_s, end_s - 0.5, 11), Outcome.FINISHED, end_s)
    (row,) = stats.tiers(200.0)
    times.sort()
    for found, share in ((row.ttft_s.p50, 0.5), (row.ttft_s.p95, 0.95), (row.ttft_s.p99, 0.99)):
        true = times[math.ceil(share * len(times)) - 1]
        assert found is not None and abs(math.log(found / true)) < 0.0201
    assert row.tpot_s.p50 is not None and abs(row.tpot_s.p50 / 0.05 - 1) < 0.0201 and row.num == 2_000


def test_the_window_moves_and_memory_is_bounded() -> None:
    stats = rolling()
    for slot in range(10 * NUM_SLOTS):
        now = slot * SLOT_S
        stats.count_end(live(now - 1, now - 0.5, 2, tier=slot % 3), Outcome.FINISHED, now)
    series = stats.series(now, dict(stats.medians(now)))
    assert sum(row.num for row in stats.tiers(now)) == NUM_SLOTS == sum(series.requests)
    assert sum(series.tokens) == 2 * NUM_SLOTS and sum(series.failed) == 0 and set(series.tiers) == {"0", "1", "2"}
    assert all(len(line) == NUM_SLOTS for lines in series.tiers.values() for line in lines.values())
    assert len(stats._slots) <= NUM_SLOTS + 1
    assert list(stats.tiers(now + NUM_SLOTS * SLOT_S)) == []


def test_tiers_that_clients_choose_take_bounded_memory() -> None:
    stats = rolling()
    for tier in range(2 * LAST_TIER):
        stats.count_end(live(0.5, 0.9, 2, tier=tier), Outcome.FINISHED, 1.0)
    rows = list(stats.tiers(1.0))
    assert [row.tier for row in rows] == list(range(LAST_TIER + 1))
    assert rows[0].num == 1 and rows[-1].num == LAST_TIER and len(dict(stats.medians(1.0))) == LAST_TIER + 1


def test_outcomes_and_rates() -> None:
    stats = rolling()
    for i in range(60):
        outcome = (Outcome.FINISHED, Outcome.REJECTED, Outcome.CANCELLED)[i % 3]
        stats.count_end(live(i - 0.2, math.nan, 5), outcome, float(i))
    (row,) = stats.tiers(60.0)
    assert (row.num, row.failed) == (60, 20), "a cancelled request has not failed"
    assert row.tpot_s.p50 is row.ttft_s.p50 is None, "of an answer that was not streamed, only the duration is known"
    assert row.e2e_s.p50 == pytest.approx(0.2, rel=0.03)
    rates = stats.rates(60.0)
    assert rates.requests_per_s == pytest.approx(1.0, rel=0.05)
    assert rates.tokens_per_s == pytest.approx(5.0, rel=0.05)


def test_decisions_are_collected_only_for_a_reader() -> None:
    decisions = DecisionObserver()
    stats = rolling(decisions)
    assert not decisions.listeners
    stats.collect_decisions(0.0)
    stats.collect_decisions(1.0)
    assert len(decisions.listeners) == 1
    for i in range(200):
        decisions.listeners[0](Decision(float(i), "placed", str(i), "m", 0, "answering"))
    assert [one.request for one in stats.decisions][:2] == ["199", "198"]
    assert len(stats.decisions) <= 12, "the last few"
    assert stats.rates(199.9).decisions_per_s == {"placed": pytest.approx(1.0, rel=0.05)}
    stats.count_end(live(0, 0, 1), Outcome.FINISHED, 200.0)
    assert not decisions.listeners


def test_a_reader_that_leaves_costs_no_other_listener_a_decision() -> None:
    decisions, log = DecisionObserver(), list[Decision]()
    stats = rolling(decisions)
    stats.collect_decisions(0.0)
    decisions.listeners.append(log.append)
    for i in range(100):
        decision = Decision(float(i), "placed", str(i), "m", 0, "answering")
        for listener in decisions.listeners:
            listener(decision)
        stats.count_end(live(i, i, 1), Outcome.FINISHED, float(i))
    assert len(log) == 100 and decisions.listeners == [log.append]


def test_the_rate_of_decisions_is_since_they_are_collected() -> None:
    stats = rolling(decisions := DecisionObserver())
    stats.collect_decisions(1000.0)
    for i in range(8):
        decisions.listeners[0](Decision(1000.0 + i / 4, "moved" if i == 7 else "placed", "", "m", 0, "answering"))
    found = stats.rates(1002.0).decisions_per_s
    assert found == {"placed": pytest.approx(3.5), "moved": pytest.approx(0.5)}


def test_slos_and_tenants_over_the_window() -> None:
    stats = rolling()
    for i in range(4):
        stats.count_end(live(0.0, 0.1 * i, 2, tenant="a", slo_ttft_s=0.15), Outcome.FINISHED, 1.0)
    stats.count_end(live(0.0, math.nan, 0, tenant="b", slo_ttft_s=9.0), Outcome.REJECTED, 1.0)
    stats.count_end(live(0.0, 0.9, 90, tenant="b"), Outcome.FINISHED, 7.0)
    (tier,) = stats.tiers(8.0)
    assert (tier.slo.num, tier.slo.met) == (5, 2), "one that did not finish has missed, one without SLOs does not count"
    b, a = stats.tenants(8.0)
    assert (a.tenant, a.num, a.failed, a.tokens, a.slo.num, a.slo.met) == ("a", 4, 0, 20, 4, 2)
    assert (b.tenant, b.num, b.failed, b.tokens, b.slo.num, b.slo.met) == ("b", 2, 1, 96, 1, 0)
    slots = [(slot.num, slot.met) for slot in stats.series(8.0, {}).slo if slot.num]
    assert slots == [(5, 2)] and stats.tenants(8.0 + NUM_SLOTS * SLOT_S) == []


def test_tenants_that_clients_may_choose_take_bounded_memory() -> None:
    stats = rolling()
    for i in range(1000):
        stats.count_end(live(0.0, 0.1, 2, tenant=str(i)), Outcome.FINISHED, 1.0)
    found = stats.tenants(1.0)
    assert len(found) <= 201 and sum(each.num for each in found) == 1000 and found[0].tenant == "other"


def test_the_cost_of_tokens_is_what_was_spent_while_they_came() -> None:
    spent = iter([10.0, 13.0, 13.0, 40.0])
    stats = rolling(usd=lambda: next(spent))
    stats.count_end(live(0.0, 0.1, 1000), Outcome.FINISHED, 1.0)
    stats.count_end(live(0.0, 0.1, 500), Outcome.FINISHED, 6.0)
    found = stats.cost(7.0, 2.5)
    assert (found.usd, found.usd_per_hour) == (13.0, 2.5)
    assert found.usd_per_million_output_tokens == pytest.approx((13.0 - 10.0) / 1500 * 1e6)
    idle = stats.cost(7.0 + NUM_SLOTS * SLOT_S, 2.5)
    assert idle.usd == 40.0 and idle.usd_per_million_output_tokens is None
