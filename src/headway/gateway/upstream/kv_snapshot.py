"""Snapshots of llama.cpp's KV cache slots: one server saves a slot to a file, another restores it.

Servers that share a folder (`--slot-save-path`) can hand requests over: the next server recomputes one token, while a
token replay recomputes the prompt and all tokens so far.
"""

from __future__ import annotations

import asyncio
import errno
import fcntl
import logging
import re
from array import array
from collections.abc import Collection
from contextlib import suppress
from pathlib import Path
from stat import S_ISREG
from time import time
from typing import IO
from uuid import uuid4

import msgspec

from headway.gateway.blocking import OneAtATime, in_thread, start_in_thread
from headway.gateway.clock import Clock
from headway.gateway.upstream.engine import EngineEndpoint
from headway.gateway.upstream.errors import EngineError

log = logging.getLogger("headway.gateway")
_TIMEOUT_S = 30.0
"""Timeout to save or restore a slot."""
_FILE_NAME = re.compile("headway-[0-9a-f]{32}")
STALE_S = 2 * _TIMEOUT_S
"""A snapshot of this age that no process has locked is a leftover."""
_IN_USE = (errno.EWOULDBLOCK, errno.EACCES, errno.ENOENT)
"""Errors of a file that is locked by another process, belongs to another user, or was deleted."""
_CHECKED_TOKENS = 16
"""Tokens at the end of a snapshot that must match the text that the client received last."""
_MAGIC, _PACKED = 0x67677371, -1


class _Text(msgspec.Struct):
    content: str


class _Tokens(msgspec.Struct):
    tokens: list[int]


class KvSnapshot:
    """The KV cache of one request that moves between servers: a file, locked from `save` to `delete`.

    The lock shows other gateways that the file is in use.
    """

    def __init__(self) -> None:
        self._file: Path | None = None
        self._lock: IO[bytes] | None = None

    async def save(self, engine: EngineEndpoint, slot: int | None, seen_tokens: int, last_text: str) -> list[int]:
        """Save the slot of a request whose stream was aborted, and return all its tokens.

        `seen_tokens`: prompt and output tokens by the engine's count. `last_text`: the last chunk's text. Empty if the
        slot cannot be saved, or holds another request: a client that bypasses the gateway may have used it.
        """
        if engine.kv_folder is None or slot is None:
            return []
        file = self._file = engine.kv_folder / f"headway-{uuid4().hex}"
        try:
            if await _post(engine, slot, "save", file):
                self._lock = await in_thread(_locked, file)
                tokens = await in_thread(tokens_of, file)
                if len(tokens) == seen_tokens - 1:
                    tokens += await _token_of(engine, last_text)
                if 0 < seen_tokens <= len(tokens):
                    tail = tokens[max(seen_tokens - _CHECKED_TOKENS, 0) : seen_tokens]
                    if await _ends_with(engine, tail, last_text):
                        return tokens
        except (EngineError, OSError) as error:
            log.warning("%s: a slot could not be saved: %s", engine.name, error)
        await self.delete()
        return []

    async def restore(self, engine: EngineEndpoint, slot: int | None) -> None:
        """Restore the snapshot, if there is one, to a slot of another server. Raises EngineError if the server is
        gone."""
        if self._file is not None and slot is not None and self._file.parent == engine.kv_folder:
            await _post(engine, slot, "restore", self._file)
        await self.delete()

    async def delete(self) -> None:
        """Delete the file, if there is one."""
        if (deleting := self.abandon()) is not None:
            await deleting

    def abandon(self) -> asyncio.Future[None] | None:
        """Delete the file, if there is one, in the background."""
        (file, lock), self._file, self._lock = (self._file, self._lock), None, None
        return None if file is None else start_in_thread(_delete, file, lock)


def _locked(file: Path) -> IO[bytes]:
    """The opened file, locked if its file system supports locks. Raises OSError if it cannot be opened."""
    opened = file.open("rb")
    with suppress(OSError):
        fcntl.flock(opened, fcntl.LOCK_SH | fcntl.LOCK_NB)
    return opened


