"""Several schedulers in front of one simulated fleet."""

from __future__ import annotations

from collections import Counter
from itertools import cycle
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import headway as hw
from headway.control.peers import Load, load_of
from headway.core.errors import HeadwayError
from headway.core.record import Outcome
from headway.sim.schedulers import Schedulers, SchedulerState


def scenario(schedulers: dict[str, Any] | None = None, replicas: int = 3, **changes: Any) -> hw.Scenario:
    return hw.load(
        {
            "workload": {"builtin": "chat-sessions", "num_requests": 250, "arrivals": 12.0},
            "fleet": [
                {
                    "name": "pool",
                    "model": "llama-3.1-8b",
                    "gpu": "l40s",
                    "replicas": replicas,
                    "engine": {"name": "vllm-0.15", "max_num_seqs": 24},
                }
            ],
            "policies": {"routing": "least-loaded"},
            "observe": {"period_s": 1.0, **({} if schedulers is None else {"schedulers": schedulers})},
            **changes,
        }
    )


def test_own_counts_of_all_schedulers_are_the_replicas(monkeypatch: pytest.MonkeyPatch) -> None:
    """At every message: requests, prompts yet to compute, generated tokens, tiers, with prefix caches."""
    checked: Counter[bool] = Counter()
    receive = Schedulers.receive

    def check(self: Schedulers, scheduler: int, state: SchedulerState, now: float) -> None:
        for number, own in self._own[0].items():
            replica, total = own._replica.view, Load()
            for each in self._own:
                total.add(load_of(each[number]))
            assert (total.num_in_flight, total.prefill_tokens_left) == (
                replica.num_in_flight,
                replica.prefill_tokens_left,
            )
            assert total.tokens_generated == replica.tokens_generated
            assert total.expected_cached_tokens == replica.expected_cached_tokens
            assert total.num_by_tier == {tier: num for tier, num in replica.num_by_tier.items() if num}
            checked[total.num_in_flight > 2 and total.prefill_tokens_left > 0] += 1
        receive(self, scheduler, state, now)

    monkeypatch.setattr(Schedulers, "receive", check)
    workload = {"builtin": "chat-sessions", "num_requests": 120, "arrivals": 12.0}
    policies = {"routing": "lmetric", "window": 40}
    run = hw.simulate(scenario({"num": 3, "period_s": 0.5}, policies=policies, workload=workload))
    assert checked[True] > 20
    assert (run.records.requests["outcome"] == Outcome.FINISHED).all()


def test_schedulers_that_tell_each_other_place_as_well_as_one_and_others_do_not() -> None:
    def play(schedulers: dict[str, Any] | None) -> Any:
        return hw.simulate(scenario(schedulers, workload={"builtin": "chat", "num_requests": 100, "arrivals": 4.0}))

    def ttft_s(run: Any) -> float:
        return run.metrics["ttft_s.mean"]

    one, shared = play(None), play({"num": 3, "period_s": 0.02, "delay_s": 0.0})
    late, silent = play({"num": 3, "period_s": 20.0, "lease_s": 60.0}), play({"num": 3, "shared": False})
    assert ttft_s(shared) < ttft_s(one) + 0.2 * (ttft_s(silent) - ttft_s(one)) < ttft_s(late) < ttft_s(silent)
    for same, as_ in ((one, {"num": 1, "period_s": 0.01}), (silent, {"num": 3, "away": [[0.0, 1e6]]})):
        assert np.array_equal(same.records.requests["end_s"], play(as_).records.requests["end_s"])


@pytest.mark.ci
@pytest.mark.parametrize("source", ["placements", "events"])
def test_prompts_that_others_placed_are_found_once_they_are_told(source: str) -> None:
    """Turns of a conversation arrive at any scheduler: one that hears nothing does not know where the last one was."""

    def cached_tokens(schedulers: dict[str, Any]) -> int:
        run = hw.simulate(
            scenario(
                policies={"routing": "lmetric"},
                observe={
                    "cache": {"source": source, "period_s": 1e6},
                    "schedulers": schedulers,
                },
                workload={"builtin": "chat-sessions", "num_requests": 80, "arrivals": 4.0},
                replicas=6,
            )
        )
        return int(run.records.requests["cached_prompt_tokens"].sum())

    one, shared, silent = cached_tokens({}), cached_tokens({"num": 3}), cached_tokens({"num": 3, "shared": False})
    assert silent < 0.9 * one
    assert shared > silent + 0.8 * (one - silent)


@pytest.mark.parametrize("ordering", ["fair", "vtc", "drr"])
def test_a_tenant_that_floods_at_one_scheduler_is_held_back_at_another(
    ordering: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Both tenants ask the second one alike, and the flood the first one as well."""
    turns, until_s = (("flood", 0), ("flood", 0), ("flood", 1), ("quiet", 1)), 60.0
    rows = [f"{0.16 * i},200,160,{turns[i % 4][0]}" for i in range(375)]
    (tmp_path / "day.csv").write_text("\n".join(["arrival_s,prompt_tokens,output_tokens,tenant", *rows]))

    def started(shared: bool) -> Counter[str]:
        """Requests that have started, by tenant, of those that came to the second scheduler."""
        places = cycle(at for _, at in turns)
        monkeypatch.setattr(Schedulers, "choose", lambda self: next(places))
        found = hw.simulate(
            scenario(
                {"num": 2, "shared": shared},
                replicas=1,
                workload={"trace": str(tmp_path / "day.csv")},
                policies={"routing": "least-loaded", "ordering": ordering, "ordering_at": "gateway", "window": 12},
                simulation={"until_s": until_s},
            )
        ).records
        ids = found.requests["request"][~np.isnan(found.requests["admitted_s"])]
        return Counter(turns[id % 4][0] for id in ids if turns[id % 4][1] == 1)

    aware, silent = started(True), started(False)
    assert aware["quiet"] > 3 * aware["flood"] > 0
    assert silent["quiet"] < 1.2 * silent["flood"]


def test_tenants_service_elsewhere_counts() -> None:
    """A flood of one tenant: the other one's requests go first at every scheduler, and none is lost."""
    workload = {"builtin": "chat", "num_requests": 300, "arrivals": 60.0, "tenants": {"quiet": 1, "flood": 9}}
    policies = {"routing": "least-loaded", "ordering": "fair", "ordering_at": "gateway"}
    run = hw.simulate(scenario({"num": 3}, workload=workload, policies=policies))
    assert (run.records.requests["outcome"] == Outcome.FINISHED).all()
    assert run.metrics["tenant.quiet.ttft_s.mean"] < 0.5 * run.metrics["tenant.flood.ttft_s.mean"]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"schedulers": {"num": 0}}, "num must be >= 1"),
        ({"schedulers": {"num": 2, "away": [[3, 1]]}}, "the earlier one first"),
        ({"schedulers": {"num": 2, "period_s": 3}}, "lease_s > period_s"),
    ],
)
def test_wrong_settings_are_named(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(HeadwayError, match=message):
        scenario(**changes)


def test_what_needs_one_scheduler_is_refused() -> None:
    scaling = {"routing": "least-loaded", "scaling": "keda"}
    with pytest.raises(HeadwayError, match=r"policies\.scaling is simulated with one scheduler only"):
        hw.simulate(scenario({"num": 2}, policies=scaling))
