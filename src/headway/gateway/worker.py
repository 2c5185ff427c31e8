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

from headway import webserver
from headway.gateway.api import Completions
from headway.gateway.ask import PATHS, Ask
from headway.gateway.clock import Clock
from headway.gateway.exchange import Exchange
from headway.gateway.judge import Jury
from headway.gateway.keys import Caller, Keys
from headway.gateway.proxy import Proxy
from headway.gateway.pulse import Pulse
from headway.gateway.remote import RemoteScheduler
from headway.gateway.remotehealth import RemoteHealth
from headway.gateway.scheduler import Scheduler
from headway.gateway.send import Reply
from headway.gateway.wire import Leaving, Welcome, read_welcome

if TYPE_CHECKING:
    from headway.gateway.tracing import Tracing


class Worker:
    """One process's. Satisfies `api.Front`. Made in the event loop that it runs in."""

    def __init__(self, welcome: Welcome, lost: Callable[[], None]) -> None:
        self._welcome, self.settings = welcome, welcome.settings
        self.clock = Clock(asyncio.get_running_loop(), welcome.start_s)
        self.keys = Keys(self.settings.api_keys, lambda: self.clock.now)
        jury = None if welcome.judge is None else Jury(welcome.judge)
        self.scheduler = RemoteScheduler(self.clock, jury, lost)
        self._health = RemoteHealth(self.scheduler.link)
        self._tracing: Tracing | None = None
        self._new_exchange: Callable[..., Exchange] = Exchange
        if self.settings.tracing:
            from headway.gateway.tracing import Tracing

            self._tracing = Tracing()
            self._new_exchange = self._tracing.exchange

    async def begin(self, ask: Ask, caller: Caller, reply: Reply, request_id: str) -> Exchange:
        """A request comes in. ApiError where the scheduler does not take it."""
        ask.explains &= self.settings.explain
        errand = await self.scheduler.take(ask, caller.owner, request_id)
        scheduler: Scheduler = self.scheduler
        return self._new_exchange(
            ask, errand, scheduler, self._health, reply, request_id, self.settings.max_attempts,
            self._welcome.tell_priority,
        )  # fmt: skip

    def end(self, ask: Ask, exchange: Exchange) -> None:
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
        pulse = Pulse(worker.scheduler.link, worker.settings.hang_s, self._silent, self._back)
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
    tls = None if cert is None else webserver.Tls(Path(cert), None if key is None else Path(key))
    application = Application(link, welcome)
    webserver.serve(application, listener, welcome.settings.drain_s + 1, tls, application.leave)


if __name__ == "__main__":
    main()
