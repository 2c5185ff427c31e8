"""Views of replicas: fresh, or as last scraped."""

from __future__ import annotations

from random import Random
from types import SimpleNamespace
from typing import Any

import pytest

from fakes import FakeReplica
from headway.control.observe import ReplicaViews, Scrape, ScrapedReplica
from headway.control.peers import PeerLoads, SharedReplica
from headway.core.errors import HeadwayError
from headway.core.view import REPLICA_FIELDS


def test_fresh_views_are_the_replicas() -> None:
    replicas = [FakeReplica(0), FakeReplica(1)]
    views = ReplicaViews(replicas, Scrape(), Random(0)).views
    assert all(view is replica for view, replica in zip(views, replicas, strict=True))


def test_a_scrape_is_seen_when_it_is_shown() -> None:
    replica = FakeReplica(0, num_in_flight=3, num_waiting=2, num_running=1, kv_blocks_used=7)
    views = ReplicaViews([replica], Scrape(1.0, 0.5), Random(0))
    view = views.views[0]
    assert (view.num_in_flight, view.num_waiting, view.kv_blocks_used) == (3, 0, 0)
    samples = views.scrape()
    replica.num_waiting = replica.num_in_flight = 9
    views.show(samples)
    assert (view.num_in_flight, view.num_waiting, view.num_running, view.kv_blocks_used) == (9, 2, 1, 7)


def test_lost_scrapes_leave_the_last_values() -> None:
    replicas = [FakeReplica(id) for id in range(4)]
    views = ReplicaViews(replicas, Scrape(1.0, 0.0, 0.25), Random(1))
    shown = sum(len(views.scrape()) for _ in range(2_000))
    assert shown == pytest.approx(0.75 * 8_000, rel=0.03)


@pytest.mark.parametrize("bad", [{"period_s": -1}, {"delay_s": -0.1}, {"loss": 1.0}, {"loss": -0.1}])
def test_invalid_scrapes_are_errors(bad: dict[str, float]) -> None:
    with pytest.raises(HeadwayError, match="observe"):
        Scrape(**bad)


@pytest.mark.parametrize("name", sorted(REPLICA_FIELDS))
def test_views_that_pass_a_replica_on_have_each_field_of_the_declaration(name: str) -> None:
    replica: Any = FakeReplica(7, num_in_flight=3, num_waiting=2, is_shared=True, loras=("a",), cached={1: 5})
    observed: Any = _Observed(replica)
    scraped = ScrapedReplica(observed)
    scraped.show(scraped.sample(0.0))
    for view in (scraped, SharedReplica(replica, replica, PeerLoads().at(7))):
        seen, own = getattr(view, name), getattr(replica, name)
        assert seen == own or list(seen) == list(own)


class _Observed:
    """A replica with the parts of `loras`."""

    recent_loras = SimpleNamespace(names=("a",))
    loras_running = ()

    def __init__(self, replica: Any) -> None:
        self._replica = replica

    def __getattr__(self, name: str) -> Any:
        return getattr(self._replica, name)
