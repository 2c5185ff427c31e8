"""A gateway's workers: processes that are started, and started again when they end."""

from __future__ import annotations

import asyncio
import logging
import shutil
import socket
import sys
import tempfile
from asyncio.subprocess import Process
from collections.abc import Coroutine
from contextlib import suppress
from pathlib import Path
from typing import Any

from headway.gateway.gateway import Gateway
from headway.gateway.server import web_server
from headway.gateway.workers.heartbeat import Heartbeat
from headway.gateway.workers.protocol import Welcome, batch
from headway.gateway.workers.session import WorkerSession

log = logging.getLogger("headway.gateway")
_STEADY_S = 5.0
"""A worker that lasted so long is replaced at once, others after pauses that double."""
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.1, 5.0
_GRACE_S = 5.0
"""Besides the time that streams have at the end."""


class WorkerSupervisor:
    """All of them. The listening sockets stay open here, so that no connection is lost while a worker is replaced."""

    def __init__(self, listeners: list[socket.socket], tls: web_server.Tls | None) -> None:
        self._listeners, self._tls = listeners, tls
        self._folder = Path(tempfile.mkdtemp(prefix="headway-"))
        self.http = web_server.listen_privately(self._folder / "http")
        """Where the gateway's own application is to be served."""
        self._slots: list[asyncio.Task[None]] = []
        self._processes: set[Process] = set()
        self._reaped: set[asyncio.Task[None]] = set()
        self._is_ending = False

    def start(self, gateway: Gateway) -> None:
        """From now on, in the event loop of the scheduler."""
        self._gateway = gateway
        self._slots = [asyncio.create_task(self._keep(i)) for i in range(len(self._listeners))]

    async def stop(self) -> None:
        """Workers take no more connections, let streams end for so long, and end."""
        self._is_ending = True
        for process in self._processes:
            with suppress(ProcessLookupError):
                process.terminate()
        if self._reaped:
            await asyncio.wait(self._reaped, timeout=self._gateway.settings.drain_s + 1 + _GRACE_S)
        for process in list(self._processes):
            with suppress(ProcessLookupError):
                process.kill()
        for slot in self._slots:
            slot.cancel()
        await asyncio.gather(*self._slots, *self._reaped, return_exceptions=True)
        shutil.rmtree(self._folder, ignore_errors=True)

    async def _keep(self, slot: int) -> None:
        """A worker at one of the sockets, always."""
        pause_s, loop = _FIRST_PAUSE_S, asyncio.get_running_loop()
        while not self._is_ending:
            began_s = loop.time()
            try:
                await self._run(slot)
            except OSError as error:
                log.warning("worker %d cannot be started: %s", slot, error)
            except Exception:  # a mistake of ours must not be the end of all workers of this socket
                log.exception("worker %d", slot)
            if self._is_ending:
                return
            if loop.time() - began_s >= _STEADY_S:
                pause_s = _FIRST_PAUSE_S
                continue
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)

    async def _run(self, slot: int) -> None:
        """One process, until it takes no more connections."""
        ours, theirs = socket.socketpair()
        listener = self._listeners[slot].fileno()
        try:
            with theirs:
                process = await asyncio.create_subprocess_exec(
                    sys.executable, "-P", "-m", "headway.gateway.workers.worker", str(theirs.fileno()), str(listener),
                    stdin=asyncio.subprocess.DEVNULL, pass_fds=(theirs.fileno(), listener), start_new_session=True,
                )  # fmt: skip
        except OSError:
            ours.close()
            raise
        self._processes.add(process)
        if self._is_ending:
            with suppress(ProcessLookupError):
                process.terminate()
        gone = asyncio.Event()
        desk = WorkerSession(self._gateway, gone.set)
        pulse = Heartbeat(desk.link, self._gateway.settings.hang_s, lambda: self._hangs(slot, process, desk))
        self._go_on(self._reap(slot, process, pulse))
        ours.setblocking(False)
        loop = asyncio.get_running_loop()
        transport, _ = await loop.create_unix_connection(lambda: desk.link, sock=ours)
        transport.write(batch(self._welcome()))
        pulse.start()
        await gone.wait()

    def _go_on(self, what: Coroutine[Any, Any, None]) -> None:
        """Until a process has ended."""
        task = asyncio.create_task(what)
        self._reaped.add(task)
        task.add_done_callback(self._reaped.discard)

    async def _reap(self, slot: int, process: Process, pulse: Heartbeat) -> None:
        status = await process.wait()
        pulse.stop()
        self._processes.discard(process)
        if not self._is_ending:
            log.warning("worker %d (process %d) has ended with status %d", slot, process.pid, status)

    def _hangs(self, slot: int, process: Process, desk: WorkerSession) -> None:
        hang_s = self._gateway.settings.hang_s
        log.error("worker %d (process %d) has said nothing for %g s: it is ended", slot, process.pid, hang_s)
        with suppress(ProcessLookupError):
            process.kill()
        self._go_on(self._give_up(process, desk))

    async def _give_up(self, process: Process, desk: WorkerSession) -> None:
        """Its connections are closed with it, and then its requests count no more; nor do they if it cannot end."""
        with suppress(TimeoutError):
            async with asyncio.timeout(_GRACE_S):
                await process.wait()
        desk.link.lose()

    def _welcome(self) -> Welcome:
        gateway, tls = self._gateway, self._tls
        return Welcome(
            settings=gateway.settings,
            judge=gateway.plan.judge,
            tell_priority=gateway.plan.tell_priority,
            start_s=gateway.clock.start_s,
            http=str(self._folder / "http"),
            certfile=None if tls is None else str(tls.certfile.absolute()),
            keyfile=None if tls is None or tls.keyfile is None else str(tls.keyfile.absolute()),
        )
