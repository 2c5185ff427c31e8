"""A gateway's worker: `python -m headway.gateway.workers.worker LINK LISTENER`, both file descriptors of sockets.

It accepts connections, reads requests and relays answers. The scheduler decides where requests go.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import socket
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from starlette.types import Receive, Scope, Send

from headway.core.errors import HeadwayError
from headway.gateway.auth.keys import ApiKeys, Caller
from headway.gateway.clock import Clock
from headway.gateway.relay.paced import paced
from headway.gateway.relay.quarantine import Quarantine
from headway.gateway.relay.relay import Relay
from headway.gateway.relay.request import PATHS, ClientRequest
from headway.gateway.relay.writer import ClientWriter, ResponseWriter
from headway.gateway.scheduling.in_flight import InFlightRequest
from headway.gateway.scheduling.scorer import AnswerScorer
from headway.gateway.server import web_server
from headway.gateway.server.completions import CompletionsApp
from headway.gateway.server.middleware import with_middleware
from headway.gateway.workers.client import RemoteHealth, RemoteScheduler
from headway.gateway.workers.protocol import (
    AllIdle,
    BodyQuarantined,
    ChangeApplied,
    HeartbeatMonitor,
    KeyLimits,
    Reconfigured,
    StartFailed,
    WorkerConfig,
    WorkerIdle,
    WorkerLeaving,
    frame,
    receive_config,
)
from headway.gateway.workers.proxy import Proxy

if TYPE_CHECKING:
    from headway.gateway.relay.tracing import Tracing


class Worker:
    """Begins relays for clients' requests. Implements `RequestGateway`. Create it in the event loop in which it
    runs."""

    def __init__(self, config: WorkerConfig, on_lost: Callable[[], None]) -> None:
        """`on_lost` is called when the scheduler is gone."""
        self.settings, self._sends_priority = config.settings, config.sends_priority
        self.is_closing = False
        """Whether the whole gateway drains."""
        self.all_idle = asyncio.Event()
        """Set when the gateway drains and none of its workers has requests left."""
        self.clock = Clock(asyncio.get_running_loop(), config.start_s)
        has_store = self.settings.key_store is not None
        self.keys = ApiKeys(self.settings.api_keys, lambda: self.clock.now, has_store)
        if config.stored_keys is not None:
            self.keys.replace_stored(config.stored_keys)
        scorer = None if config.judge is None else AnswerScorer(config.judge)
        handlers: dict[type[Any], Callable[[Any], None]] = {
            KeyLimits: self._take_limits,
            Reconfigured: self._reconfigure,
            AllIdle: lambda message: self.all_idle.set(),
            BodyQuarantined: lambda message: self._quarantine.hold(message.digest, message.until_s),
        }
        self.scheduler = RemoteScheduler(self.clock, scorer, on_lost, handlers)
        self._health = RemoteHealth(self.scheduler.link)
        self._quarantine = Quarantine(self.settings.quarantine_s)
        self._quarantine.listeners.append(lambda *entry: self.scheduler.link.send(BodyQuarantined(*entry)))
        self._tracing: Tracing | None = None
        self._new_relay: Callable[..., Relay] = Relay
        if self.settings.tracing:
            from headway.gateway.relay.tracing import Tracing

            self._tracing = Tracing()
            self._new_relay = self._tracing.relay

    async def begin(
        self, client_request: ClientRequest, caller: Caller, writer: ResponseWriter, request_id: str
    ) -> Relay:
        client_request.wants_explanation &= self.settings.explain
        if self._quarantine.until_s:
            self._quarantine.check(client_request.raw, self.clock.now)
        request = await self.scheduler.submit(client_request, caller.owner, request_id)
        relay = self._new_relay(
            client_request,
            request,
            self.scheduler,
            self._health,
            writer if self.settings.pace_s is None else paced(client_request, writer, self.settings.pace_s),
            self.settings.max_attempts,
            self._sends_priority,
            self._quarantine,
        )
        relay.keep_alive_s = self.settings.keep_alive_s
        return relay

    def _take_limits(self, message: KeyLimits) -> None:
        self.keys.caller_of(message.owner).report(message.limits)

    def _reconfigure(self, message: Reconfigured) -> None:
        self.settings, self._sends_priority = message.settings, message.sends_priority
        self.is_closing = message.is_closing
        self.keys.replace(self.settings.api_keys)
        if message.stored_keys is not None:
            self.keys.replace_stored(message.stored_keys)
        self._quarantine.keep_s = self.settings.quarantine_s
        self.scheduler.link.send(ChangeApplied())

    def end(self, request: InFlightRequest) -> None:
        """Do nothing: the scheduler charges the caller."""

    async def stop(self) -> None:
        """Close all connections, once all streams have ended."""
        self.scheduler.close()
        if self._tracing is not None:
            await asyncio.to_thread(self._tracing.close)


class WorkerApplication:
    """A worker's ASGI application: relays requests for engines, and forwards all other requests to the scheduler."""

    takes_writer = True

    def __init__(self, link: socket.socket, config: WorkerConfig) -> None:
        self._link, self._config = link, config
        self._completions = CompletionsApp()
        self._proxy = Proxy(config.http)
        self._worker: Worker | None = None
        self._is_scheduler_gone = False

    def worker(self) -> Worker:
        """The worker; it exists once the event loop runs."""
        assert self._worker is not None
        return self._worker

    async def __call__(self, scope: Scope, receive: Receive, send: Send, writer: ClientWriter | None = None) -> None:
        if scope["type"] == "lifespan":
            await self._lifespan(receive, send)
        elif scope["type"] != "http":
            await send({"type": "websocket.close"})
        elif scope["method"] == "POST" and scope["path"] in PATHS:
            await self._completions(scope, receive, send, writer)
            self.worker().scheduler.schedule_report()
        else:
            await self._proxy(scope, receive, send)

    def count_refused(self, status: int) -> None:
        """Count the answer to a request that the connection refused."""
        self._completions.count_refused(status)
        self.worker().scheduler.schedule_report()

    async def _lifespan(self, receive: Receive, send: Send) -> None:
        await receive()
        try:
            monitor = await self._start()
        except Exception as error:
            report_failure(self._link, error)
            raise
        await send({"type": "lifespan.startup.complete"})
        await receive()
        await self.worker().stop()
        monitor.stop()
        if self._is_scheduler_gone and not self._proxy.is_listening():
            shutil.rmtree(Path(self._config.http).parent, ignore_errors=True)
        await send({"type": "lifespan.shutdown.complete"})

    async def _start(self) -> HeartbeatMonitor:
        self._worker = self._completions.gateway = worker = Worker(self._config, self._scheduler_lost)
        worker.scheduler.metrics.num_responses = self._completions.num_responses
        link = worker.scheduler.link
        await asyncio.get_running_loop().create_unix_connection(lambda: link, sock=self._link)
        monitor = HeartbeatMonitor(link, worker.settings.hang_s, self._scheduler_silent, self._scheduler_responsive)
        monitor.start()
        worker.scheduler.loop_delay.start()
        return monitor

    async def leave(self) -> None:
        """Drain. If the whole gateway drains, continue to accept connections, and the scheduler refuses their requests.
        Otherwise leave new connections to the next worker at the socket."""
        worker = self.worker()
        await asyncio.sleep(0)  # first read the data that the scheduler sent before the signal
        worker.scheduler.link.send(WorkerLeaving())
        if worker.is_closing:
            await self._completions.drain()
            worker.scheduler.link.send(WorkerIdle())
            await worker.all_idle.wait()
        else:
            self._completions.cut_off_later()

    def _scheduler_lost(self) -> None:
        """End the process, after its streams have drained."""
        self._is_scheduler_gone = True
        self.worker().all_idle.set()
        os.kill(os.getpid(), signal.SIGTERM)

    def _scheduler_silent(self) -> None:
        self.worker().scheduler.set_silent()
        self._proxy.set_silent()

    def _scheduler_responsive(self) -> None:
        self.worker().scheduler.set_responsive()
        self._proxy.is_silent = False


