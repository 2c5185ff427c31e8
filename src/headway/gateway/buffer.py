"""What is on its way to a client, held back while it is not clear whether it will do."""

from __future__ import annotations

from collections.abc import MutableMapping
from typing import Any

from headway.gateway.send import Send


class Buffer:
    """Lets everything through, unless told to hold."""

    def __init__(self, client: Send) -> None:
        self._client = client
        self._held: list[MutableMapping[str, Any]] = []
        self.send = client
        """To the client, or to wait."""

    async def _keep(self, message: MutableMapping[str, Any]) -> None:
        self._held.append(message)

    def hold(self) -> None:
        """What comes now waits."""
        self.send = self._keep

    def drop(self) -> bool:
        """Forget what waits, and let through what comes. False if nothing was to wait."""
        was_held = self.send is not self._client
        self._held, self.send = [], self._client
        return was_held

    async def let_go(self) -> None:
        """What waits goes."""
        held = self._held
        self.drop()
        for message in held:
            await self._client(message)
