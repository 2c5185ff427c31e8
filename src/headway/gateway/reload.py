"""Reads the fleet file again while the gateway runs, and applies it.

The file is polled every two seconds. Notifications would miss changes on network file systems and in mounted
ConfigMaps, where another folder replaces the file.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import time
from collections.abc import Callable

from headway.control.decisions import Decision
from headway.core.errors import HeadwayError
from headway.gateway.blocking import OneAtATime
from headway.gateway.fleet.specs import ServingPlan
from headway.gateway.gateway import Gateway
from headway.gateway.hangup import Hangup
from headway.gateway.telemetry.reloads import Reload

log = logging.getLogger("headway.gateway")
POLL_S = 2.0
"""Time between two checks of the file. A changed file is read when two checks in a row find the same state."""
READ_S = 30.0
"""Timeout for reading the file, which may be on a network file system that hangs."""
Signature = tuple[object, ...]


class Reloader:
    """Reloads the fleet file of one gateway: after SIGHUP, on request, and when the file has changed."""

    def __init__(
        self,
        gateway: Gateway,
        read: Callable[[ServingPlan], ServingPlan],
        signature: Callable[[], Signature] | None,
        poll_s: float = POLL_S,
        read_s: float = READ_S,
    ) -> None:
        """`read(plan)` returns the file's plan to replace the current one; raises HeadwayError if it cannot be served.
        `signature()` changes with the file; None: the file is not watched."""
        self._gateway, self._read, self._signature, self._poll_s = gateway, read, signature, poll_s
        self._lock, self._read_s = asyncio.Lock(), read_s
        self._calls = OneAtATime()
        self._watching: asyncio.Task[None] | None = None
        self._requested: set[asyncio.Task[Reload]] = set()
        self._seen: Signature | None = None if signature is None else signature()
        self._hangup = Hangup()

    def start(self) -> None:
        """Start to reload. Call it in the event loop and in the main thread."""
        self._gateway.request_reload = self.reload
        asyncio.get_running_loop().add_signal_handler(signal.SIGHUP, self._signalled)
        if self._signature is not None:
            self._watching = asyncio.create_task(self._watch(self._signature))

    def close(self) -> None:
        self._gateway.request_reload = None
        asyncio.get_running_loop().remove_signal_handler(signal.SIGHUP)
        if self._watching is not None:
            self._watching.cancel()

    def _signalled(self) -> None:
        if self._hangup.is_end():
            os.kill(os.getpid(), signal.SIGTERM)
            return
        task = asyncio.create_task(self.reload("signal"))
        self._requested.add(task)
        task.add_done_callback(self._requested.discard)

    async def _watch(self, signature: Callable[[], Signature]) -> None:
        before = self._seen
        while True:
            await asyncio.sleep(self._poll_s)
            if self._calls.is_busy:
                continue
            now = await self._calls.call(signature)
            if now == before and now != self._seen:  # not while the file is being written
                await self.reload("file")
            before = now

    async def reload(self, cause: str) -> Reload:
        """Read the file and apply it. If it is invalid, everything stays unchanged."""
        async with self._lock:
            gateway = self._gateway
            try:
                plan = await self._read_plan(gateway.plan)
                changes = tuple(gateway.reconfigure(plan))
                await self._applied()
                reload = Reload(time.time(), cause, "applied" if changes else "unchanged", changes)
            except HeadwayError as error:
                reload = Reload(time.time(), cause, "failed", error=str(error))
                log.error("the fleet file was not reloaded: %s", error)
            except Exception as error:
                reload = Reload(time.time(), cause, "failed", error=f"{type(error).__name__}: {error}")
                log.exception("the fleet file was not reloaded")
            gateway.reloads.add(reload)
            for change in reload.changes:
                log.info("reloaded: %s", change)
            if reload.outcome == "unchanged":
                log.info("reloaded: nothing has changed")
            self._log_decision(reload)
            return reload

    async def _read_plan(self, present: ServingPlan) -> ServingPlan:
        """The file's plan to replace the current one. Raises HeadwayError if it cannot be served, or not be read in
        time."""
        try:
            async with asyncio.timeout(self._read_s):
                if self._signature is not None:
                    self._seen = await self._calls.call(self._signature)
                return await self._calls.call(self._read, present)
        except TimeoutError:
            self._seen = None  # read again once the file system answers
            raise HeadwayError(f"not read within {self._read_s:g} s; does its file system answer?") from None

    async def _applied(self) -> None:
        """Wait until all workers have applied the plan. A worker that hangs this long is killed."""
        if changes := self._gateway.unapplied:
            _, late = await asyncio.wait(changes, timeout=self._gateway.settings.hang_s)
            if late:
                log.warning("reloaded: %d workers have not answered in %g s", len(late), self._gateway.settings.hang_s)

    def _log_decision(self, reload: Reload) -> None:
        """Record the reload in the decision log, because later decisions depend on it."""
        decisions = self._gateway.telemetry.decisions
        if decisions is not None and reload.changes:
            line = Decision(reload.time_s, "reloaded", "", "", 0, "", why="; ".join(reload.changes))
            for listener in decisions.listeners:
                listener(line)
