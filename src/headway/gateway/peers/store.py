"""What gateways that share a fleet can ask their store: messages, copies of streams, and a lease for the leader."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence

from headway.gateway.scheduling.stream_copy import KEEP_S

OVER = -1
"""The part of a stream that says that its gateway does not go on with it."""
KEEP_PARTS_S = 2 * KEEP_S
"""A stream is kept for so long after its last part."""
StoredPart = tuple[int, str, bytes]
"""Number, gateway, and what it has."""


class PeerStore(ABC):
    """One gateway's connections. Every method but `close` raises an OSError if the store cannot be used."""

    @abstractmethod
    async def connect(self, receive: Callable[[str], None], lost: Callable[[], None]) -> None:
        """Have the others' messages given to `receive` from now on, and `lost` called when the connection breaks."""

    @abstractmethod
    async def close(self) -> None:
        """Leave at once. Never fails."""

    @abstractmethod
    async def publish(self, messages: Sequence[str]) -> None: ...

    @abstractmethod
    async def acquire_lease(self, name: str, lease_s: float) -> bool:
        """Take or renew a lease, unless another gateway has it."""

    @abstractmethod
    async def release_lease(self, name: str) -> None: ...

    @abstractmethod
    async def add_parts(self, parts: Sequence[tuple[bytes, int, bytes]]) -> None:
        """Keep parts of streams: digest, number, and what they have."""

    @abstractmethod
    async def remove_streams(self, digests: Sequence[bytes]) -> None:
        """Remove streams, but for those that another gateway has taken over."""

    @abstractmethod
    async def resume_streams(self, digests: Sequence[bytes]) -> None:
        """Streams that were over here go on here."""

    @abstractmethod
    async def take_stream(self, digest: bytes) -> None:
        """Take over a stream of another gateway."""

    @abstractmethod
    async def parts(self, digest: bytes) -> list[StoredPart]:
        """What is kept of a stream, in order."""

    @abstractmethod
    async def tidy(self) -> None:
        """Remove streams that were kept for long enough, and make sure that the store takes what is written."""

    @abstractmethod
    async def is_alive(self, gateway: str) -> bool:
        """Whether a gateway is connected."""