def main() -> None:
    signal.signal(signal.SIGHUP, signal.SIG_IGN)  # the scheduler reads the fleet file
    link, listener = (socket.socket(fileno=int(argument)) for argument in sys.argv[1:])
    try:
        config = receive_config(link)
    except EOFError:
        return
    config.log.apply()
    link.setblocking(False)
    try:
        _serve(link, listener, config)
    except Exception as error:
        report_failure(link, error)
        raise


def _serve(link: socket.socket, listener: socket.socket, config: WorkerConfig) -> None:
    cert, key = config.certfile, config.keyfile
    tls = None if cert is None else web_server.Tls(Path(cert), None if key is None else Path(key))
    application = WorkerApplication(link, config)
    hosts = web_server.expected_hosts(config.settings, listener)
    access_log = None if config.access_log is None else Path(config.access_log)
    served = with_middleware(application, config.settings, access_log)
    web_server.serve(
        served,
        listener,
        config.settings.drain_s + 1,
        tls,
        application.leave,
        hosts,
        relays=True,
        count_refused=application.count_refused,
    )


def report_failure(link: socket.socket, error: Exception) -> None:
    """Tell the scheduler why this worker cannot start, if the link is still open."""
    why = str(error) if isinstance(error, HeadwayError) else f"{type(error).__name__}: {error}"
    with suppress(OSError):
        link.send(frame([StartFailed(why)]))


if __name__ == "__main__":
    main()
