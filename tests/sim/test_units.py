"""The simulator's parts, each against a slow and obvious version of itself."""

from __future__ import annotations

from dataclasses import dataclass, field
from random import Random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fakes import FakeReplica
from headway.control.live import Live
from headway.control.observe import ReplicaViews, Scrape
from headway.core.errors import HeadwayError
from headway.core.record import boundary_s
from headway.core.request import Segment
from headway.perf import copies, memory
from headway.sim.host_memory import HostPrefixTier
from headway.sim.kernel import ARRIVAL, COMMAND, FINISH, TICK, Kernel
from headway.sim.kvcache import KvCache
from headway.sim.timeline import completed, first_boundary_at
from inside import replicas_of
from simulation import GPU, MODEL, Scenario, play, pool, request, seconds

# KV blocks.

joins = st.lists(st.tuples(st.integers(1, 200), st.integers(0, 40)), max_size=12)
"""(own tokens, tick at which it joins) of decoding requests."""


@given(st.sampled_from([1, 2, 4, 16]), joins, st.integers(0, 60), st.integers(0, 50), st.data())
def test_kv_blocks_are_those_of_each_request(
    block: int, joined: list[tuple[int, int]], later: int, pinned: int, data: st.DataObject
) -> None:
    tick = max((at for _, at in joined), default=0) + later
    kv = KvCache(10**6, block, 0.0)
    kv.pinned = pinned
    for tokens, at in joined:
        kv.join(tokens, at)
    for tokens, at in data.draw(st.lists(st.sampled_from(joined), unique=True)) if joined else []:
        kv.leave(tokens + tick - at, tick)
        joined = [*joined]
        joined.remove((tokens, at))

    def used(tick: int) -> int:
        return pinned + sum(-(-(tokens + tick - at) // block) for tokens, at in joined)

    assert kv.count == len(joined)
    assert kv.used(tick) == used(tick)
    assert kv.needed_next(tick) == used(tick + 1) - used(tick)
    wanted = data.draw(st.integers(0, 100))
    kv.total = used(tick) + data.draw(st.integers(0, 40))
    assert kv.free(tick) == kv.total - used(tick)
    assert kv.can_tick(tick) == (used(tick + 1) <= kv.total)
    fits = [ticks for ticks in range(wanted + 1) if used(tick + ticks) <= kv.total]
    assert kv.ticks_left(tick, wanted) == max(fits)
    blocks = data.draw(st.integers(0, 50))
    assert kv.has_free(blocks, tick) == (kv.total - used(tick) >= blocks)


def test_the_watermark_is_whole_blocks() -> None:
    assert KvCache(150, 16, 0.01).watermark == 1
    assert KvCache(99, 16, 0.01).watermark == 0


# The clock.

clocks = st.tuples(st.floats(0, 1e5), st.floats(1e-5, 1.0), st.one_of(st.just(0.0), st.floats(1e-9, 1e-3)))


@given(clocks, st.integers(0, 300), st.integers(0, 300), st.floats(-0.5, 1.5), st.booleans())
def test_boundaries_are_found(
    clock: tuple[float, float, float], low: int, more: int, share: float, on_boundary: bool
) -> None:
    high = low + more
    start_s, a_s, b_s = clock
    boundaries = {k: boundary_s(start_s, a_s, b_s, k) for k in range(low, high + 1)}
    first, last = boundaries[low], boundaries[high]
    now = boundaries[low + int(share * more) % (more + 1)] if on_boundary else first + share * (last - first)
    at_or_after = [k for k, time_s in boundaries.items() if time_s >= now]
    assert first_boundary_at(start_s, a_s, b_s, now, low, high) == min(at_or_after, default=high)
    at_or_before = [k for k, time_s in boundaries.items() if time_s <= now]
    assert completed(start_s, a_s, b_s, now, low, high) == max(at_or_before, default=low)


def test_a_boundary_is_the_sum_of_its_iterations() -> None:
    start_s, a_s, b_s = 3.0, 0.01, 1e-5
    time_s = start_s
    for k in range(1000):
        assert boundary_s(start_s, a_s, b_s, k) == pytest.approx(time_s, abs=1e-9)
        time_s += a_s + k * b_s


# Events.


@given(st.lists(st.tuples(st.sampled_from([0.0, 1.0, 1.5]), st.integers(0, 3), st.integers(0, 2)), max_size=40))
def test_events_come_by_time_priority_key_and_turn(events: list[tuple[float, int, int]]) -> None:
    kernel, seen = Kernel(), []
    for number, (time_s, priority, key) in enumerate(events):
        kernel.at(time_s, priority, key, lambda now, number: seen.append(number), number)
    assert kernel.num_events == len(events)
    kernel.run()
    assert seen == sorted(range(len(events)), key=lambda number: (*events[number], number))


@dataclass
class Deciding:
    """Writes down when it is asked to decide."""

    id: int
    log: list[Any]

    def decide(self, now: float) -> None:
        self.log.append((now, "decide", self.id))


def test_replicas_decide_last_and_in_order_of_id() -> None:
    kernel, log = Kernel(), []
    replicas = [Deciding(id, log) for id in range(3)]

    def happen(now: float, argument: tuple[str, int | None]) -> None:
        log.append((now, argument[0]))
        if argument[1] is not None:
            kernel.undecided.append(replicas[argument[1]])

    for priority, name, wakes in [(TICK, "tick", None), (ARRIVAL, "arrival", 0), (FINISH, "finish", 2)]:
        kernel.at(1.0, priority, 0, happen, (name, wakes))
    kernel.at(1.0, COMMAND, 0, happen, ("command", None))
    kernel.at(2.0, FINISH, 0, happen, ("finish", 1))
    kernel.run()
    assert [entry[1] for entry in log] == [
        "finish", "command", "arrival", "tick", "decide", "decide", "finish", "decide",
    ]  # fmt: skip
    assert [entry[2] for entry in log if entry[1] == "decide"] == [0, 2, 1]


def test_a_run_stops_before_what_lies_beyond() -> None:
    kernel, seen = Kernel(), []
    for time_s in (1.0, 2.0, 3.0):
        kernel.at(time_s, TICK, 0, lambda now, _: seen.append(now))
    kernel.run(2.0)
    assert (seen, kernel.num_events) == ([1.0, 2.0], 1)
    kernel.run()
    assert seen == [1.0, 2.0, 3.0]


# Host memory, as a replica gets it.


def host_memory(num_bytes: float) -> Any:
    engine = {"preemption": "swap", "host_memory_bytes": num_bytes}
    return replicas_of(Scenario((request(0),), (pool(**engine),)).cluster())[0].batch.host


def test_host_memory_is_taken_and_given_back() -> None:
    per_token = memory.kv_bytes_per_token(MODEL)
    host = host_memory(100 * per_token)
    one, other = Live(0, 0.0, 1, 1), Live(1, 0.0, 1, 1)
    assert host.swap_out(one, 60) == pytest.approx(copies.host_copy_s(60 * per_token, GPU), rel=1e-9)
    assert (one.swapped_tokens, host.used_tokens) == (60, 60)
    assert host.swap_out(other, 41) is None
    assert (other.swapped_tokens, host.used_tokens) == (0, 60)
    assert host.swap_out(other, 40) is not None
    assert host.swap_in(one) == pytest.approx(copies.host_copy_s(60 * per_token, GPU), rel=1e-9)
    host.drop(other)
    assert (one.swapped_tokens, other.swapped_tokens, host.used_tokens) == (0, 0, 0)


# Views.


def test_fresh_views_are_the_replicas() -> None:
    replicas = [FakeReplica(0), FakeReplica(1)]
    views = ReplicaViews(replicas, Scrape(), Random(0)).views
    assert all(view is replica for view, replica in zip(views, replicas, strict=True))


def test_a_scrape_is_seen_when_it_is_shown() -> None:
    replica = FakeReplica(0, num_in_flight=3, num_waiting=2, num_running=1, kv_blocks_used=7)
    observer = ReplicaViews([replica], Scrape(1.0, 0.5), Random(0))
    view = observer.views[0]
    assert (view.num_in_flight, view.num_waiting, view.kv_blocks_used) == (3, 0, 0)
    samples = observer.scrape()
    replica.num_waiting = replica.num_in_flight = 9
    observer.show(samples)
    assert (view.num_in_flight, view.num_waiting, view.num_running, view.kv_blocks_used) == (9, 2, 1, 7)


def test_lost_scrapes_leave_the_last_values() -> None:
    replicas = [FakeReplica(id) for id in range(4)]
    observer = ReplicaViews(replicas, Scrape(1.0, 0.0, 0.25), Random(1))
    shown = sum(len(observer.scrape()) for _ in range(2_000))
    assert shown == pytest.approx(0.75 * 8_000, rel=0.03)


@pytest.mark.parametrize("bad", [{"period_s": -1}, {"delay_s": -0.1}, {"loss": 1.0}, {"loss": -0.1}])
def test_scraping_that_cannot_be(bad: dict[str, float]) -> None:
    with pytest.raises(HeadwayError, match="observe"):
        Scrape(**bad)


# The prefix cache against one that names every block.


@dataclass
class NaiveCache:
    """One replica serving one request at a time, each block by its content: (segment, index), or None.

    `free` is the line: the block freed longest ago is taken first, and loses its content then.
    """

    total: int
    block: int
    free: list[tuple[int, int] | None] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.free = [None] * self.total

    def serve(self, prefix: tuple[Segment, ...], output_tokens: int, output_id: int | None) -> int:
        """Prompt tokens served from the cache."""
        owners = [segment.id for segment in prefix for _ in range(segment.tokens)]
        prompt = len(owners)
        kv_tokens = prompt + output_tokens - 1
        # A block that straddles segments belongs to the later one; it is named by its owner and its place.
        names: list[tuple[int, int] | None] = [
            (owners[end - 1], end) for end in range(self.block, prompt + 1, self.block)
        ]
        hit = 0
        while hit < min(len(names), (prompt - 1) // self.block) and names[hit] in self.free:
            hit += 1
        for name in names[:hit]:
            self.free.remove(name)
        kept = set(self.free)
        num_blocks = -(-kv_tokens // self.block)
        del self.free[: num_blocks - hit]
        # What is computed anew although another copy is still cached stays nameless.
        still = kept & set(self.free)
        mine = [name if i < hit or name not in still else None for i, name in enumerate(names)]
        said = [(output_id, end) for end in range(len(names), kv_tokens // self.block)] if output_id else []
        mine += [*said, *([None] * (num_blocks - len(names) - len(said)))]
        self.free += self.order(mine, len(names))
        return hit * self.block

    def order(self, mine: list[Any], num_prompt: int) -> list[Any]:
        """Nameless blocks first, then those of the last segment, and so on to the first."""
        owners = list(dict.fromkeys(name[0] for name in mine if name is not None))
        nameless = [None] * sum(name is None for name in mine)
        return nameless + [
            name for owner in reversed(owners) for name in reversed(mine) if name is not None and name[0] == owner
        ]


chains = st.lists(
    st.tuples(st.integers(0, 2), st.integers(0, 3), st.integers(0, 3), st.integers(1, 30), st.booleans()),
    min_size=1,
    max_size=25,
)
LENGTHS = ((20, 16, 37), (5, 16, 40, 33), (8, 31, 4, 50))
"""Tokens of the segments at each depth of a tree of prompts."""


@settings(deadline=None)
@given(chains, st.sampled_from([4, 16]), st.integers(0, 12))
def test_prefix_hits_are_those_of_named_blocks(chains: Any, block: int, spare: int) -> None:
    requests, longest = [], 0
    for id, (a, b, c, output, says) in enumerate(chains):
        ids = (1 + a, 10 + 10 * a + b, 1000 + 100 * a + 10 * b + c)
        lengths = (LENGTHS[0][a], LENGTHS[1][b], LENGTHS[2][c])
        prefix = tuple(Segment(i, n) for i, n in zip(ids, lengths, strict=True))
        output_id = 50_000 + id if says else None
        requests.append(request(id, 1e3 * id, sum(lengths), output, prefix=prefix, output_id=output_id))
        longest = max(longest, sum(lengths) + output)
    blocks = -(-longest // block) + spare
    one = pool(prefix_caching=True, block_size_tokens=block, kv_capacity_tokens=blocks * block)
    records = play(requests, one, line=seconds(1.0))
    naive = NaiveCache(blocks, block)
    expected = [naive.serve(r.prefix, r.output_tokens, r.output_id) for r in requests]
    assert records.requests["cached_prompt_tokens"].tolist() == expected


def test_host_tier_forgets_the_least_recently_used() -> None:
    tier = HostPrefixTier(10, lambda blocks: float(blocks))
    tier.store(1, 4)
    tier.store(2, 4)
    tier.store(1, 0)  # used again
    tier.store(3, 4)
    assert [tier.blocks(segment) for segment in (1, 2, 3)] == [4, 2, 4]
    tier.store(3, 9)
    assert [tier.blocks(segment) for segment in (1, 2, 3)] == [1, 0, 9]
    tier.store(4, 99)
    assert [tier.blocks(segment) for segment in (1, 2, 3, 4)] == [0, 0, 0, 10]
    assert tier.load_s(3) == 3.0
