"""Starts a gateway's worker processes, and restarts worker processes that have ended."""

from __future__ import annotations

import asyncio
import logging
import shutil
import socket
import sys
import tempfile
from asyncio.subprocess import Process
from collections.abc import Callable, Coroutine
from contextlib import suppress
from pathlib import Path
from typing import Any

from headway.gateway import descriptors
from headway.gateway.gateway import Gateway
from headway.gateway.server import web_server
from headway.gateway.telemetry.logs import LogOptions
from headway.gateway.workers.protocol import AllIdle, HeartbeatMonitor, WorkerConfig
from headway.gateway.workers.session import WorkerSession

log = logging.getLogger("headway.gateway")
_STABLE_S = 5.0
"""A worker that has run this long is restarted at once after its end. Other workers are restarted after pauses that
double."""
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.1, 5.0
MAX_FAILED_STARTS = 5
"""Number of failed starts of a worker in a row after which the gateway ends. Otherwise, connections that Linux gives to
the worker's socket would wait forever."""
_GRACE_S = 5.0
"""Time for a process to end, in addition to the drain time of its streams."""
_DEFAULT_LOG = LogOptions()


class WorkerSupervisor:
    """Keeps one worker at each listening socket. The supervisor keeps the sockets open while workers are restarted."""

    def __init__(
        self,
        listeners: list[socket.socket],
        tls: web_server.Tls | None,
        log_options: LogOptions = _DEFAULT_LOG,
        access_log: Path | None = None,
    ) -> None:
        self._listeners, self._tls = listeners, tls
        self._log_options, self._access_log = log_options, access_log
        self._folder = Path(tempfile.mkdtemp(prefix="headway-"))
        self.http = web_server.listen_unix(self._folder / "http")
        """The socket at which the gateway's application must be served to workers."""
        self._worker_tasks: list[asyncio.Task[None]] = []
        self._processes: set[Process] = set()
        self._sessions: dict[Process, WorkerSession] = {}
        self._background: set[asyncio.Task[None]] = set()
        """Tasks that wait for processes to end."""
        self._is_stopping = False
        self.failure = ""
        """The reason why the gateway ends, if a worker cannot start."""
        self._stop_server: Callable[[], None] = lambda: None

    def take_stop(self, stop: Callable[[], None]) -> None:
        """From now on, call `stop` to end the gateway if a worker cannot start."""
        self._stop_server = stop

    def start(self, gateway: Gateway) -> None:
        self._gateway = gateway
        self._worker_tasks = [asyncio.create_task(self._keep(index)) for index in range(len(self._listeners))]

    async def stop(self) -> None:
        """Make the workers drain their streams and end."""
        self._is_stopping = True
        self._gateway.refuse_requests()
        for process, session in list(self._sessions.items()):
            self._drain(process, session)
        if self._background:
            await asyncio.wait(self._background, timeout=self._gateway.settings.drain_s + 1 + _GRACE_S)
        for process in list(self._processes):
            with suppress(ProcessLookupError):
                process.kill()
        for task in self._worker_tasks:
            task.cancel()
        await asyncio.gather(*self._worker_tasks, *self._background, return_exceptions=True)
        shutil.rmtree(self._folder, ignore_errors=True)

    def _drain(self, process: Process, session: WorkerSession) -> None:
        """End a worker that has started, if the gateway is stopping. A worker that is still starting is left alone,
        because nothing else would answer the connections that Linux gives to its socket."""
        if self._is_stopping and session.has_started:
            session.link.flush()  # the worker must know that the gateway drains before it gets the signal
            with suppress(ProcessLookupError):
                process.terminate()

    def _end_idle(self) -> None:
        """End the workers once none of them has requests. If a worker ended earlier, it would break new connections."""
        sessions = self._sessions.values()
        if self._is_stopping and all(session.is_idle for session in sessions):
            for session in sessions:
                session.link.send(AllIdle())

    async def _keep(self, index: int) -> None:
        await self._run_until_stopped(index)
        self._listeners[index].close()  # once its worker has ended, its connections go to the other workers

    async def _run_until_stopped(self, index: int) -> None:
        pause_s, num_failed, loop = _FIRST_PAUSE_S, 0, asyncio.get_running_loop()
        while not self._is_stopping:
            started_s, why, is_own_fault = loop.time(), "", False
            try:
                why = await self._run(index)
            except OSError as error:
                why = str(error)
                is_own_fault = descriptors.is_used_up(error)
            except Exception as error:  # a bug must not end all workers of this socket
                log.exception("worker %d", index)
                why = f"{type(error).__name__}: {error}"
            if self._is_stopping:
                return
            if not is_own_fault:
                num_failed = num_failed + 1 if why else 0
            if why:
                log.warning("worker %d cannot be started: %s", index, why)
            if num_failed >= MAX_FAILED_STARTS:
                self.failure = f"worker {index} cannot be started, after {num_failed} tries: {why}"
                self._stop_server()
                return
            if loop.time() - started_s >= _STABLE_S:
                pause_s = _FIRST_PAUSE_S
                continue
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)

    async def _run(self, index: int) -> str:
        """Start a process, and return when it accepts no more connections. Returns why it could not start; "" if it
        started."""
        ours, theirs = socket.socketpair()
        listener = self._listeners[index].fileno()
        try:
            with theirs:
                process = await asyncio.create_subprocess_exec(
                    sys.executable,
                    "-P",
                    "-m",
                    "headway.gateway.workers.worker",
                    str(theirs.fileno()),
                    str(listener),
                    stdin=asyncio.subprocess.DEVNULL,
                    pass_fds=(theirs.fileno(), listener),
                    start_new_session=True,
                )
        except OSError:
            ours.close()
            raise
        self._processes.add(process)
        left = asyncio.Event()
        session = WorkerSession(
            self._gateway, lambda: self._drain(process, session), left.set, self._end_idle, self._config()
        )
        self._sessions[process] = session
        hang_s = self._gateway.settings.hang_s
        monitor = HeartbeatMonitor(session.link, hang_s, lambda: self._kill_hanging(index, process, session))
        self._run_in_background(self._wait(index, process, monitor))
        ours.setblocking(False)
        loop = asyncio.get_running_loop()
        await loop.create_unix_connection(lambda: session.link, sock=ours)
        monitor.start()
        await left.wait()
        if session.has_started or self._is_stopping:
            return ""
        status = await process.wait()
        return session.why_not_started or f"its process has ended with status {status}, see the log"

    def _run_in_background(self, coroutine: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(coroutine)
        self._background.add(task)
        task.add_done_callback(self._background.discard)

    async def _wait(self, index: int, process: Process, monitor: HeartbeatMonitor) -> None:
        status = await process.wait()
        monitor.stop()
        self._processes.discard(process)
        self._sessions.pop(process, None)
        self._end_idle()
        if not self._is_stopping:
            log.warning("worker %d (process %d) has ended with status %d", index, process.pid, status)

    def _kill_hanging(self, index: int, process: Process, session: WorkerSession) -> None:
        hang_s = self._gateway.settings.hang_s
        log.error("worker %d (process %d) has sent nothing for %g s: it is killed", index, process.pid, hang_s)
        with suppress(ProcessLookupError):
            process.kill()
        self._run_in_background(self._abandon(process, session))

    async def _abandon(self, process: Process, session: WorkerSession) -> None:
        """Cancel the worker's requests once its process and connections are gone, or if it cannot be killed."""
        with suppress(TimeoutError):
            async with asyncio.timeout(_GRACE_S):
                await process.wait()
        session.link.abort()

    def _config(self) -> WorkerConfig:
        gateway, tls = self._gateway, self._tls
        return WorkerConfig(
            settings=gateway.settings,
            judge=gateway.plan.judge,
            sends_priority=gateway.plan.sends_priority,
            start_s=gateway.clock.start_s,
            http=str(self._folder / "http"),
            certfile=None if tls is None else str(tls.certfile.absolute()),
            keyfile=None if tls is None or tls.keyfile is None else str(tls.keyfile.absolute()),
            log=self._log_options,
            access_log=None if self._access_log is None else str(self._access_log),
            stored_keys=gateway.keys.stored,
        )
