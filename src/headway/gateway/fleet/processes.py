"""Replicas that are processes on this machine. Each has a keeper, which ends it even if the gateway is killed.

A process that ends by itself is restarted: at once if it had been up, otherwise after pauses that double.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import sys
from asyncio.subprocess import Process
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import Any

from headway.core.errors import HeadwayError
from headway.gateway import descriptors
from headway.gateway.blocking import in_thread
from headway.gateway.fleet.actuator import ActuatorHost
from headway.gateway.fleet.local_resources import HOST, Gpus, Ports, free_port
from headway.gateway.fleet.specs import Processes, ServedPool
from headway.gateway.scheduling.replica import LiveReplica

log = logging.getLogger("headway.gateway")
ENVIRONMENT = ("HOME", "LANG", "LC_ALL", "LD_LIBRARY_PATH", "LOGNAME", "PATH", "TMPDIR", "TZ", "USER")
"""Variables of the gateway's environment that every engine sees."""
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.5, 60.0
_KEEPER = Path(__file__).with_name("keeper.py")
_GRACE_S = 5.0
"""Time for the keeper to end, in addition to the engine's time to stop."""
_MAX_LOG_LINE_BYTES = 4096


class _ReplicaSlot:
    """One replica that is wanted, with all its restarts."""

    def __init__(self) -> None:
        self.is_up, self.stops = asyncio.Event(), asyncio.Event()
        self.num_failures = 0
        """Number of failed starts in a row."""
        self.why = ""
        """Why the last start failed."""
        self.has_failed = False
        """Whether the failure was reported to the host."""


