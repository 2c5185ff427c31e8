"""Kept values of replicas against reading all of them, over runs of every kind."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from math import inf
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from headway.control import observe
from headway.control.changes import Changes, KeptValues
from headway.core.decision import Placement
from headway.core.replica_counts import Counts
from headway.core.view import REPLICA_FIELDS, FleetView, OracleReplicaView, RequestView
from headway.testing.strict_views import _attributes  # type: ignore[attr-defined]
from simulation import Scenario, num_examples, scenarios

FIELDS = sorted(_attributes(OracleReplicaView) - {"requests"})
COUNTS = sorted(REPLICA_FIELDS & set(dir(Counts)))


def read(field: str) -> Callable[[Any], Any]:
    """The key of one field, whose value does not change with the replica."""

    def key(replica: Any) -> Any:
        value = getattr(replica, field)
        if field == "num_by_tier":
            return {tier: num for tier, num in value.items() if num}
        return [*value] if field == "queue_lengths" else value

    return key


def counts(replica: Any) -> list[Any]:
    """The key of the fields that are read together."""
    together = Counts(replica)
    assert together.replica is replica
    return [getattr(together, field) for field in COUNTS]


RANKS = (
    (("kv_blocks_used", "num_in_flight"), True),
    (("num_waiting",), True),
    (("prefill_tokens_left", "output_tokens_left"), False),
    (("role",), False),
)
"""Fields, and whether ticks do not lower them."""


def rank(*fields: str) -> Callable[[Any], Any]:
    """The key of several fields in turn."""
    return lambda replica: tuple([getattr(replica, field) for field in fields])


class Comparing:
    """Round robin that compares what is kept of each field, and its least, with the replicas, at each request."""

    oracle = True

    def __init__(self) -> None:
        self.keys = {field: read(field) for field in FIELDS}
        self.ranks = [(rank(*fields), grows) for fields, grows in RANKS]
        self.turn = self.num_notes = 0
        self.most_held: dict[int, int] = {}

    def check_growth(self, view: Any) -> None:
        """Between two notes of a replica, ticks add no more KV tokens than it tells."""
        if view.changes is None or not view.changes.is_read:
            return
        notes: list[int] = view.changes.ids
        if self.num_notes > len(notes):
            self.num_notes, self.most_held = 0, {}
        for id in notes[self.num_notes :]:
            self.most_held.pop(id, None)
        self.num_notes = len(notes)
        for replica in view.replicas:
            together = Counts(replica)
            held = together.kv_blocks_used * together.block_size_tokens
            assert held <= self.most_held.setdefault(together.id, held + together.growth_tokens)

    def route(self, request: RequestView, view: FleetView) -> Placement:
        self.check_growth(view)
        for field, key in self.keys.items():
            assert [*view.map(key)] == [key(replica) for replica in view.replicas], field
        by_name = [[getattr(replica, field) for field in COUNTS] for replica in view.replicas]
        assert [*view.map(counts)] == by_name == [counts(replica) for replica in view.replicas]
        for key, grows in self.ranks:
            for declared in {False, grows}:
                found = view.find_least(key, declared)
                assert found is None or found is min(view.replicas, key=key)
        self.turn += 1
        return Placement(view.replicas[self.turn % len(view.replicas)].id)


@settings(
    max_examples=num_examples(40),
    derandomize="HEADWAY_FUZZ_EXAMPLES" not in os.environ,
    deadline=None,
    phases=[Phase.explicit, Phase.reuse, Phase.generate],
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.function_scoped_fixture],
)
@given(scenarios())
def test_kept_values_are_those_of_the_replicas(monkeypatch: pytest.MonkeyPatch, scenario: Scenario) -> None:
    monkeypatch.setattr(observe, "KEPT_FROM", 1)
    monkeypatch.setattr(observe, "_MOST_KEYS", 100)
    replace(scenario, router=Comparing).play()


class Timed:
    """A replica whose value holds for a second, and that counts how often it is read."""

    def __init__(self, id: int, clock: SimpleNamespace) -> None:
        self.id, self._clock = id, clock
        self.holds_until_s = 0.0
        self.num_reads = self.offset = 0

    @property
    def value(self) -> int:
        self.num_reads += 1
        self.holds_until_s = min(self.holds_until_s, self._clock.now + 1.0)
        return int(self._clock.now)


def test_only_what_has_changed_is_read() -> None:
    clock, changes = SimpleNamespace(now=0.0), Changes()
    replicas: Any = [Timed(id, clock) for id in range(3)]
    kept = KeptValues(lambda replica: replica.value, changes)
    kept.values(replicas, 0.0)
    assert not changes.is_read  # the list may be another one each time
    assert kept.values(replicas, 0.0) == [0, 0, 0]
    assert changes.is_read
    before = [replica.num_reads for replica in replicas]
    changes.ids.extend([1, 1, 77])
    clock.now = 0.5
    kept.values(replicas, 0.5)
    assert [replica.num_reads for replica in replicas] == [before[0], before[1] + 1, before[2]]
    clock.now = 1.0
    assert kept.values(replicas, 1.0) == [1, 0, 1]
    clock.now = 1.5
    assert kept.values(replicas, 1.5) == [1, 1, 1]


class Valued:
    """A replica whose value changes when it is told to, and once by itself."""

    def __init__(self, id: int, clock: SimpleNamespace) -> None:
        self.id, self._clock = id, clock
        self.before = self.after = 0
        self.until_s = self.holds_until_s = inf

    @property
    def value(self) -> int:
        if self._clock.now >= self.until_s:
            return self.after
        self.holds_until_s = min(self.holds_until_s, self.until_s)
        return self.before


UPDATES = st.tuples(st.integers(0, 4), st.integers(0, 3), st.integers(0, 3), st.sampled_from([1.0, 2.0, inf]))
STEPS = st.tuples(st.lists(UPDATES, max_size=3), st.integers(0, 1), st.sampled_from(["", "", "", "", "list", "limit"]))


@settings(max_examples=num_examples(100), derandomize="HEADWAY_FUZZ_EXAMPLES" not in os.environ, deadline=None)
@given(st.lists(STEPS, min_size=3, max_size=30), st.booleans())
def test_the_least_is_that_of_a_scan(
    steps: list[tuple[list[tuple[int, int, int, float]], int, str]], grows: bool
) -> None:
    """Of values that change at any time, alone and by themselves (or then only grow), in lists that are replaced; ties
    too."""
    clock, changes = SimpleNamespace(now=0.0), Changes()
    everyone: Any = [Valued(id, clock) for id in range(5)]
    kept = KeptValues(lambda replica: (replica.value, 0), changes, grows)
    replicas, last = everyone, None
    for updates, passed_s, event in steps:
        clock.now += passed_s
        for id, before, after, lasts_s in updates:
            one = everyone[id]
            one.before, one.after, one.until_s = before, max(before, after) if grows else after, clock.now + lasts_s
            changes.ids.append(id)
        if event == "limit":
            changes.ids.extend([0] * 20_000)
            changes.limit()
        if event == "list":
            replicas = everyone[len(updates) :]
        at = kept.first_least(replicas, clock.now)
        values = [replica.value for replica in replicas]
        assert at == (values.index(min(values)) if replicas is last else -1)
        last = replicas


def test_of_values_that_grow_few_are_read_again() -> None:
    """Those that have grown are read when they would be the least."""
    clock, changes = SimpleNamespace(now=0.0), Changes()
    replicas: Any = [Timed(id, clock) for id in range(50)]
    for replica in replicas[1:]:
        replica.offset = 10 * replica.id
    kept = KeptValues(lambda replica: replica.value + replica.offset, changes, grows=True)
    for now in range(9):
        clock.now = float(now)
        kept.first_least(replicas, clock.now)
    assert kept.first_least(replicas, 8.0) == 0
    assert sum(replica.num_reads for replica in replicas[1:]) == 49  # once each, when the values were filled in


def test_many_notes_are_discarded_and_all_is_read_anew() -> None:
    clock, changes = SimpleNamespace(now=0.0), Changes()
    replicas: Any = [Timed(0, clock)]
    kept = KeptValues(lambda replica: replica.value, changes)
    for _ in range(2):
        kept.values(replicas, 0.0)
    changes.ids.extend([5] * 20_000)
    changes.limit()
    assert not changes.ids
    clock.now = 0.9
    before = replicas[0].num_reads
    kept.values(replicas, 0.9)
    assert replicas[0].num_reads == before + 1
