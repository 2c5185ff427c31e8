"""Finds the engine that stores a response of /v1/responses: each engine stores the responses that it generated. The
gateway notes the ids of ended answers. If it lacks an id, because it was restarted or another gateway relayed the
answer, it asks all engines.
"""

from __future__ import annotations

import asyncio
import re
from collections import OrderedDict
from collections.abc import Sequence

from headway.gateway.upstream.engine import EngineEndpoint
from headway.gateway.upstream.errors import EngineError

PATH = "/v1/responses"
_ID = re.compile(r"[\w.:-]{1,256}", re.ASCII)
_MAX_KEPT = 50_000
"""Maximum number of remembered ids. For a forgotten id, all engines are asked."""
_TIMEOUT_S = 2.0
_MAX_SEARCHES = 16
"""Maximum number of concurrent searches, each of which asks all engines."""


def is_id(text: str) -> bool:
    """Whether a text may be an id, and part of a path."""
    return _ID.fullmatch(text) is not None and text.strip(".") != ""


class StoredResponses:
    """The engines of responses, by the responses' ids."""

    def __init__(self) -> None:
        self._holders: OrderedDict[str, tuple[int, str, int]] = OrderedDict()
        """Maps each response id to (replica, tenant, tokens)."""
        self._searches = asyncio.Semaphore(_MAX_SEARCHES)

    def add(self, id: str, replica: int, tenant: str, num_tokens: int = 0) -> None:
        """Record that a replica stores a response. `num_tokens` counts the response and everything that it continues;
        0: unknown."""
        self._holders[id] = replica, tenant, num_tokens
        self._holders.move_to_end(id)
        if len(self._holders) > _MAX_KEPT:
            self._holders.popitem(last=False)

    def holder(self, id: str) -> tuple[int, str] | None:
        """The replica that stores a response, and the response's tenant; None: unknown."""
        known = self._holders.get(id)
        return None if known is None else known[:2]

    def num_tokens(self, id: str) -> int:
        """Tokens that a stored response adds to the prompt of a request that continues it; 0: unknown."""
        known = self._holders.get(id)
        return 0 if known is None else known[2]

    async def find(self, id: str, replicas: Sequence[EngineEndpoint], tenant: str) -> int | None:
        """The replica that stores a response. If it is unknown, all replicas are asked. None: no replica has the
        response, or it is another tenant's response."""
        known = self._holders.get(id)
        if known is not None:
            return known[0] if known[1] == tenant else None
        if not replicas or not is_id(id):
            return None
        async with self._searches:
            answers = await asyncio.gather(*(_has(id, replica) for replica in replicas))
        found = next((replica.id for replica, has in zip(replicas, answers, strict=True) if has), None)
        if found is not None:
            self.add(id, found, tenant)
        return found


async def _has(id: str, replica: EngineEndpoint) -> bool:
    try:
        status, _ = await replica.client.fetch(f"{PATH}/{id}", _TIMEOUT_S)
    except EngineError:
        return False
    return status == 200
