"""Reads one engine's KV cache events into its cache index, over ZeroMQ.

A missing or malformed batch is requested from the engine's replay endpoint. When the events pause, batches that may
have followed the last received batch are requested, too. After a new connection, perhaps to a restarted engine, and
after inconsistent events, the index is rebuilt from all batches that the engine still has. Without events, the index
guesses from the requests that were placed.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Literal

import zmq
import zmq.asyncio
from msgspec import Struct
from zmq.utils.monitor import recv_monitor_message

from headway.control.cache_index import CacheIndex
from headway.core.errors import HeadwayError
from headway.gateway.kv_events import wire
from headway.gateway.kv_events.address import EventAddress
from headway.gateway.kv_events.engine_blocks import EngineBlocks

log = logging.getLogger("headway.gateway")
REPLAY_TIMEOUT_S = 2.0
"""Longest wait for the first batch of a replay. The limit for later batches is a quarter of this, because they can be
requested again."""
QUIET_S = 2.0
"""Length of a pause after which the engine is asked whether its last batch was lost."""
MAX_MALFORMED = 3
"""After this many malformed batches in a row, the events are not trusted."""
REBUILD_PERIOD_S = 10.0
"""Minimum time between two attempts to reread an engine whose events were not trusted."""
MAX_BATCH_BYTES = 2 << 20
"""Maximum length of a batch; a longer batch ends the connection. 64 Ki tokens take a quarter of this, and an engine
computes fewer at a time."""
MAX_WAITING_BYTES = 64 << 20
"""Maximum received bytes of an engine's batches that are not applied yet. Further batches wait at the engine."""
_USUAL_BYTES = 64 << 10
"""Buffer size for a batch of a replay, unless an earlier replay ended at a longer batch. Engines send a whole replay at
once, and drop batches that do not fit."""
_YIELD_S = 0.005
"""Longest time spent on waiting batches before other work of the event loop may run."""
FIRST_DOUBT_S, LONGEST_DOUBT_S = 60.0, 3600.0
"""(first time, longest time) for which events are ignored after they disagreed with answers. The time doubles with each
disagreement."""
State = Literal["connecting", "live", "incomplete", "degraded", "guess"]
"""`incomplete`: some batches are lost for good, so that the index misses blocks or has removed ones. `degraded`: no or
inconsistent events come, and the index guesses. `guess`: the index guesses, because the cached tokens in the engine's
answers disagree with its events."""


class EventCounts(Struct):
    """Counts of one subscriber."""

    batches: int = 0
    gaps: int = 0
    """Number of times that batches were missing."""
    replayed: int = 0
    """Batches received by replay."""
    lost: int = 0
    """Number of batches that were never received."""
    malformed: int = 0
    restarts: int = 0
    """Number of times that the index was rebuilt."""


