"""Who looks after replicas: are they there, how loaded are they, and when is one that fails left alone?

A circuit breaker per replica. It opens at once when no connection can be had or one is broken off, when health checks
fail, and after several failures in a row of requests; then nothing is sent there. After a pause, which doubles each
time and is none at first where one was broken off, a probe is sent: the health check and, where requests had failed, a
completion of one token. Only when all is well is it closed.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from contextlib import suppress
from typing import Annotated

import msgspec

from headway.gateway.errors import reported
from headway.gateway.fleet.replica import Engine, LiveReplica
from headway.gateway.relay.sse import NONSENSE
from headway.gateway.scheduling import sglang_disaggregation
from headway.gateway.settings import Settings
from headway.gateway.upstream.client import BrokenOffError, EngineError, UnreachableError, read
from headway.gateway.upstream.dialects import load
from headway.gateway.upstream.errors import RefusedError

log = logging.getLogger("headway.gateway")
MOST_FAILURES = 3
"""In a row, before the breaker opens."""
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.25, 5.0


class _Models(msgspec.Struct):
    data: list[_Model]


class _Model(msgspec.Struct):
    id: str
    max_model_len: Annotated[int, msgspec.Meta(ge=1)] | None = None


class Breaker:
    """One replica's."""

    def __init__(self) -> None:
        self.is_open = True
        """Nothing is sent; so it begins, until the replica has been seen."""
        self.num_failures = self.num_missed = 0
        """In a row: of requests, and of looks at it."""
        self.pause_s = FIRST_PAUSE_S
        self.distrusts = False
        """Health checks alone do not close it: requests had failed."""
        self.is_suspect = False
        """It is open until the replica has been looked at, which is to be done at once."""

    def failed(self, error: EngineError) -> bool:
        """A request failed. True if that opens the breaker."""
        self.num_failures += 1
        if isinstance(error, RefusedError) and error.status in (408, 429):
            self.num_failures -= 1
        if self.is_open or not (isinstance(error, UnreachableError) or self.num_failures >= MOST_FAILURES):
            return False
        self.distrusts = not isinstance(error, UnreachableError)
        self.is_open = True
        return True

    def succeeded(self) -> None:
        """A request was answered."""
        self.num_failures = 0
        self.pause_s = FIRST_PAUSE_S

    def pause(self) -> float:
        """How long to leave the replica alone; longer each time."""
        pause_s, self.pause_s = self.pause_s, min(2 * self.pause_s, LONGEST_PAUSE_S)
        return pause_s


