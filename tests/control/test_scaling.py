"""The roll-out of a target fleet: units are started, drained and stopped."""

from __future__ import annotations

from collections.abc import Mapping
from random import Random
from typing import Any

import pytest

from control_fakes import FakeEffects, Fleet
from fakes import FakeReplica
from headway import catalog
from headway.control.live import HELD, WAITING
from headway.control.observe import MutablePoolsView
from headway.control.scaling import PoolState, Scaling
from headway.control.service import Member, Service
from headway.core.errors import HeadwayError
from headway.core.fleet import Engine, Pool
from headway.core.view import PoolsView

MODEL, GPU = catalog.model("llama-3.1-8b"), catalog.gpu("a100-80gb")


class Wish:
    """A scaler that asks for what the test says."""

    interval_s = 10.0

    def __init__(self) -> None:
        self.wanted: dict[str, int] = {}
        self.view: PoolsView | None = None

    def scale(self, view: PoolsView) -> Mapping[str, int]:
        self.view = view
        return self.wanted


def scaled(num: int, limit: int | None = None, **pool: Any) -> tuple[Fleet, Wish, Scaling]:
    """A pool of `num` replicas in region "east", with a limit of GPUs."""
    wish = Wish()
    kind = Pool("main", MODEL, GPU, Engine("simulated"), replicas=num, region="east", **pool)
    limits = [] if limit is None else [("east", GPU.name, limit)]

    def scaling(effects: FakeEffects, services: dict[str, Service]) -> Scaling:
        return Scaling(wish, MutablePoolsView(Random(0)), [PoolState(kind, services)], effects, limits)

    run = Fleet([FakeReplica(i, model=MODEL.name, combo=i) for i in range(num)], scaling=scaling)
    assert run.control.parts.scaling is not None
    return run, wish, run.control.parts.scaling


def test_a_start_counts_at_once_and_serves_when_it_is_up() -> None:
    run, wish, scaling = scaled(1)
    wish.wanted = {"main": 2}
    scaling.tick(0.0)
    scaling.tick(10.0)  # the unit that starts is not started again
    assert run.effects.started_units == ["main"]
    pool = wish.view.pools[0]  # type: ignore[union-attr]
    assert (pool.num_serving, pool.num_starting) == (1, 1)
    added = FakeReplica(1, model=MODEL.name, combo=1)
    run.effects.replicas[1] = added
    run.control.on_crashed(0, [], 15.0)
    held = run.arrive(0, 16.0)
    assert held.stage is HELD
    run.control.on_unit_started("main", [Member(added, 1000, None, "main")], 20.0)
    assert held.stage is WAITING and run.effects.started == [(0, 1)]
    assert (pool.num_serving, pool.num_starting, pool.num_down) == (1, 0, 1)


def test_the_emptiest_replica_drains_and_stops_when_it_is_empty() -> None:
    run, wish, scaling = scaled(2)
    live = run.arrive(0)  # at replica 0
    other = run.arrive(1)
    assert (live.replica, other.replica) == (0, 0)
    run.effects.replicas[1].num_in_flight = 1
    wish.wanted = {"main": 1}
    scaling.tick(0.0)
    assert run.effects.drained == [(1, True)] and run.effects.stopped == []
    run.effects.replicas[1].num_in_flight = 0
    run.finish(live, 5.0)
    assert run.effects.stopped == [1]


def test_a_draining_replica_is_used_again_before_another_starts() -> None:
    run, wish, scaling = scaled(2)
    run.effects.replicas[1].num_in_flight = 1
    run.effects.replicas[0].num_in_flight = 2
    wish.wanted = {"main": 1}
    scaling.tick(0.0)
    wish.wanted = {"main": 3}
    scaling.tick(10.0)
    assert run.effects.drained == [(1, True), (1, False)] and run.effects.started_units == ["main"]


def test_a_region_has_only_so_many_gpus() -> None:
    run, wish, scaling = scaled(1, limit=2)
    wish.wanted = {"main": 5}
    scaling.tick(0.0)
    assert run.effects.started_units == ["main"]


def test_demand_is_counted_by_model_region_and_tier() -> None:
    run, wish, scaling = scaled(1)
    run.arrive(0, model=MODEL.name.upper(), region="west", tier=1, prompt=7)
    run.arrive(1, region="west", tier=1, prompt=8)
    scaling.tick(0.0)
    assert wish.view is not None and wish.view.arrived == {(MODEL.name, "west", 1): (2, 15)}


@pytest.mark.parametrize(
    ("wanted", "message"),
    [({"mian": 2}, "scaler Wish: unknown pool 'mian'; did you mean 'main'"), ({"main": 9}, "wants 9 of main")],
)
def test_a_target_must_name_pools_and_keep_their_limits(wanted: dict[str, int], message: str) -> None:
    _, wish, scaling = scaled(1, max_replicas=4)
    wish.wanted = wanted
    with pytest.raises(HeadwayError, match=message):
        scaling.tick(0.0)