class LocalProcesses:
    """Starts and stops one pool's processes. Implements `Actuator`."""

    def __init__(
        self, served: ServedPool, spec: Processes, host: ActuatorHost, ports: Ports, gpus: Gpus | None
    ) -> None:
        """`gpus`: the GPUs, shared with other pools. None: a port's position in its range determines its GPUs."""
        self._pool, self._num_initial, self._spec, self._host = served.pool, served.num_initial, spec, host
        self._ports, self._gpus = ports, gpus
        self._tasks: dict[_ReplicaSlot, asyncio.Task[None]] = {}
        self._by_replica: dict[int, _ReplicaSlot] = {}

    def start_initial(self) -> None:
        for _ in range(self._num_initial):
            self.add()

    def add(self) -> None:
        slot = _ReplicaSlot()
        self._tasks[slot] = asyncio.create_task(self._keep(slot))

    def cancel(self, num: int) -> None:
        """Give up `num` replicas that have no process at present. Failed replicas are given up first."""
        idle = [slot for slot in self._tasks if slot not in self._by_replica.values() and not slot.stops.is_set()]
        for slot in sorted(idle, key=lambda slot: not slot.has_failed)[: max(num, 0)]:
            self._stop(slot)

    def replica_up(self, replica: LiveReplica) -> None:
        if (slot := self._by_replica.get(replica.id)) is not None:
            slot.is_up.set()
            slot.num_failures = 0
            self._recover(slot)

    def stop(self, replica: LiveReplica) -> None:
        """End the replica's process: SIGTERM, then SIGKILL."""
        if (slot := self._by_replica.pop(replica.id, None)) is not None:
            self._stop(slot)

    def _stop(self, slot: _ReplicaSlot) -> None:
        slot.stops.set()
        self._recover(slot)

    async def close(self) -> None:
        for slot in self._tasks:
            slot.stops.set()
        await asyncio.gather(*self._tasks.values())

    # One replica.

    async def _keep(self, slot: _ReplicaSlot) -> None:
        pause_s, name = FIRST_PAUSE_S, self._pool.name
        while not slot.stops.is_set() and (not slot.has_failed or self._host.wants_failed(name)):
            slot.is_up.clear()
            is_own_fault = False
            if not slot.has_failed or self._host.has_room(name):
                try:
                    await self._run(slot)
                except (OSError, HeadwayError) as error:
                    slot.why = str(error)
                    log.warning("%s: a replica cannot be started: %s", name, error)
                    is_own_fault = isinstance(error, OSError) and descriptors.is_used_up(error)
                except Exception as error:  # a bug, or a policy's error, must not end the restarts
                    slot.why = str(error)
                    log.exception("%s: a replica", name)
                if slot.is_up.is_set():
                    pause_s = FIRST_PAUSE_S
                    continue
                if not is_own_fault:
                    self._count_failure(slot)
            with suppress(TimeoutError):
                async with asyncio.timeout(pause_s):
                    await slot.stops.wait()
            pause_s = min(2 * pause_s, LONGEST_PAUSE_S)
        self._recover(slot, num_given_up=0 if slot.stops.is_set() else 1)
        del self._tasks[slot]

    def _count_failure(self, slot: _ReplicaSlot) -> None:
        slot.num_failures += 1
        if slot.num_failures == self._spec.tries and not slot.stops.is_set():
            slot.has_failed = True
            log.error(
                "%s: %d starts have failed (%s): the replica counts as failed, and restarts go on",
                self._pool.name,
                slot.num_failures,
                slot.why,
            )
            self._host.start_failed(self._pool.name, slot.why)

    def _recover(self, slot: _ReplicaSlot, num_given_up: int = 0) -> None:
        if slot.has_failed:
            slot.has_failed = False
            self._host.start_recovered(self._pool.name, num_given_up)

    async def _run(self, slot: _ReplicaSlot) -> None:
        """Run one process to its end, on the GPUs that it takes."""
        if self._gpus is None:
            await self._run_on(slot, None)
        elif (gpus := await self._take_gpus(slot, self._gpus)) is not None:
            try:
                await self._run_on(slot, gpus)
            finally:
                self._gpus.release(gpus)

    async def _take_gpus(self, slot: _ReplicaSlot, gpus: Gpus) -> tuple[int, ...] | None:
        """Wait for GPUs. None if the replica must stop before it gets them."""
        taking = asyncio.create_task(gpus.take(self._pool.parallel.num_gpus))
        stops = asyncio.create_task(slot.stops.wait())
        await asyncio.wait({taking, stops}, return_when=asyncio.FIRST_COMPLETED)
        stops.cancel()
        if taking.done():
            return taking.result()
        taking.cancel()
        return None

    async def _run_on(self, slot: _ReplicaSlot, gpus: tuple[int, ...] | None) -> None:
        port = self._ports.take()
        try:
            keeper = await self._spawn(port, gpus)
            if slot.stops.is_set():
                await self._end(keeper)
                return
            url = f"http://{HOST}:{port}"
            replica = self._host.replica_created(self._pool.name, url)
            self._by_replica[replica.id] = slot
            logging_task = asyncio.create_task(_log_output(keeper, replica.name))
            try:
                await self._wait(slot, keeper, replica)
            finally:
                await self._end(keeper)
                await logging_task
        finally:
            self._ports.release(port)

    async def _wait(self, slot: _ReplicaSlot, keeper: Process, replica: LiveReplica) -> None:
        """Wait until the replica must stop, has ended, or was not up in time."""
        ended = asyncio.create_task(keeper.wait())
        stops, up = asyncio.create_task(slot.stops.wait()), asyncio.create_task(slot.is_up.wait())
        first = asyncio.FIRST_COMPLETED
        try:
            await asyncio.wait({ended, stops, up}, timeout=self._spec.ready_s, return_when=first)
            if up.done():
                await asyncio.wait({ended, stops}, return_when=first)
        finally:
            for task in (stops, up, ended):
                task.cancel()
        if slot.stops.is_set():
            return
        has_ended = ended.done() and not ended.cancelled()
        slot.why = "has ended" if has_ended else f"was not up after {self._spec.ready_s:g} s"
        self._by_replica.pop(replica.id, None)
        is_replaced = self._host.replica_lost(replica)
        log.warning("%s %s%s", replica.name, slot.why, "; it is restarted" if is_replaced else "")
        if not is_replaced:
            slot.stops.set()

    async def _spawn(self, port: int, gpus: tuple[int, ...] | None) -> Process:
        spec, pipe = self._spec, asyncio.subprocess.PIPE
        inherited = {name: os.environ[name] for name in (*ENVIRONMENT, *spec.keep_env) if name in os.environ}
        values = self._placeholders(port, gpus)
        env = inherited | {name: substitute(value, values) for name, value in spec.env.items()}
        command = [substitute(argument, values) for argument in spec.command]
        file = await in_thread(open, Path(spec.log, f"{self._pool.name}-{port}.log"), "ab") if spec.log else None
        with nullcontext(pipe) if file is None else file as output:
            return await asyncio.create_subprocess_exec(
                sys.executable,
                "-I",
                "-S",
                str(_KEEPER),
                str(spec.stop_s),
                *command,
                stdin=pipe,
                stdout=output,
                stderr=asyncio.subprocess.STDOUT,
                env=env,
                start_new_session=True,
            )

    async def _end(self, keeper: Process) -> None:
        """Let the keeper end the engine and itself. If the keeper was killed, kill its process group."""
        assert keeper.stdin is not None
        keeper.stdin.close()
        with suppress(TimeoutError):
            async with asyncio.timeout(self._spec.stop_s + _GRACE_S):
                await keeper.wait()
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(keeper.pid, signal.SIGKILL)
        await keeper.wait()

    def _placeholders(self, port: int, gpus: tuple[int, ...] | None) -> dict[str, Any]:
        index, parallel = port - self._ports.first, self._pool.parallel
        own = range(index * parallel.num_gpus, (index + 1) * parallel.num_gpus) if gpus is None else gpus
        return {
            "port": port,
            "index": index,
            "gpus": ",".join(map(str, own)),
            "tp": parallel.tp,
            "pp": parallel.pp,
            "role": self._pool.role,
            "bootstrap_port": free_port(),
        }


def substitute(argument: str, values: dict[str, Any]) -> str:
    for name, value in values.items():
        argument = argument.replace(f"{{{name}}}", str(value))
    return argument


async def _log_output(keeper: Process, name: str) -> None:
    """Copy an engine's output, line by line, to the gateway's log."""
    if keeper.stdout is None:
        return
    rest = b""
    while data := await keeper.stdout.read(1 << 16):
        *lines, rest = (rest + data).split(b"\n")
        for line in lines:
            log.info("%s: %s", name, line[:_MAX_LOG_LINE_BYTES].decode(errors="replace").rstrip())
        rest = rest[-_MAX_LOG_LINE_BYTES:]
