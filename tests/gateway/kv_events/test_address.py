"""Where the ranks of an engine publish."""

from __future__ import annotations

import pytest

from headway.core.errors import HeadwayError
from headway.gateway.kv_events.address import EventAddress, KvEvents


def test_each_rank_publishes_at_the_next_ports() -> None:
    events = KvEvents(endpoint="tcp://{host}:5557", replay_endpoint="tcp://{host}:5657", topic="kv@{host}")
    assert events.address("http://10.0.0.1:8000") == EventAddress(
        "tcp://10.0.0.1:5557", "tcp://10.0.0.1:5657", "kv@10.0.0.1"
    )
    assert events.address("http://10.0.0.1:8000", 3) == EventAddress(
        "tcp://10.0.0.1:5560", "tcp://10.0.0.1:5660", "kv@10.0.0.1"
    )
    own = KvEvents(endpoint="ipc:///run/events-{rank}")
    assert own.address("http://a", 2).endpoint == "ipc:///run/events-2"
    events.check(100)


@pytest.mark.parametrize(
    ("events", "ranks", "message"),
    [
        (KvEvents(replay_endpoint="tcp://{host}:5558"), 2, "5558 is the .*; expected ports with room for 2 ranks"),
        (KvEvents(endpoint="tcp://{host}:5560", replay_endpoint="tcp://{host}:5558"), 3, "room for 3 ranks"),
        (KvEvents(endpoint="ipc:///run/events"), 2, "endpoint: 'ipc:///run/events' has no port for rank 1"),
        (KvEvents(endpoint="tcp://{name}:1"), 1, "expected no placeholders but"),
    ],
)
def test_addresses_that_cannot_be_are_named(events: KvEvents, ranks: int, message: str) -> None:
    with pytest.raises(HeadwayError, match=message):
        events.check(ranks)