class HealthMonitor:
    """All replicas."""

    def __init__(
        self,
        replicas: list[LiveReplica],
        settings: Settings,
        up: Callable[[LiveReplica], None],
        down: Callable[[Engine], None],
        abandon: Callable[[LiveReplica], None],
        scraped: Callable[[], None],
    ) -> None:
        self.replicas = list(replicas)
        self._settings = settings
        self._up, self._down, self._abandon, self._scraped = up, down, abandon, scraped
        self.breakers = {replica.id: Breaker() for replica in replicas}
        self._nudges = {replica.id: asyncio.Event() for replica in replicas}
        self._tasks: dict[int, asyncio.Task[None]] = {}

    def start(self) -> None:
        """Look after them from now on."""
        for replica in self.replicas:
            self._tasks[replica.id] = asyncio.create_task(self._mind(replica))

    def add(self, replica: LiveReplica) -> None:
        """Look after one more."""
        self.replicas.append(replica)
        self.breakers[replica.id], self._nudges[replica.id] = Breaker(), asyncio.Event()
        self._tasks[replica.id] = asyncio.create_task(self._mind(replica))

    def leave(self, replica: LiveReplica) -> None:
        """Look after one no longer, and have nothing sent there."""
        self._tasks.pop(replica.id).cancel()
        self.replicas.remove(replica)
        self.breakers[replica.id].is_open = True
        self._down(replica)

    async def stop(self) -> None:
        """No longer."""
        tasks = list(self._tasks.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def is_up(self, replica: Engine) -> bool:
        """Requests are sent there."""
        return not self.breakers[replica.id].is_open

    # What exchanges tell.

    def failed(self, replica: Engine, error: EngineError) -> None:
        """A request failed there."""
        breaker = self.breakers[replica.id]
        if breaker.failed(error):
            self._open(replica, error)
        elif isinstance(error, BrokenOffError) and self.is_up(replica):
            # Were it gone, what is sent there next would fail, too. So it is looked at first.
            breaker.is_open = breaker.is_suspect = True
            self._open(replica, error)
        self._nudges[replica.id].set()

    def succeeded(self, replica: Engine) -> None:
        """A request was answered."""
        self.breakers[replica.id].succeeded()

    def _open(self, replica: Engine, error: EngineError) -> None:
        log.warning("%s at %s is down: %s", replica.name, replica.url, error)
        self._down(replica)

    # The loop of one replica.

    async def _mind(self, replica: LiveReplica) -> None:
        breaker, nudge = self.breakers[replica.id], self._nudges[replica.id]
        while True:
            nudge.clear()
            with reported(f"{replica.name}: who was to hear of it failed"):
                await self._look(replica, breaker)
            at_rest_s = FIRST_PAUSE_S if breaker.num_missed else self._settings.scrape_period_s
            pause_s = breaker.pause() if breaker.is_open else at_rest_s
            with suppress(TimeoutError):
                async with asyncio.timeout(pause_s):
                    await nudge.wait()
                    await asyncio.sleep(FIRST_PAUSE_S if breaker.is_open and not breaker.is_suspect else 0)
            breaker.is_suspect = False

    async def _look(self, replica: LiveReplica, breaker: Breaker) -> None:
        try:
            await self._probe(replica, breaker)
        except EngineError as error:
            breaker.num_missed += 1
            missed_most = breaker.num_missed >= MOST_FAILURES
            if not breaker.is_open and (isinstance(error, UnreachableError) or missed_most):
                breaker.is_open = True
                self._open(replica, error)
                self._abandon(replica)
        else:
            breaker.num_missed = 0

    async def _probe(self, replica: LiveReplica, breaker: Breaker) -> None:
        """Is it well? And how loaded? EngineError if it is not."""
        timeout_s, adapter = self._settings.probe_timeout_s, replica.adapter
        status, data = await replica.client.fetch(adapter.health, timeout_s)
        if status != 200:
            raise RefusedError(status, data)
        if replica.served is None or breaker.is_open:
            await self._ask_name(replica)
            if replica.is_half:
                await sglang_disaggregation.learn(replica, timeout_s)
            if replica.slots is not None:
                await replica.slots.learn(replica, timeout_s)
        if adapter.metrics is not None:
            status, data = await replica.client.fetch(adapter.metrics, timeout_s)
            if status == 200:
                replica.scraped(load(adapter, data.decode(errors="replace")))
                self._scraped()
        if not breaker.is_open:
            return
        if breaker.distrusts:
            await self._try_out(replica)
            breaker.num_failures = 0
        if self._nudges[replica.id].is_set():
            return  # it has failed since the probe began, which says nothing of that
        breaker.is_open = breaker.distrusts = False
        log.info("%s at %s is up, and serves %s", replica.name, replica.url, replica.served or "what it is asked for")
        self._up(replica)

    async def _ask_name(self, replica: LiveReplica) -> None:
        """What the engine calls its model, and how long a request it takes."""
        status, data = await replica.client.fetch("/v1/models", self._settings.probe_timeout_s)
        if status != 200:
            return
        try:
            models = msgspec.json.decode(data, type=_Models).data
        except NONSENSE:
            return
        if not models:
            return
        found = next((model for model in models if model.id == replica.model), models[0])
        replica.served = found.id
        if found.max_model_len is not None:
            replica.max_context_tokens = min(found.max_model_len, replica.max_context_tokens)

    async def _try_out(self, replica: LiveReplica) -> None:
        """One token, for nobody. EngineError if it does not come."""
        if replica.is_half:
            await sglang_disaggregation.try_out(replica, self._settings.probe_timeout_s)
            return
        body = msgspec.json.encode({"model": replica.served or replica.model, "prompt": "a", "max_tokens": 1})
        headers = "Content-Type: application/json\r\n"
        try:
            async with asyncio.timeout(self._settings.probe_timeout_s):
                connection = await replica.client.request("POST", "/v1/completions", headers, body)
                try:
                    data = await read(connection, 1 << 20)
                finally:
                    replica.client.give_back(connection)
        except TimeoutError:
            raise EngineError("did not complete a token in time") from None
        if connection.status >= 500:
            raise RefusedError(connection.status, data)
