"""The messages between gateways: each short enough for PostgreSQL, and together what was told."""

from __future__ import annotations

import pytest
from msgspec import MsgspecError

from headway.control.peers import Load
from headway.core.request import Segment
from headway.gateway.peers.messages import (
    MAX_BYTES,
    Arrived,
    Drained,
    Held,
    LoadAt,
    Piece,
    Placed,
    Quarantined,
    Served,
    packed,
    replica_key,
    unpacked,
)


def test_a_state_of_any_size_is_told_in_messages_that_fit() -> None:
    pieces: list[Piece] = [
        LoadAt(replica_key("m", f"http://engine-{i}:8000"), Load(3, 4000, 900, 16, 6000, {0: 3}, [1, 2]))
        for i in range(500)
    ]
    pieces += [Placed(1, i, 2000, [2**63 + i, 16] * 60) for i in range(50)]
    pieces += [Quarantined("ab" * 16, 2.5), Served("m", (0, "team"), 1e6)]
    pieces += [Arrived("m", "", 1, 2, 300, 4, 500), Held("m", 3), Drained(7)]
    messages = list(packed("a" * 60, 2**60, 7, pieces))
    assert len(messages) > 10 and max(len(each.encode()) for each in messages) < MAX_BYTES
    found = [unpacked(each) for each in messages]
    assert [piece for each in found for piece in each.pieces] == pieces
    assert [each.is_last for each in found] == [False] * (len(found) - 1) + [True]
    assert {(each.gateway, each.run, each.sequence, each.is_leaving) for each in found} == {("a" * 60, 2**60, 7, False)}


def test_a_piece_that_fits_into_no_message_is_left_out() -> None:
    pieces: list[Piece] = [Placed(1, 2, 3, [1] * 9000), Quarantined("00", 1.0)]
    (message,) = packed("a", 1, 1, pieces)
    assert unpacked(message).pieces == pieces[1:]


def test_a_placed_prompt_is_as_a_cache_index_reads_it() -> None:
    assert Placed(1, 2, 30, [7, 16, 8, 4]).prefix == (Segment(7, 16), Segment(8, 4))


def test_a_message_of_another_version_is_told_from_ours() -> None:
    with pytest.raises(MsgspecError):
        unpacked('{"gateway": "a"}')
