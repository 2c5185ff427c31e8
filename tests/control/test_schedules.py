"""Least numbers of replicas by the time of day: against a search minute by minute, and for any scaler."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from pathlib import Path
from random import Random
from typing import Any
from zoneinfo import ZoneInfo

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from control_fakes import FakeEffects, Fleet
from fakes import FakeReplica
from headway import catalog, scenario
from headway.config.strict_yaml import Places
from headway.control.observe import MutablePoolsView
from headway.control.scaling import PoolState, Scaling
from headway.control.service import Service
from headway.core.errors import HeadwayError
from headway.core.fleet import Engine, Pool, ScheduledMinimum
from headway.core.record import Records
from headway.gateway.fleet.scaling import ScalingWithFailures
from headway.limits.schedules import LeastReplicas
from headway.planning.rehearsals import model_keys
from headway.planning.scaling.plan import without_scaling
from headway.policies.scaling.minimum import MinimumScaler
from headway.serving.gateway import plan

MONDAY = datetime(2026, 3, 23, tzinfo=UTC)  # of the week in which Berlin's clocks go forward


@settings(max_examples=30, deadline=None)
@given(
    st.integers(0, 23),
    st.integers(0, 59),
    st.integers(1, 50),
    st.sampled_from(["*", "1-5", "0,6"]),
    st.sampled_from(["UTC", "Asia/Kolkata"]),
    st.integers(0, 9 * 1440),
)
def test_the_number_is_that_of_a_search_for_the_last_start(
    hour: int, minute: int, half_hours: int, weekdays: str, name: str, at_min: int
) -> None:
    minimum = ScheduledMinimum(
        cron=f"{minute} {hour} * * {weekdays}", duration_s=1800.0 * half_hours, replicas=5, time_zone=name
    )
    days = {"*": range(7), "1-5": range(5), "0,6": (5, 6)}[weekdays]
    now = MONDAY + timedelta(minutes=at_min)

    def begins(at: datetime) -> bool:
        there = at.astimezone(ZoneInfo(name))
        return (there.hour, there.minute) == (hour, minute) and there.weekday() in days

    on = any(begins(now - timedelta(minutes=back)) for back in range(30 * half_hours))
    found, until_s = LeastReplicas(2, (minimum,)).at(now.timestamp())
    assert found == (5 if on else 2)
    assert until_s > now.timestamp()
    before, _ = LeastReplicas(2, (minimum,)).at(min(until_s, now.timestamp() + 86400) - 1.0)
    assert before == found  # it holds until then


def test_the_clock_of_the_zone_is_followed_when_it_goes_forward() -> None:
    least = LeastReplicas(
        1, (ScheduledMinimum(cron="0 8 * * *", duration_s=3600.0, replicas=3, time_zone="Europe/Berlin"),)
    )
    for day, hour in ((27, 7), (28, 7), (29, 6), (30, 6)):  # in UTC; in the night to the 29th an hour is left out
        at = datetime(2026, 3, day, hour, tzinfo=UTC).timestamp()
        assert [least.at(at + shift)[0] for shift in (-1, 0, 3599, 3600)] == [1, 3, 3, 1]


def test_of_several_the_largest_counts() -> None:
    entries = (
        ScheduledMinimum(cron="0 8 * * *", duration_s=36000.0, replicas=3),
        ScheduledMinimum(cron="0 12 * * *", duration_s=3600.0, replicas=6),
    )
    least = LeastReplicas(1, entries)
    noon = (MONDAY + timedelta(hours=12)).timestamp()
    assert [least.at(noon + h * 3600)[0] for h in (-5, -1, 0, 1, 5, 6)] == [1, 3, 6, 3, 3, 1]
    assert least.at(noon - 3600)[1] == noon and least.at(noon)[1] == noon + 3600


class Wish:
    interval_s = 30.0

    def __init__(self, wanted: dict[str, int]) -> None:
        self.wanted = wanted

    def scale(self, view: Any) -> dict[str, int]:
        return self.wanted


@pytest.mark.parametrize("wanted", [{}, {"main": 1}, {"main": 3}])
def test_no_scaler_goes_below_the_minimum_of_the_moment(wanted: dict[str, int]) -> None:
    model, gpu = catalog.model("llama-3.1-8b"), catalog.gpu("a100-80gb")
    kind = Pool("main", model, gpu, Engine("simulated"), max_replicas=5)
    least = {"main": LeastReplicas(1, (ScheduledMinimum(cron="0 8 * * *", duration_s=3600.0, replicas=2),))}
    states = []

    def scaling(effects: FakeEffects, services: dict[str, Service]) -> Scaling:
        states.append(PoolState(kind, services))
        view = MutablePoolsView(Random(0))
        return Scaling(Wish(wanted), view, states, effects, (), least, MONDAY.timestamp())

    run = Fleet([FakeReplica(0, model=model.name)], scaling=scaling)
    tick = run.control.parts.scaling.tick  # type: ignore[union-attr]
    tick(7.9 * 3600)
    assert states[0].min_replicas == 1
    tick(8.0 * 3600)
    assert states[0].min_replicas == 2 and states[0].num_serving + states[0].num_starting >= 2
    tick(9.0 * 3600)
    assert states[0].min_replicas == 1


def test_a_gateway_follows_its_clock_when_the_machine_slept_or_the_clock_was_set() -> None:
    """Forward by hours within a minute of the gateway's own time, and back again."""
    model = catalog.model("llama-3.1-8b")
    kind = Pool("main", model, catalog.gpu("a100-80gb"), Engine("simulated"), max_replicas=5)
    least = {"main": LeastReplicas(1, (ScheduledMinimum(cron="0 8 * * *", duration_s=3600.0, replicas=2),))}
    states, wall_s = [], [MONDAY.timestamp()]

    def scaling(effects: FakeEffects, services: dict[str, Service]) -> Scaling:
        states.append(PoolState(kind, services))
        return ScalingWithFailures(
            Wish({}),
            MutablePoolsView(Random(0)),
            states,
            effects,
            (),
            lambda pool: None,
            frozenset(),
            list,
            least,
            lambda: wall_s[0],
        )

    run = Fleet([FakeReplica(0, model=model.name)], scaling=scaling)
    seen = []
    for i, hour in enumerate((7.0, 8.5, 7.5, 8.2, 30.0, 8.5)):
        wall_s[0] = MONDAY.timestamp() + 3600 * hour
        run.control.parts.scaling.tick(60.0 * i)  # type: ignore[union-attr]
        seen.append(states[0].min_replicas)
    assert seen == [1, 2, 1, 2, 1, 2]


