"""KV cache events on the wire: the forms of several versions, and what is malformed."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from headway.core.errors import HeadwayError
from headway.gateway.kv_events import wire
from headway.gateway.kv_events.wire import AllBlocksCleared, BlockRemoved, BlockStored

EVENTS = [
    BlockStored([b"a", 2**64 - 1], b"parent", list(range(32)), 16, None, "GPU", "adapter"),
    BlockRemoved([b"a"], "CPU"),
    AllBlocksCleared(),
]


def _fields(event: wire.Event) -> dict[str, Any]:
    return msgspec.structs.asdict(event)


@pytest.mark.parametrize("as_arrays", [False, True], ids=["maps", "arrays"])
def test_batches_survive_the_wire(as_arrays: bool) -> None:
    events = wire.decode(wire.encode(EVENTS, 1.5, as_arrays))
    assert [_fields(event) for event in events] == [_fields(event) for event in EVENTS]
    for event, expected in zip(events, EVENTS, strict=True):
        assert isinstance(event, type(expected))


STORED, REMOVED = ["BlockStored", [7], None, [1, 2], 2, None], ["BlockRemoved", [7]]
OLD = {
    "the first versions, without a medium": [1.0, [STORED, REMOVED]],
    "a rank of data parallelism": [1.0, [STORED, REMOVED], 0],
    "fields that are not known yet": [1.0, [[*STORED, "GPU", None, None, 0, "full", 5, "new"], REMOVED]],
    "an event that is not known yet": [1.0, [STORED, ["BlockPinned", [7]], REMOVED]],
    "maps within an array": [
        1.0,
        [
            {
                "type": "BlockStored",
                "block_hashes": [7],
                "parent_block_hash": None,
                "token_ids": [1, 2],
                "block_size": 2,
                "lora_id": None,
                "medium": "GPU",
                "lora_name": None,
                "session_id": "s",
            },
            {"type": "BlockRemoved", "block_hashes": [7], "medium": "GPU"},
        ],
    ],
    "maps, one of them unknown": {
        "ts": 1.0,
        "events": [
            {"type": "BlockStored", "block_hashes": [7], "token_ids": [1, 2], "block_size": 2},
            {"type": "BlockPinned"},
            {"type": "BlockRemoved", "block_hashes": [7]},
        ],
        "data_parallel_rank": 0,
    },
}


@pytest.mark.parametrize("batch", OLD.values(), ids=OLD)
def test_other_versions_are_read(batch: object) -> None:
    stored, removed = wire.decode(msgspec.msgpack.encode(batch))
    assert isinstance(stored, BlockStored) and isinstance(removed, BlockRemoved)
    assert (stored.block_hashes, stored.token_ids, stored.block_size) == ([7], [1, 2], 2)
    assert removed.block_hashes == [7]


MALFORMED = {
    "nothing": b"",
    "a cut batch": wire.encode(EVENTS, 1.0, True)[:20],
    "text": b"BlockStored",
    "no events": msgspec.msgpack.encode({"ts": 1.0}),
    "a number": b"\x01",
    "an array of nothing": b"\x90",
    "tokens that are no numbers": msgspec.msgpack.encode([1.0, [["BlockStored", [7], None, ["a"], 1]]]),
    "hashes that are no list": msgspec.msgpack.encode({"ts": 1.0, "events": [{"type": "BlockRemoved"}]}),
}


@pytest.mark.parametrize("payload", MALFORMED.values(), ids=MALFORMED)
def test_malformed_batches_are_refused(payload: bytes) -> None:
    with pytest.raises(HeadwayError, match="malformed"):
        wire.decode(payload)
