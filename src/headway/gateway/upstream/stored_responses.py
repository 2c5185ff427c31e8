"""Which engine keeps which response of /v1/responses: each keeps those that it has made itself.

The ids of answers are noted as they end. An id that is not known, as the gateway was restarted or another one relayed
the answer, is looked for at all engines.
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
"""Ids that are remembered; beyond it, the oldest are looked for."""
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
        """Replica, tenant and tokens."""
        self._searches = asyncio.Semaphore(_MAX_SEARCHES)

    def add(self, id: str, replica: int, tenant: str, num_tokens: int = 0) -> None:
        """A replica has made this response, which has so many tokens with all that it continues; 0: not known."""
        self._holders[id] = replica, tenant, num_tokens
        self._holders.move_to_end(id)
        if len(self._holders) > _MAX_KEPT:
            self._holders.popitem(last=False)

    def holder(self, id: str) -> tuple[int, str] | None:
        """The replica that keeps a response and the tenant whose it is; None: not known."""
        known = self._holders.get(id)
        return None if known is None else known[:2]

    def num_tokens(self, id: str) -> int:
        """Tokens of the prompt of a request that continues a response, beside its own; 0 if they are not known."""
        known = self._holders.get(id)
        return 0 if known is None else known[2]

    async def find(self, id: str, replicas: Sequence[EngineEndpoint], tenant: str) -> int | None:
        """The replica that keeps a response, which all are asked for if it is not known; None: no replica has it, or it
        is another tenant's."""
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
