"""Slots of llama.cpp's servers: each holds one request's KV cache, which a server saves to a file and another restores.

The gateway says which slot a request is to run in, so that it knows which one to save when the request moves. Servers
that share a folder (`--slot-save-path`) hand requests over in this way: the next one computes one token anew, where by
token replay it computes the prompt and all tokens so far.
"""

from __future__ import annotations

import asyncio
import fcntl
import logging
import re
from array import array
from collections import deque
from collections.abc import Collection
from contextlib import suppress
from pathlib import Path
from stat import S_ISREG
from time import time
from typing import IO
from uuid import uuid4

import msgspec

from headway.gateway.clock import Clock
from headway.gateway.fleet.replica import Engine, Reservation
from headway.gateway.relay.continuation import PartialResponse
from headway.gateway.scheduling.in_flight import InFlightRequest
from headway.gateway.upstream.client import EngineError

log = logging.getLogger("headway.gateway")
_PATIENCE_S = 30.0
"""For a slot to be written or read."""
_NAME = re.compile("headway-[0-9a-f]{32}")
"""Of files that are on their way from one server to the next."""
STALE_S = 2 * _PATIENCE_S
"""A file that has not been written to for so long, and that nobody holds, is nobody's."""
_TAIL_TOKENS = 16
"""So many of a file's tokens must say what the client has heard last."""
_MAGIC, _PACKED = 0x67677371, -1


class _Props(msgspec.Struct):
    total_slots: int


class _Text(msgspec.Struct):
    content: str


class Slots:
    """One server's, as the gateway fills them: one request in each, and the others wait in turn."""

    def __init__(self) -> None:
        self._num = 0
        self._free: list[int] = []
        """Those that have been empty for longest come first."""
        self._began: dict[int, frozenset[int]] = {}
        """What a slot's last prompt began with: its server still has the KV cache of it."""
        self._line: deque[Reservation] = deque()

    async def learn(self, engine: Engine, timeout_s: float) -> None:
        """How many there are. EngineError where the server does not tell."""
        status, data = await engine.client.fetch("/props", timeout_s)
        try:
            num = msgspec.json.decode(data, type=_Props).total_slots if status == 200 else 0
        except msgspec.MsgspecError:
            num = 0
        if num < 1:
            raise EngineError("tells of no slots: is it a llama.cpp server?")
        self.there_are(num)

    def there_are(self, num: int) -> None:
        """So many."""
        self._free = [free for free in self._free if free < num] + list(range(self._num, num))
        self._num = num
        self._call()

    def enter(self, seat: Reservation) -> None:
        """Give it a slot, or have it wait for one."""
        seat.waits = True
        self._line.append(seat)
        self._call()

    def leave(self, seat: Reservation) -> None:
        """Its slot is free; or it does not wait any more."""
        if seat.waits:
            self._line.remove(seat)
        elif seat.slot is not None and seat.slot < self._num:
            self._free.append(seat.slot)
        self._call()

    def _call(self) -> None:
        """Whose turn it is, as long as there are slots: each gets that with most of its prompt in the cache."""
        while self._free and self._line:
            seat = self._line.popleft()
            begins = frozenset(segment.id for segment in seat.live.prefix)
            slot = max(self._free, key=lambda free: len(begins & self._began.get(free, frozenset())))
            self._free.remove(slot)
            self._began[slot] = begins
            seat.slot, seat.waits = slot, False
            seat.called()


