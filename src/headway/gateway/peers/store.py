"""The interface of the store that gateways of one fleet share: messages, copies of streams, and the leader's lease."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence

from headway.gateway.scheduling.stream_copy import KEEP_S

OVER = -1
"""Part number of a marker: the stream's own gateway will not continue the stream."""
KEEP_PARTS_S = 2 * KEEP_S
"""Time for which a stream is kept after its last part."""
StoredPart = tuple[int, str, bytes]
"""(number, gateway, content) of a part."""


class PeerStore(ABC):
    """One gateway's connections. Every method except `close` raises an OSError if the store cannot be used."""

    @abstractmethod
    async def connect(self, receive: Callable[[str], None], lost: Callable[[], None]) -> None:
        """Pass the other gateways' messages to `receive` from now on. Call `lost` when the connection breaks."""

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
        """Store parts of streams: digest, number, and content."""

    @abstractmethod
    async def remove_streams(self, digests: Sequence[bytes]) -> None:
        """Remove streams. Streams that another gateway has taken over are kept."""

    @abstractmethod
    async def resume_streams(self, digests: Sequence[bytes]) -> None:
        """Mark streams that were over at this gateway as continued here."""

    @abstractmethod
    async def take_stream(self, digest: bytes) -> None:
        """Take over another gateway's stream."""

    @abstractmethod
    async def parts(self, digest: bytes) -> list[StoredPart]:
        """The stored parts of a stream, in order."""

    @abstractmethod
    async def tidy(self) -> None:
        """Remove expired streams, and verify that the store accepts writes."""

    @abstractmethod
    async def is_alive(self, gateway: str) -> bool:
        """Whether a gateway is connected."""
