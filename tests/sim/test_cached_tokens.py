"""`ReplicaView.cached_tokens` in the simulator: what the replica serves from its cache, at once or as events tell."""

from __future__ import annotations

from dataclasses import dataclass, field
from random import Random
from typing import Any

import pytest

from headway.control.observe import CacheObservation, Scrape
from headway.core.decision import Placement
from headway.core.fleet import Fault
from headway.core.record import Records
from headway.core.request import Request, Segment
from headway.core.view import FleetView, RequestView
from simulation import both_steps, play, pool, request, seconds


@dataclass
class Reader:
    """Sends requests to replicas in turn, and notes what each has of them."""

    cached: list[int] = field(default_factory=list)
    loadable: list[int] = field(default_factory=list)
    reads: bool = True
    expected: list[int] = field(default_factory=list)

    def route(self, request: RequestView, view: FleetView) -> Placement:
        chosen = view.replicas[request.id % len(view.replicas)]
        if self.reads:
            self.expected.append(sum(replica.expected_cached_tokens for replica in view.replicas))
            for replica in view.replicas:
                replica.cached_tokens(request)
            self.cached.append(chosen.cached_tokens(request))
            self.loadable.append(chosen.loadable_tokens(request))
        return Placement(chosen.id)


def conversations(num: int, gap_s: float, seed: int = 1) -> list[Request]:
    """Requests with prompts from a tree of shared beginnings; a few continue an answer."""
    rng, requests = Random(seed), []
    for id in range(num):
        a, b = rng.randrange(3), rng.randrange(4)
        prefix = (Segment(a, 100), Segment(10 + 10 * a + b, 150 + 7 * b))
        output_id = None if rng.random() < 0.5 else 1000 + id
        before = [one for one in requests if one.output_id is not None and one.arrival_s < id * gap_s - 300]
        if before and rng.random() < 0.4:
            last = rng.choice(before)
            prefix = (*last.prefix, Segment(last.output_id or 0, last.output_tokens))
        tokens = sum(segment.tokens for segment in prefix)
        requests.append(request(id, id * gap_s, tokens, rng.randrange(1, 60), prefix=prefix, output_id=output_id))
    return requests


def run(
    requests: list[Request], reader: Reader, step: Any = "stretch", observe: Scrape | None = None, **of_pool: Any
) -> Records:
    two = pool(prefix_caching=True, replicas=2, **of_pool)
    return play(requests, two, router=lambda: reader, line=seconds(0.5, 1e-3), step=step, scrape=observe or Scrape())


@both_steps
@pytest.mark.parametrize("blocks", [40, 200])
@pytest.mark.parametrize("offload", [0, 2e9])
def test_an_idle_replica_shows_what_it_then_serves(step: Any, blocks: int, offload: float) -> None:
    reader = Reader()
    records = run(conversations(60, 200.0), reader, step=step, kv_capacity_tokens=blocks * 16, kv_offload_bytes=offload)
    served = records.requests["cached_prompt_tokens"].tolist()
    assert [a + b for a, b in zip(reader.cached, reader.loadable, strict=True)] == served
    assert sum(reader.cached) > 0
    assert bool(sum(reader.loadable)) == (offload > 0 and blocks == 40)


@both_steps
def test_reading_changes_nothing_at_busy_replicas(step: Any) -> None:
    requests = conversations(120, 1.5)
    left, right = (run(requests, Reader(reads=reads), step=step, kv_capacity_tokens=60 * 16) for reads in (True, False))
    assert left.requests["preemptions"].sum() > 0
    for column in ("cached_prompt_tokens", "first_token_s", "end_s", "preemptions"):
        assert left.requests[column].tolist() == right.requests[column].tolist(), column


@pytest.mark.parametrize("offload", [0, 2e9])
def test_events_show_what_the_cache_held_at_the_last_batch(offload: float) -> None:
    """At idle replicas nothing changes after it, so that events show the same as the cache itself."""
    requests = conversations(60, 200.0)
    exact, reported = Reader(), Reader()
    of_pool = {"kv_capacity_tokens": 40 * 16, "kv_offload_bytes": offload}
    run(requests, exact, **of_pool)
    run(requests, reported, observe=Scrape(cache=CacheObservation("events", 10.0, 5.0, loss=0.2)), **of_pool)
    assert reported.cached == exact.cached
    assert reported.loadable == exact.loadable


def test_events_that_come_late_are_seen_late() -> None:
    prefix = (Segment(1, 160),)
    requests = [request(id, at_s, 161, 1, prefix=prefix) for id, at_s in enumerate((0.0, 0.0, 20.0, 20.0, 60.0, 60.0))]
    reader = Reader()
    run(requests, reader, observe=Scrape(cache=CacheObservation("events", 10.0, 25.0, placed=False)))
    assert reader.cached == [0, 0, 0, 0, 160, 160]
    reader = Reader()
    run(requests, reader, observe=Scrape(cache=CacheObservation("events", 10.0, 25.0)))
    assert reader.cached == [0, 0, 160, 160, 160, 160], "where it was placed is known at once"


def test_placements_alone_show_a_prompt_before_it_is_computed_and_after_it_is_evicted() -> None:
    prefix = (Segment(1, 160),)
    requests = [request(id, 0.0, 161, 1, prefix=prefix) for id in range(4)]
    reader = Reader()
    run(requests, reader, observe=Scrape(cache=CacheObservation("placements")))
    assert reader.cached == [0, 0, 160, 160]


def test_a_crash_empties_what_is_known() -> None:
    prefix = (Segment(1, 160),)
    requests = [request(id, 100.0 * id, 161, 1, prefix=prefix) for id in range(6)]
    for source in ("exact", "events", "placements"):
        reader = Reader()
        one = pool(prefix_caching=True)
        play(
            requests,
            one,
            router=lambda reader=reader: reader,
            line=seconds(0.5),
            faults=(Fault(250.0, 0, 20.0),),
            scrape=Scrape(cache=CacheObservation(source)),
        )
        assert reader.cached == [0, 160, 160, 0, 160, 160], source


def test_what_is_expected_in_the_cache_counts_until_the_prefill_begins() -> None:
    prefix = (Segment(1, 160),)
    times = (0.0, 100.0, 100.0, 100.0, 200.0)
    requests = [request(id, at_s, 161, 3, prefix=prefix) for id, at_s in enumerate(times)]
    reader = Reader()
    play(requests, pool(prefix_caching=True, max_num_seqs=1), router=lambda: reader, line=seconds(0.5))
    assert reader.cached == [0, 160, 160, 160, 160]
    assert reader.expected == [0, 0, 160, 320, 0]
