"""Replicas as processes on this machine: each has a keeper, which ends it when the gateway ends, however that is.

What ends by itself is started again, at once if it had been up, else after pauses that double.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import sys
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import Any

from headway.core.errors import HeadwayError
from headway.core.fleet import Pool
from headway.gateway.fleet.local_resources import HOST, Gpus, Ports, free_port
from headway.gateway.fleet.replica import LiveReplica
from headway.gateway.fleet.starting import Host, Processes

log = logging.getLogger("headway.gateway")
ENVIRONMENT = ("HOME", "LANG", "LC_ALL", "LD_LIBRARY_PATH", "LOGNAME", "PATH", "TMPDIR", "TZ", "USER")
"""Of the gateway's, what every engine sees."""
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.5, 60.0
_KEEPER = Path(__file__).with_name("keeper.py")
_GRACE_S = 5.0
"""For the keeper, besides the engine's own time to stop."""
_LINE_BYTES = 4096
"""Most of a line that is passed on to the gateway's log."""


class _Slot:
    """One replica that is wanted, through all processes that it takes."""

    def __init__(self) -> None:
        self.is_up = asyncio.Event()
        self.stops = asyncio.Event()
        self.num_tries = 0
        """That came to nothing, in a row."""
        self.why = ""
        """The last of them did."""
        self.has_failed = False


