"""Messages between gateways: pieces of a gateway's state, packed so that every store can carry them."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator
from functools import lru_cache

import msgspec
from msgspec import Raw, Struct

from headway.control.peers import Load
from headway.core.request import Segment

MAX_BYTES = 7_900
"""A payload of PostgreSQL's NOTIFY is shorter than 8,000 bytes."""
_HEADER_BYTES = 200
MAX_SEGMENTS = 128
"""Maximum number of a prompt's segments in a message. Only the leading segments are sent."""


@lru_cache(maxsize=4096)
def replica_key(model: str, url: str) -> int:
    """A replica's name in messages. Each gateway numbers its replicas in its own order."""
    return int.from_bytes(hashlib.blake2b(f"{model} {url}".encode(), digest_size=6).digest())


class LoadAt(Struct, array_like=True, tag="l", gc=False):
    """The gateway's current load at a replica. A state names only replicas with load."""

    replica: int
    load: Load


class Placed(Struct, array_like=True, tag="p", gc=False):
    """A prompt that the gateway sent to a replica, whose prefix cache will hold it. Has the attributes that
    `CacheIndex.placed` reads."""

    replica: int
    id: int
    prompt_tokens: int
    segments: list[int]
    """Segment ids and token counts, alternating."""

    @property
    def prefix(self) -> tuple[Segment, ...]:
        pairs = iter(self.segments)
        return tuple(Segment(id, tokens) for id, tokens in zip(pairs, pairs, strict=True))


class Quarantined(Struct, array_like=True, tag="q", gc=False):
    """A body that broke engines, and the time for which it stays barred."""

    digest: str
    left_s: float


class Served(Struct, array_like=True, tag="s", gc=False):
    """The service that a tenant has received from the gateway since its start."""

    model: str
    share: tuple[int, str]
    """Tier and tenant."""
    service: float


class Arrived(Struct, array_like=True, tag="a", gc=False):
    """The demand of the sending gateway since its start, now and in its last report. Scalers use it."""

    model: str
    region: str
    tier: int
    num_before: int
    tokens_before: int
    num: int
    tokens: int


class Held(Struct, array_like=True, tag="h", gc=False):
    """Number of requests in the gateway's hold queue, by model. A state names only models with held requests."""

    model: str
    num: int


class Drained(Struct, array_like=True, tag="d", gc=False):
    """A replica that the gateway's scaler drains. A state names only drained replicas."""

    replica: int


Piece = LoadAt | Placed | Quarantined | Served | Arrived | Held | Drained


class Message(Struct, array_like=True):
    """A part of a gateway's state."""

    gateway: str
    run: int
    """A number that increases with each start of this gateway."""
    sequence: int
    """Number of the state."""
    is_last: bool
    """Whether this part completes the state."""
    is_leaving: bool
    """Whether the gateway stops."""
    pieces: list[LoadAt | Placed | Quarantined | Served | Arrived | Held | Drained] = []


_DECODER = msgspec.json.Decoder(Message)


def packed(gateway: str, run: int, sequence: int, pieces: Iterable[Piece], is_leaving: bool = False) -> Iterator[str]:
    """The messages of one state, each within the size limit. A piece that is larger than the limit is left out."""
    encode, most = msgspec.json.encode, MAX_BYTES - _HEADER_BYTES - len(gateway)
    part: list[Raw] = []
    size = 0
    for piece in pieces:
        raw = encode(piece)
        if len(raw) > most:
            continue
        if size + len(raw) > most:
            yield encode([gateway, run, sequence, False, is_leaving, part]).decode()
            part, size = [], 0
        part.append(Raw(raw))
        size += len(raw) + 1
    yield encode([gateway, run, sequence, True, is_leaving, part]).decode()


def unpacked(text: str) -> Message:
    """Decode a message. msgspec.MsgspecError if another version of Headway has written it."""
    return _DECODER.decode(text)