def _delete(file: Path, lock: IO[bytes] | None) -> None:
    file.unlink(missing_ok=True)
    if lock is not None:
        lock.close()


async def _post(engine: EngineEndpoint, slot: int, action: str, file: Path) -> bool:
    """Let the server save or restore a slot, once nothing runs in it. Raises EngineError if it does not answer."""
    path = f"/slots/{slot}?action={action}"
    status, data = await engine.client.fetch(path, _TIMEOUT_S, msgspec.json.encode({"filename": file.name}))
    if status != 200:
        log.warning("%s: %s answered %d: %s", engine.name, path, status, data[:300].decode(errors="replace"))
    return status == 200


async def _token_of(engine: EngineEndpoint, text: str) -> list[int]:
    """The token for this text; empty if the text is not exactly one token. A server streams a token before its slot
    contains the token. If a stream is aborted in between, the slot lacks the token.
    """
    body = msgspec.json.encode({"content": text, "add_special": False, "parse_special": True})
    status, data = await engine.client.fetch("/tokenize", _TIMEOUT_S, body)
    try:
        tokens = msgspec.json.decode(data, type=_Tokens).tokens if status == 200 else []
    except msgspec.MsgspecError:
        return []
    return tokens if len(tokens) == 1 else []


async def _ends_with(engine: EngineEndpoint, tokens: list[int], text: str) -> bool:
    status, data = await engine.client.fetch("/detokenize", _TIMEOUT_S, msgspec.json.encode({"tokens": tokens}))
    try:
        return status == 200 and msgspec.json.decode(data, type=_Text).content.endswith(text)
    except msgspec.MsgspecError:
        return False


class StaleSnapshots:
    """Deletes snapshots that killed gateways left, now and periodically. All hanging folders together occupy one
    thread."""

    def __init__(self, folders: Collection[Path], clock: Clock) -> None:
        self._folders, self._clock, self._calls = folders, clock, OneAtATime()
        self._deleting: asyncio.Task[None] | None = None
        if folders:
            self._delete(clock.now)

    def _delete(self, now: float, _: object = None) -> None:
        self._clock.at(self._clock.now + STALE_S, self._delete, None)
        if not self._calls.is_busy:
            self._deleting = asyncio.create_task(self._calls.call(delete_stale, self._folders))


def delete_stale(folders: Collection[Path]) -> None:
    """Delete the snapshots that killed gateways left."""
    for folder in folders:
        try:
            files = [file for file in folder.iterdir() if _FILE_NAME.fullmatch(file.name)]
        except OSError as error:
            log.warning("%s: left-over snapshots cannot be removed: %s", folder, error)
            continue
        for file in files:
            try:
                if _is_stale(file):
                    file.unlink()
                    log.info("%s: %s was left by a gateway that is gone, and is removed", folder, file.name)
            except OSError as error:  # a file that cannot be removed must not protect the other files
                if error.errno not in _IN_USE:
                    log.warning("%s cannot be removed: %s", file, error)


def _is_stale(file: Path) -> bool:
    """Whether a snapshot is a leftover. Raises OSError if another process has locked it.

    A snapshot from the future is a leftover, too, because the machine's clock was set back.
    """
    info = file.lstat()
    if not S_ISREG(info.st_mode) or abs(time() - info.st_mtime) <= STALE_S:
        return False
    with file.open("rb") as opened:
        fcntl.flock(opened, fcntl.LOCK_EX | fcntl.LOCK_NB)
    return True


def tokens_of(file: Path) -> list[int]:
    """The tokens of a saved slot; empty if the file has another format.

    The format is that of llama.cpp's `llama_state_seq_save_file`: magic, version, number of values, values. The values
    are the tokens or, since version 4 of its servers, -1, a version, the number of tokens, the tokens, and other data.
    """
    values = array("i")
    with file.open("rb") as opened:
        head = array("I", opened.read(12))
        if len(head) != 3 or head[0] != _MAGIC:
            return []
        values.frombytes(opened.read(values.itemsize * head[2]))
    if values and values[0] == _PACKED:
        values = values[3 : 3 + values[2]] if len(values) > 2 else values[:0]
    return values.tolist() if values and min(values) >= 0 else []