class LocalProcesses:
    """One pool's. Satisfies `starting.Actuator`."""

    def __init__(self, pool: Pool, how: Processes, host: Host, ports: Ports, gpus: Gpus | None = None) -> None:
        """`gpus`: those that it shares with others; None: each port has its own."""
        self._pool, self._how, self._host = pool, how, host
        self._ports, self._gpus = ports, gpus
        self._slots: set[_Slot] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._of: dict[int, _Slot] = {}
        """By replica."""

    def begin(self) -> None:
        """As many as the fleet file says."""
        self._host.expect(self._pool.name, self._pool.replicas)
        for _ in range(self._pool.replicas):
            self.more()

    def more(self) -> None:
        """Start one more."""
        slot = _Slot()
        self._slots.add(slot)
        task = asyncio.create_task(self._keep(slot))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def fewer(self, num: int) -> None:
        """So many of those that have no process just now are not wanted any more, those that have failed first."""
        idle = [slot for slot in self._slots if slot not in self._of.values() and not slot.stops.is_set()]
        for slot in sorted(idle, key=lambda slot: not slot.has_failed)[: max(num, 0)]:
            slot.stops.set()
            self._mend(slot)

    def up(self, replica: LiveReplica) -> None:
        """It has been seen to be well."""
        if (slot := self._of.get(replica.id)) is not None:
            slot.is_up.set()
            slot.num_tries = 0
            self._mend(slot)

    def stop(self, replica: LiveReplica) -> None:
        """SIGTERM, and SIGKILL if that does not help."""
        slot = self._of.pop(replica.id, None)
        if slot is not None:
            slot.stops.set()
            self._mend(slot)

    async def close(self) -> None:
        """All of them."""
        for slot in self._slots:
            slot.stops.set()
        if self._tasks:
            await asyncio.wait(self._tasks)

    # One replica.

    async def _keep(self, slot: _Slot) -> None:
        """Until it is to stop."""
        pause_s, name = FIRST_PAUSE_S, self._pool.name
        while not slot.stops.is_set() and (not slot.has_failed or self._host.wants(name)):
            slot.is_up.clear()
            if not slot.has_failed or self._host.has_room(name):
                try:
                    await self._run(slot)
                except (OSError, HeadwayError) as error:
                    slot.why = str(error)
                    log.warning("%s: a replica cannot be started: %s", name, error)
                except Exception as error:  # a mistake of ours, or a policy's, must not be this replica's last start
                    slot.why = str(error)
                    log.exception("%s: a replica", name)
                if slot.is_up.is_set():
                    pause_s = FIRST_PAUSE_S
                    continue
                self._came_to_nothing(slot)
            with suppress(TimeoutError):
                async with asyncio.timeout(pause_s):
                    await slot.stops.wait()
            pause_s = min(2 * pause_s, LONGEST_PAUSE_S)
        self._mend(slot)
        self._slots.discard(slot)

    def _came_to_nothing(self, slot: _Slot) -> None:
        slot.num_tries += 1
        if slot.num_tries == self._how.tries and not slot.stops.is_set():
            slot.has_failed = True
            log.error("%s: %d starts have come to nothing (%s): it counts as failed, and is tried on",
                      self._pool.name, slot.num_tries, slot.why)  # fmt: skip
            self._host.failed(self._pool.name, slot.why)

    def _mend(self, slot: _Slot) -> None:
        if slot.has_failed:
            slot.has_failed = False
            self._host.mended(self._pool.name)

    async def _run(self, slot: _Slot) -> None:
        """One process, from start to end, with the GPUs that it takes."""
        if self._gpus is None:
            await self._run_on(slot, None)
        elif (gpus := await self._taken(slot, self._gpus)) is not None:
            try:
                await self._run_on(slot, gpus)
            finally:
                self._gpus.give(gpus)

    async def _taken(self, slot: _Slot, gpus: Gpus) -> tuple[int, ...] | None:
        """GPUs that have become free; None: it is to stop before."""
        taking = asyncio.create_task(gpus.take(self._pool.parallel.num_gpus))
        stops = asyncio.create_task(slot.stops.wait())
        await asyncio.wait({taking, stops}, return_when=asyncio.FIRST_COMPLETED)
        stops.cancel()
        if taking.done():
            return taking.result()
        taking.cancel()
        return None

    async def _run_on(self, slot: _Slot, gpus: tuple[int, ...] | None) -> None:
        port = self._ports.take()
        try:
            keeper = await self._spawn(port, gpus)
            if slot.stops.is_set():
                await self._end(keeper)
                return
            replica = self._host.came(self._pool.name, f"http://{HOST}:{port}", is_awaited=not slot.has_failed)
            self._of[replica.id] = slot
            relay = asyncio.create_task(_relay(keeper, replica.name))
            try:
                await self._watch(slot, keeper, replica)
            finally:
                await self._end(keeper)
                await relay
        finally:
            self._ports.give(port)

    async def _watch(self, slot: _Slot, keeper: asyncio.subprocess.Process, replica: LiveReplica) -> None:
        """Until it is to stop, has ended, or has taken too long to be well."""
        ended = asyncio.create_task(keeper.wait())
        stops, up = asyncio.create_task(slot.stops.wait()), asyncio.create_task(slot.is_up.wait())
        first = asyncio.FIRST_COMPLETED
        try:
            await asyncio.wait({ended, stops, up}, timeout=self._how.ready_s, return_when=first)
            if up.done():
                await asyncio.wait({ended, stops}, return_when=first)
        finally:
            for task in (stops, up, ended):
                task.cancel()
        if slot.stops.is_set():
            return
        why = "has ended" if ended.done() and not ended.cancelled() else f"was not up after {self._how.ready_s:g} s"
        slot.why = why
        self._of.pop(replica.id, None)
        again = self._host.lost(replica)
        log.warning("%s %s%s", replica.name, why, "; it is started again" if again else "")
        if not again:
            slot.stops.set()

    async def _spawn(self, port: int, gpus: tuple[int, ...] | None) -> asyncio.subprocess.Process:
        how, pipe = self._how, asyncio.subprocess.PIPE
        own = {name: os.environ[name] for name in (*ENVIRONMENT, *how.keep_env) if name in os.environ}
        stands = self._stands(port, gpus)
        env = own | {name: filled(value, stands) for name, value in how.env.items()}
        words = [filled(word, stands) for word in how.command]
        with open(Path(how.log, f"{self._pool.name}-{port}.log"), "ab") if how.log else nullcontext(pipe) as output:
            return await asyncio.create_subprocess_exec(
                sys.executable, "-I", "-S", str(_KEEPER), str(how.stop_s), *words, stdin=pipe, stdout=output,
                stderr=asyncio.subprocess.STDOUT, env=env, start_new_session=True,
            )  # fmt: skip

    async def _end(self, keeper: asyncio.subprocess.Process) -> None:
        """The keeper ends the engine, and itself; if the keeper itself was killed, what it kept is."""
        assert keeper.stdin is not None
        keeper.stdin.close()
        with suppress(TimeoutError):
            async with asyncio.timeout(self._how.stop_s + _GRACE_S):
                await keeper.wait()
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(keeper.pid, signal.SIGKILL)
        await keeper.wait()

    def _stands(self, port: int, gpus: tuple[int, ...] | None) -> dict[str, Any]:
        """What stands for what in the command."""
        index, parallel = port - self._ports.first, self._pool.parallel
        own = range(index * parallel.num_gpus, (index + 1) * parallel.num_gpus) if gpus is None else gpus
        return {
            "port": port, "index": index, "gpus": ",".join(map(str, own)), "tp": parallel.tp, "pp": parallel.pp,
            "role": self._pool.role, "bootstrap_port": free_port(),
        }  # fmt: skip


def filled(word: str, stands: dict[str, Any]) -> str:
    """A word with what is meant in the place of what stands for it."""
    for name, value in stands.items():
        word = word.replace(f"{{{name}}}", str(value))
    return word


async def _relay(keeper: asyncio.subprocess.Process, name: str) -> None:
    """What an engine writes, line by line, to the gateway's log."""
    if keeper.stdout is None:
        return
    rest = b""
    while data := await keeper.stdout.read(1 << 16):
        *lines, rest = (rest + data).split(b"\n")
        for line in lines:
            log.info("%s: %s", name, line[:_LINE_BYTES].decode(errors="replace").rstrip())
        rest = rest[-_LINE_BYTES:]
