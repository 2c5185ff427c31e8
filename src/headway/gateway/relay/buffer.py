"""What is on its way to a client, held back while it is not clear whether it will do."""

from __future__ import annotations

from headway.gateway.relay.writer import Headers, ResponseWriter


class Buffer:
    """Lets everything through, unless told to hold. Satisfies `Reply`."""

    def __init__(self, client: ResponseWriter) -> None:
        self._client = client
        self._begun: tuple[int, Headers] | None = None
        self._held: list[tuple[bytes, bool]] = []
        self._holds = False

    def start(self, status: int, headers: Headers) -> None:
        """To the client, or to wait."""
        if self._holds:
            self._begun = status, headers
        else:
            self._client.start(status, headers)

    def write(self, body: bytes, more: bool = False) -> None:
        """To the client, or to wait."""
        if self._holds:
            self._held.append((body, more))
        else:
            self._client.write(body, more)

    @property
    def is_full(self) -> bool:
        """The client's is."""
        return self._client.is_full

    async def drain(self) -> None:
        """Until the client has room."""
        await self._client.drain()

    def hold(self) -> None:
        """What comes now waits."""
        self._holds = True

    def drop(self) -> bool:
        """Forget what waits, and let through what comes. False if nothing was to wait."""
        was_held, self._holds = self._holds, False
        self._begun, self._held = None, []
        return was_held

    async def let_go(self) -> None:
        """What waits goes."""
        begun, held = self._begun, self._held
        self.drop()
        if begun is not None:
            self._client.start(*begun)
        for body, more in held:
            self._client.write(body, more)
            await self._client.drain()
        await self._client.drain()