class KvEventSubscriber:
    """The subscriber to one engine's events. `on_state(state, why)` is called at each change of the state."""

    def __init__(
        self,
        name: str,
        address: EventAddress,
        blocks: EngineBlocks,
        index: CacheIndex,
        context: zmq.asyncio.Context,
        on_state: Callable[[State, str], None],
    ) -> None:
        self.name, self.address, self.blocks, self._index = name, address, blocks, index
        self._context, self._on_state = context, on_state
        index.groups = blocks.layer_groups
        self.state: State = "connecting"
        self.why = ""
        """The reason for the state; empty if the events are live."""
        self.counts = EventCounts()
        self._next = 0
        """The sequence number of the next batch."""
        self._num_malformed, self._last_malformed, self._why_malformed = 0, -1, ""
        """(number of malformed batches in a row, sequence number of the last malformed batch, its error)."""
        self._replay_bytes = _USUAL_BYTES
        """Largest size of a batch in a replay."""
        self._first = b""
        """The batch with number 0."""
        self._has_index = False
        self._read_s: float | None = None
        """The time of the last batch, on the monotonic clock; None before the first batch."""
        self._rebuilt_s = float("-inf")
        """The time at which all batches were last requested, on the monotonic clock."""
        self._task: asyncio.Task[None] | None = None
        self._doubted_until_s, self._doubt_s = float("-inf"), FIRST_DOUBT_S
        """(time until which events are ignored, on the monotonic clock; seconds for which they are ignored the next
        time)."""

    @property
    def age_s(self) -> float | None:
        """Seconds since the last batch; None if no batch has come."""
        return None if self._read_s is None else time.monotonic() - self._read_s

    def start(self) -> None:
        self._task = asyncio.get_running_loop().create_task(self._run())

    async def stop(self) -> None:
        """Stop reading events; the index estimates from now on."""
        if self._task is not None:
            self._task.cancel()
            with suppress(asyncio.CancelledError):
                await self._task
        self._guess()

    def doubt(self, why: str) -> None:
        """Ignore the events for a while, because they disagree with the engine's answers. The index guesses meanwhile;
        then the events are read again."""
        if self._has_index:
            self._doubted_until_s = time.monotonic() + self._doubt_s
            self._doubt_s = min(2 * self._doubt_s, LONGEST_DOUBT_S)
            self._guess()
            self._change("guess", why)

    def trust(self) -> None:
        """Trust the events, because they agree with the engine's answers."""
        self._doubt_s = FIRST_DOUBT_S

    async def _run(self) -> None:
        while True:
            try:
                await self._read()
            except (zmq.ZMQError, OSError) as error:
                self._degrade(f"{self.address.endpoint}: {error}")
            except Exception as error:  # no message of an engine may end the reading for good
                log.exception("%s: KV cache events", self.name)
                self._degrade(f"{type(error).__name__}: {error}")
            await asyncio.sleep(REPLAY_TIMEOUT_S)

    async def _read(self) -> None:
        with self._context.socket(zmq.SUB) as socket:
            _limit(socket, MAX_BATCH_BYTES)
            events = zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED | zmq.EVENT_MONITOR_STOPPED
            monitor = socket.get_monitor_socket(events)
            socket.subscribe(self.address.topic.encode())
            socket.connect(self.address.endpoint)
            poller = zmq.asyncio.Poller()
            poller.register(socket, zmq.POLLIN)
            poller.register(monitor, zmq.POLLIN)
            asked_at = 0
            try:
                while True:
                    is_new = self._has_index and self._next != asked_at and bool(self.address.replay_endpoint)
                    ready = dict(await poller.poll(1000 * QUIET_S if is_new else None))
                    if not ready:
                        await self._replay(None)
                        asked_at = self._next
                    if monitor in ready:
                        await self._connection_changed((await recv_monitor_message(monitor))["event"])
                    if socket in ready:
                        await self._take_waiting(socket)
            finally:
                socket.disable_monitor()
                monitor.close(0)

    async def _connection_changed(self, event: int) -> None:
        if event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
            await self._rebuild()
        elif event == zmq.EVENT_DISCONNECTED:
            self._degrade("the connection is lost")

    async def _take_waiting(self, socket: zmq.asyncio.Socket) -> None:
        """Take the batches that have arrived."""
        end_s = time.monotonic() + _YIELD_S
        while time.monotonic() < end_s and await socket.poll(0):
            parts = await socket.recv_multipart()
            if len(parts) != 3 or len(parts[1]) != 8:
                self._count_malformed(f"a message of {len(parts)} parts; expected topic, sequence number and batch")
                if self._num_malformed >= MAX_MALFORMED:
                    self._distrust()
                continue  # the next batch's number then shows that this batch is missing
            await self._take(int.from_bytes(parts[1], "big"), parts[2])

    async def _take(self, number: int, payload: bytes) -> None:
        if self.state == "guess":
            if time.monotonic() < self._doubted_until_s:
                self._next = number + 1
                return
            await self._rebuild()
        if number < self._next:
            if number == 0 and payload != self._first:  # the engine has restarted behind the same connection
                await self._rebuild()
            return
        if number > self._next and self._has_index:
            self.counts.gaps += 1
            await self._replay(number)
        elif self._num_malformed >= MAX_MALFORMED and time.monotonic() >= self._rebuilt_s + REBUILD_PERIOD_S:
            await self._rebuild()
        if number < self._next or self._apply(number, payload):
            return
        if self._has_index and self.address.replay_endpoint:  # the batch may have been damaged in transit
            self._next = number
            await self._replay(number + 1)
            self._next = max(self._next, number + 1)
        if self._num_malformed:
            self._distrust()

    def _apply(self, number: int, payload: bytes) -> bool:
        """Apply a batch that is not older than the batches before. Returns whether it can be read."""
        if number > self._next and self._has_index:
            self.counts.lost += number - self._next
            self._change("incomplete", f"{self.counts.lost} batches of events are lost")
        self._next = number + 1
        self.counts.batches += 1
        self._read_s = time.monotonic()
        if number == 0:
            self._first = payload
        try:
            events = wire.decode(payload)
        except HeadwayError as error:
            if number != self._last_malformed:
                self._last_malformed = number
                self._count_malformed(str(error))
            return False
        self._num_malformed, self._last_malformed = 0, -1
        sizes = self.blocks.sizes(events)
        if sizes and not self._fits(sizes):
            return True
        has_blocks = any([isinstance(event, wire.BlockStored) for event in events])
        is_cleared = any([isinstance(event, wire.AllBlocksCleared) for event in events])
        if not self._has_index:
            if not has_blocks and not is_cleared:
                return True  # without a replay, the index begins with the next block
            is_whole = is_cleared or not number
            self._begin("live" if is_whole else "incomplete", "" if is_whole else "the first batches were missed")
        elif is_cleared:
            self._change("live", "")
        self._index.apply_blocks(self.blocks.changes(events))
        return True

    def _fits(self, sizes: set[int]) -> bool:
        """Whether prompts can match blocks of one of these sizes. The engine's first events give its own size."""
        size, first = self.blocks.block_size_tokens, min(sizes)
        if size in sizes or (len(self.blocks) and all([size % each == 0 for each in sizes])):
            return True  # the first block of a prompt may still be reported
        if len(sizes) == 1 and self.blocks.adopt(first):
            self._index.resize(first)
            return True
        self._degrade(
            f"blocks of {first} tokens; expected {size} as in the pool's engine, or a multiple from the start"
        )
        return False

    def _count_malformed(self, why: str) -> None:
        self.counts.malformed += 1
        self._num_malformed += 1
        self._why_malformed = why

    def _distrust(self) -> None:
        """Stop trusting the events: a batch is malformed, and no replay repairs it."""
        if self._num_malformed >= MAX_MALFORMED:
            self._degrade(self._why_malformed)
        elif self._has_index:
            self._change("incomplete", self._why_malformed)

    async def _rebuild(self) -> None:
        """Rebuild the index from all batches that the engine still has."""
        self.counts.restarts += self._has_index or self.counts.batches > 0
        self._rebuilt_s, self._num_malformed, self._last_malformed = time.monotonic(), 0, -1
        self._guess()
        self._next = 0
        self._change("connecting", "")
        if not self.address.replay_endpoint:
            return
        first = await self._replay(None)
        if first is None:
            why = f": {self._why_malformed}" if self._num_malformed else ""
            self._degrade(f"no replay from {self.address.replay_endpoint}{why}")
        elif not self._has_index and self.state == "connecting":
            self._begin("live", "")

    async def _replay(self, before: int | None) -> int | None:
        """Request the batches from the next one on, and apply those with numbers below `before`. Returns the number of
        the first received batch, or the next number if none was received; None without an answer. The engine drops
        batches that find no room while earlier ones are applied; they are requested again."""
        if not self.address.replay_endpoint:
            return None
        first = None
        while True:
            asked = self._next
            found, is_over = await self._replay_part(before)
            first = found if first is None else first
            if is_over:
                return first
            if self._next == asked:
                if self._replay_bytes == MAX_BATCH_BYTES:
                    return first
                self._replay_bytes = MAX_BATCH_BYTES

    async def _replay_part(self, before: int | None) -> tuple[int | None, bool]:
        """Send one request for a replay. Returns the result of `_replay`, and whether the answer was complete."""
        first, end_s = None, time.monotonic() + _YIELD_S
        with self._context.socket(zmq.DEALER) as socket:
            socket.linger = 0
            _limit(socket, self._replay_bytes)
            socket.connect(self.address.replay_endpoint)
            await socket.send_multipart((b"", self._next.to_bytes(8, "big")))
            while await socket.poll(int((REPLAY_TIMEOUT_S if first is None else REPLAY_TIMEOUT_S / 4) * 1000)):
                try:
                    found = wire.replayed(await socket.recv_multipart())
                except HeadwayError as error:
                    self._count_malformed(str(error))
                    return None, True
                if found is None:
                    return (self._next if first is None else first), True
                number, payload = found
                if number < self._next or (before is not None and number >= before):
                    continue
                if number > self._next and first is not None:
                    return first, False
                first = number if first is None else first
                self.counts.replayed += 1
                if not self._apply(number, payload):
                    self._distrust()
                if time.monotonic() >= end_s:
                    await asyncio.sleep(0)
                    end_s = time.monotonic() + _YIELD_S
        return first, False

    # States.

    def _begin(self, state: State, why: str) -> None:
        """Begin an index from the events."""
        self._index.clear()
        self.blocks.clear()
        self._index.guesses, self._has_index = False, True
        self._change(state, why)

    def _guess(self) -> None:
        self._index.clear()
        self.blocks.clear()
        self._index.guesses, self._has_index = True, False

    def _degrade(self, why: str) -> None:
        if self._has_index or self.state != "degraded":
            self._guess()
        self._change("degraded", why)

    def _change(self, state: State, why: str) -> None:
        if (state, why) == (self.state, self.why):
            return
        before, self.state, self.why = self.state, state, why
        if state != before:
            level = logging.INFO if state in ("live", "connecting") else logging.WARNING
            log.log(level, "%s: KV cache events: %s%s", self.name, state, f": {why}" if why else "")
            self._on_state(state, why)


def _limit(socket: zmq.asyncio.Socket, max_bytes: int) -> None:
    """Limit the bytes of a batch that a socket accepts, before it is connected."""
    socket.rcvhwm, socket.maxmsgsize = MAX_WAITING_BYTES // max_bytes, max_bytes
    socket.reconnect_ivl_max = 5000  # in ms: for an engine whose batches are too long
