"""The events of a replica: its ranks together, and whether answers agree with them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("zmq")

from headway.control.cache_index import CacheIndex
from headway.gateway.kv_events.agreement import MIN_SAMPLES, Agreement
from headway.gateway.kv_events.feeds import ReplicaFeed
from headway.gateway.kv_events.subscriber import EventCounts


def test_equal_counts_agree_and_a_block_does_not_matter() -> None:
    agreement = Agreement()
    for i in range(MIN_SAMPLES):
        assert agreement.share is None
        agreement.add([160 * (i + 1)], 160 * (i + 1) - 16, 16)
    assert agreement.share == 1 and agreement.num_compared == MIN_SAMPLES
    assert agreement.expected_tokens == agreement.reported_tokens


def test_an_engine_that_reports_nothing_is_not_judged() -> None:
    agreement = Agreement()
    for _ in range(100):
        agreement.add([640], 0, 16)
    assert agreement.share is None and not agreement.num_compared
    agreement.add([0], 320, 16)
    for _ in range(MIN_SAMPLES):
        agreement.add([640], 0, 16)
    assert agreement.share == 0 and agreement.num_compared == MIN_SAMPLES + 1


def test_a_request_was_at_one_of_the_ranks() -> None:
    agreement = Agreement()
    for i in range(2 * MIN_SAMPLES):
        agreement.add([640, 0], 640 if i % 2 else 0, 16)
    assert agreement.share == 1 and agreement.num_compared == MIN_SAMPLES


def test_prompts_that_are_nowhere_cached_say_nothing() -> None:
    agreement = Agreement()
    agreement.add([0], 16, 16)
    for _ in range(100):
        agreement.add([0], 0, 16)
    assert agreement.num_compared == 1 and agreement.share is None


class _Subscriber:
    def __init__(self, state: str, why: str = "") -> None:
        self.state, self.why, self.age_s, self.counts = state, why, 2.0, EventCounts(gaps=1, lost=2)
        self.blocks, self.doubts, self.trusts = SimpleNamespace(block_size_tokens=16), list[str](), 0

    def doubt(self, why: str) -> None:
        self.doubts.append(why)

    def trust(self) -> None:
        self.trusts += 1


def _feed(*subscribers: _Subscriber) -> tuple[ReplicaFeed, list[tuple[str, str]]]:
    told: list[tuple[str, str]] = []
    replica: Any = SimpleNamespace(name="pool/0", cache_index=CacheIndex(16, 10, guesses=True))
    feed = ReplicaFeed(replica, lambda replica, state, why: told.append((state, why)))
    feed.subscribers += subscribers  # type: ignore[arg-type]
    return feed, told


def test_the_state_is_that_of_the_rank_of_which_least_is_known() -> None:
    ranks = [_Subscriber("live"), _Subscriber("incomplete", "2 batches of events are lost")]
    feed, told = _feed(*ranks)
    assert (feed.state, feed.why) == ("incomplete", "rank 1: 2 batches of events are lost")
    assert (feed.counts.gaps, feed.counts.lost, feed.age_s) == (2, 4, 2.0)
    feed.changed()
    ranks[1].state, ranks[1].why = "live", ""
    feed.changed()
    feed.changed()
    assert told == [("incomplete", "rank 1: 2 batches of events are lost"), ("live", "")]
    alone, _ = _feed(_Subscriber("degraded", "the connection is lost"))
    assert alone.why == "the connection is lost"


@pytest.mark.parametrize(("reported", "is_trusted"), [(320, True), (480, True), (32, False)])
def test_events_that_do_not_agree_with_answers_are_doubted(reported: int, is_trusted: bool) -> None:
    subscriber = _Subscriber("live")
    feed, _ = _feed(subscriber)
    for _ in range(MIN_SAMPLES):
        feed.answered([320], reported)
    assert bool(subscriber.trusts) == is_trusted and len(subscriber.doubts) == (not is_trusted)
    if not is_trusted:
        assert "10% are the same" in subscriber.doubts[0]
        assert feed.agreement.share is None, "the next judgement is of the answers to come"
