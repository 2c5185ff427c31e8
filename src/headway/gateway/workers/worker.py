"""One of a gateway's workers: `python -m headway.gateway.worker LINK LISTENER`, both numbers of open sockets.

It takes connections, reads requests and passes answers back. Where requests go, the scheduler says.
"""

from __future__ import annotations

import asyncio
import logging
import os
import shutil
import signal
import socket
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from starlette.types import Receive, Scope, Send

from headway.gateway.clock import Clock
from headway.gateway.relay.relay import Relay
from headway.gateway.relay.request import PATHS, ClientRequest
from headway.gateway.relay.writer import ResponseWriter
from headway.gateway.scheduling.scheduler import Scheduler
from headway.gateway.scheduling.scorer import AnswerScorer
from headway.gateway.server import web_server
from headway.gateway.server.app import Completions
from headway.gateway.server.auth import Caller, Keys
from headway.gateway.workers.heartbeat import Heartbeat
from headway.gateway.workers.protocol import Leaving, Welcome, read_welcome
from headway.gateway.workers.proxy import Proxy
from headway.gateway.workers.remote import RemoteScheduler
from headway.gateway.workers.remote_health import RemoteHealth

if TYPE_CHECKING:
    from headway.gateway.telemetry.tracing import Tracing


class Worker:
    """One process's. Satisfies `api.Front`. Made in the event loop that it runs in."""

    def __init__(self, welcome: Welcome, lost: Callable[[], None]) -> None:
        self._welcome, self.settings = welcome, welcome.settings
        self.clock = Clock(asyncio.get_running_loop(), welcome.start_s)
        self.keys = Keys(self.settings.api_keys, lambda: self.clock.now)
        jury = None if welcome.judge is None else AnswerScorer(welcome.judge)
        self.scheduler = RemoteScheduler(self.clock, jury, lost)
        self._health = RemoteHealth(self.scheduler.link)
        self._tracing: Tracing | None = None
        self._new_exchange: Callable[..., Relay] = Relay
        if self.settings.tracing:
            from headway.gateway.telemetry.tracing import Tracing

            self._tracing = Tracing()
            self._new_exchange = self._tracing.exchange

    async def begin(self, ask: ClientRequest, caller: Caller, reply: ResponseWriter, request_id: str) -> Relay:
        """A request comes in. ApiError where the scheduler does not take it."""
        ask.explains &= self.settings.explain
        errand = await self.scheduler.take(ask, caller.owner, request_id)
        scheduler: Scheduler = self.scheduler
        return self._new_exchange(
            ask, errand, scheduler, self._health, reply, request_id, self.settings.max_attempts,
            self._welcome.tell_priority,
        )  # fmt: skip

    def end(self, ask: ClientRequest, exchange: Relay) -> None:
        """It is over, as the scheduler knows."""

    async def stop(self) -> None:
        """All streams have ended."""
        self.scheduler.close()
        if self._tracing is not None:
            await asyncio.to_thread(self._tracing.close)


class Application:
    """What a worker serves: requests for engines, and everything else as the scheduler does."""

    def __init__(self, link: socket.socket, welcome: Welcome) -> None:
        self._link, self._welcome = link, welcome
        self._completions = Completions(self.worker)
        self._proxy = Proxy(welcome.http)
        self._made: Worker | None = None
        self._is_lost = False
        """The scheduler is gone."""

    def worker(self) -> Worker:
        """Once there is an event loop."""
        assert self._made is not None
        return self._made

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._live(receive, send)
        elif scope["type"] != "http":
            await send({"type": "websocket.close"})
        elif scope["method"] == "POST" and scope["path"] in PATHS:
            await self._completions(scope, receive, send)
        else:
            await self._proxy(scope, receive, send)

    async def _live(self, receive: Receive, send: Send) -> None:
        await receive()
        self._made = worker = Worker(self._welcome, self._lost)
        await asyncio.get_running_loop().create_unix_connection(lambda: worker.scheduler.link, sock=self._link)
        pulse = Heartbeat(worker.scheduler.link, worker.settings.hang_s, self._silent, self._back)
        pulse.start()
        await send({"type": "lifespan.startup.complete"})
        await receive()
        await worker.stop()
        pulse.stop()
        if self._is_lost and not self._proxy.is_heard():
            shutil.rmtree(Path(self._welcome.http).parent, ignore_errors=True)
        await send({"type": "lifespan.shutdown.complete"})

    async def leave(self) -> None:
        """No more connections are taken."""
        self.worker().scheduler.link.say(Leaving())

    def _lost(self) -> None:
        """The scheduler is gone: streams end, for as long as they may, and so does the process."""
        self._is_lost = True
        os.kill(os.getpid(), signal.SIGTERM)

    def _silent(self) -> None:
        self.worker().scheduler.silent()
        self._proxy.silent()

    def _back(self) -> None:
        self.worker().scheduler.back()
        self._proxy.is_silent = False


def main() -> None:
    """Serve until told to stop, or until the scheduler is gone."""
    link, listener = (socket.socket(fileno=int(word)) for word in sys.argv[1:])
    logging.basicConfig(stream=sys.stderr, format="%(asctime)s %(message)s", datefmt="%H:%M:%S")
    logging.getLogger("headway").setLevel(logging.INFO)
    try:
        welcome = read_welcome(link)
    except EOFError:
        return
    link.setblocking(False)
    cert, key = welcome.certfile, welcome.keyfile
    tls = None if cert is None else web_server.Tls(Path(cert), None if key is None else Path(key))
    application = Application(link, welcome)
    web_server.serve(application, listener, welcome.settings.drain_s + 1, tls, application.leave)


if __name__ == "__main__":
    main()