def document(**changed: Any) -> dict[str, Any]:
    minimums = [{"cron": "0 8 * * 1-5", "duration_s": 36000, "replicas": 4, "time_zone": "Europe/Berlin"}]
    pool = {
        "name": "a",
        "model": "llama-3.1-8b",
        "gpu": "h100",
        "start_s": 60,
        "max_replicas": 6,
        "scheduled_min_replicas": minimums,
    }
    workload = {"arrivals": 0.001, "duration_s": 2 * 86400, "prompt_tokens": 10, "output_tokens": 2}
    made = {
        "name": "s",
        "workload": workload,
        "fleet": [pool],
        "policies": {"scaling": "minimum"},
        "simulation": {"begins": "2026-03-01T00:00:00+01:00"},
    }  # a Sunday
    return {**made, **changed}


def simulated(made: dict[str, Any]) -> Records:
    return scenario.Simulator().records(scenario.assemble(made, Places(), Path()))


def test_a_simulation_follows_the_schedule_of_its_own_day() -> None:
    records = simulated(document())
    begun = sorted(each.up[0][0] for each in records.replicas)
    assert begun == pytest.approx([0.0, *[86400 + 8 * 3600] * 3], abs=31)
    later = simulated(document(simulation={"begins": "2026-03-02T08:30:00+01:00"}))
    assert sorted(each.up[0][0] for each in later.replicas)[:4] == pytest.approx([0.0] * 4, abs=31)


def test_the_minimum_scaler_has_no_more_than_the_minimum() -> None:
    assert MinimumScaler().interval_s == 30.0
    records = simulated(document(simulation={"begins": "2026-03-01T00:00:00Z"}))
    assert len(records.replicas) == 4
    ended = [end for each in records.replicas for _, end in each.up if end < 1.8 * 86400]
    assert ended == pytest.approx([86400 + 17 * 3600] * 3, abs=31)  # at 18 o'clock in Berlin


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"cron": "0 8 * *"}, "five fields"),
        ({"cron": "0 25 * * *"}, "Bad hour"),
        ({"cron": "0 0 31 2 *"}, "never comes true|Bad day"),
        ({"time_zone": "Berlin"}, "Europe/Berlin"),
        ({"replicas": 7}, "7; expected 1 to 6"),
        ({"replicas": 0}, "1 or more"),
        ({"cron": "@reboot"}, "five fields"),
    ],
)
def test_a_bad_schedule_is_an_error_with_its_place(changed: dict[str, Any], said: str) -> None:
    made = document()
    made["fleet"][0]["scheduled_min_replicas"][0] |= changed
    with pytest.raises(HeadwayError, match=said):
        scenario.assemble(made, Places(), Path())


def test_a_schedule_needs_a_scaler_and_a_time() -> None:
    with pytest.raises(HeadwayError, match="goes with `policies: scaling`"):
        simulated(document(policies={}))
    for simulation in ({}, {"begins": "2026-03-02"}, {"begins": "soon"}):
        with pytest.raises(HeadwayError, match=r"2026-03-02T00:00"):
            simulated(document(simulation=simulation))


def test_plans_that_set_the_number_of_replicas_leave_the_schedule_out() -> None:
    assert "scheduled_min_replicas" not in model_keys(document()["fleet"][0])
    fixed = scenario.assemble(without_scaling(document()), Places(), Path())
    assert not scenario.Simulator().policies(fixed).least


def test_a_fleet_is_not_served_with_a_schedule_that_nothing_follows() -> None:
    pool = {**document()["fleet"][0], "endpoints": ["http://127.0.0.1:9"]}
    made = scenario.assemble({**document(policies={}), "fleet": [pool]}, Places(), Path())
    with pytest.raises(HeadwayError, match="goes with `policies: scaling`"):
        plan(made)