class KvSnapshot:
    """What a request takes along from one server to the next: a file with its slot's KV cache.

    It is locked from when it has been saved until it is removed, so that another gateway sees whether it is somebody's.
    """

    def __init__(self, ticket: InFlightRequest) -> None:
        self._ticket = ticket
        self._file: Path | None = None
        self._held: IO[bytes] | None = None

    async def unpack(self, engine: Engine) -> None:
        """Put what was saved into the slot that the request has now. EngineError if the server is gone."""
        if self._file is not None and self._file.parent == engine.kv_folder:
            await self._act(engine, "restore", self._file)
        self.drop()

    def drop(self) -> None:
        """Remove the file."""
        if self._file is not None:
            self._file.unlink(missing_ok=True)
            self._file = None
        if self._held is not None:
            self._held.close()
            self._held = None

    async def pack(self, engine: Engine, said: PartialResponse) -> None:
        """The stream has been cut off to go on elsewhere: save its slot. Where that fails, its tokens have to do."""
        if engine.kv_folder is None:
            return
        file = self._file = engine.kv_folder / f"headway-{uuid4().hex}"
        try:
            if await self._act(engine, "save", file):
                self._held = file.open("rb")
                with suppress(OSError):  # not every file system has locks
                    fcntl.flock(self._held, fcntl.LOCK_SH | fcntl.LOCK_NB)
                tokens = await asyncio.to_thread(tokens_of, file)
                if tokens is not None and await self._fits(engine, tokens, said):
                    said.learn(tokens)
                    return
        except (EngineError, OSError) as error:
            log.warning("%s: a slot could not be saved: %s", engine.name, error)
        self.drop()

    async def _act(self, engine: Engine, action: str, file: Path) -> bool:
        """The server saves or restores the slot, once nothing runs in it. EngineError if it does not answer."""
        seat = self._ticket.seat
        if seat is None or seat.slot is None:
            return False
        body = msgspec.json.encode({"filename": file.name})
        path = f"/slots/{seat.slot}?action={action}"
        status, data = await engine.client.fetch(path, _PATIENCE_S, body)
        if status != 200:
            log.warning("%s: %s answered %d: %s", engine.name, path, status, data[:300].decode(errors="replace"))
        return status == 200

    @staticmethod
    async def _fits(engine: Engine, tokens: list[int], said: PartialResponse) -> bool:
        """Are these the request's? Others may have had the slot, of whom the gateway knows nothing."""
        if not 0 < said.seen_tokens <= len(tokens):
            return False
        tail = tokens[max(said.seen_tokens - _TAIL_TOKENS, 0) : said.seen_tokens]
        status, data = await engine.client.fetch("/detokenize", _PATIENCE_S, msgspec.json.encode({"tokens": tail}))
        try:
            return status == 200 and msgspec.json.decode(data, type=_Text).content.endswith(said.last)
        except msgspec.MsgspecError:
            return False


def tidy(folders: Collection[Path], clock: Clock) -> None:
    """Remove what gateways that were killed have left in the middle of a move: now, and now and then."""
    for folder in folders:
        with suppress(OSError):
            for file in folder.iterdir():
                if _NAME.fullmatch(file.name) and _is_stale(file):
                    log.info("%s: %s was left by a gateway that is gone, and is removed", folder, file.name)
                    file.unlink(missing_ok=True)
    if folders:
        clock.at(clock.now + STALE_S, lambda now, folders: tidy(folders, clock), folders)


def _is_stale(file: Path) -> bool:
    """Nobody writes it, and nobody holds it."""
    with suppress(OSError):
        about = file.lstat()
        if S_ISREG(about.st_mode) and time() - about.st_mtime > STALE_S:
            with file.open("rb") as opened:
                fcntl.flock(opened, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return True
    return False


def tokens_of(file: Path) -> list[int] | None:
    """The tokens whose KV cache a saved slot is; None: it is written in some other way.

    As llama.cpp's `llama_state_seq_save_file` has it: magic, version, a number of values, and these. They are the
    tokens, or since version 4 of its servers: -1, a version, a number of tokens, these, and what else there is.
    """
    values = array("i")
    with file.open("rb") as opened:
        head = array("I", opened.read(12))
        if len(head) != 3 or head[0] != _MAGIC:
            return None
        values.frombytes(opened.read(values.itemsize * head[2]))
    if values and values[0] == _PACKED:
        values = values[3 : 3 + values[2]] if len(values) > 2 else values[:0]
    return values.tolist() if values and min(values) >= 0 else None
