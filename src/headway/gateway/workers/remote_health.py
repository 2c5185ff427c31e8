"""What a worker sees of replicas' health, told to the scheduler."""

from __future__ import annotations

from time import monotonic

from headway.gateway.upstream.engine import EngineEndpoint
from headway.gateway.upstream.errors import BrokenOffError, EngineError, RefusedError, UnreachableError
from headway.gateway.workers import protocol
from headway.gateway.workers.protocol import Link

_PERIOD_S = 0.02


class RemoteHealth:
    """What replicas do, for the scheduler to keep count of. Satisfies `exchange.Health`."""

    def __init__(self, link: Link) -> None:
        self._link = link
        self._well: dict[int, float] = {}
        """When a replica was last said to be well."""

    def failed(self, replica: EngineEndpoint, error: EngineError) -> None:
        """A request failed there."""
        self._well.pop(replica.id, None)
        status = error.status if isinstance(error, RefusedError) else 0
        unreachable, broken_off = isinstance(error, UnreachableError), isinstance(error, BrokenOffError)
        self._link.say(protocol.Trouble(replica.id, str(error), status, unreachable, broken_off))

    def succeeded(self, replica: EngineEndpoint) -> None:
        """A request was answered. Told once for many, unless one fails in between."""
        now = monotonic()
        if now - self._well.get(replica.id, 0.0) < _PERIOD_S:
            return
        self._well[replica.id] = now
        self._link.say(protocol.RequestSucceeded(replica.id))
