"""The bodies of requests that Envoy sends to the picker, read within the gateway's limits."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor

from headway.gateway.errors import ApiError
from headway.gateway.relay.json_body import LONG_BYTES
from headway.gateway.relay.request import ClientRequest
from headway.gateway.relay.request_reader import read_request
from headway.gateway.server.bodies import BodyMemory, decompressed
from headway.gateway.settings import Settings


class Bodies:
    """Counts and reads the bodies of all requests."""

    def __init__(self, settings: Callable[[], Settings]) -> None:
        self._settings = settings
        self._memory = BodyMemory()
        self._reader = ThreadPoolExecutor(max_workers=1)
        """Reads long bodies, one at a time, because each competes with the event loop for the interpreter."""

    def check_length(self, headers: Mapping[str, str]) -> None:
        """Raises ApiError if a request declares a body that is too long."""
        length = headers.get("content-length", "")
        if length.isdigit() and (len(length) > 18 or int(length) > self._settings().max_body_bytes):
            raise self._too_long()

    def take(self, num_bytes: int, num_more: int, owner: str) -> int:
        """Count a part of a body that had `num_bytes`, and return the new length. Raises ApiError if the length exceeds
        the limit of one request, of all requests, or of the `owner` (see `BodyMemory`)."""
        size = num_bytes + num_more
        if size > self._settings().max_body_bytes:
            raise self._too_long()
        self._memory.resize(num_bytes, size, self._settings().max_bodies_bytes, owner)
        return size

    def free(self, num_bytes: int, owner: str) -> None:
        """Release a body of this length."""
        self._memory.free(num_bytes, owner)

    @property
    def num_bytes(self) -> int:
        """Bytes of all held bodies."""
        return self._memory.num_bytes

    def _too_long(self) -> ApiError:
        return ApiError(413, f"the body is longer than {self._settings().max_body_bytes:,} bytes", "body_too_long")

    async def read(self, headers: Mapping[str, str], raw: bytes) -> ClientRequest:
        """The request in a body. Raises ApiError if it is invalid. A long or compressed body is read in a thread."""
        path = headers[":path"].partition("?")[0]
        encoding = headers.get("content-encoding", "identity").lower()
        if len(raw) <= LONG_BYTES and encoding == "identity":
            return read_request(path, raw, headers)
        max_bytes = self._settings().max_body_bytes

        def read() -> ClientRequest:
            return read_request(
                path, raw if encoding == "identity" else decompressed(raw, encoding, max_bytes), headers
            )

        return await asyncio.get_running_loop().run_in_executor(self._reader, read)

    def close(self) -> None:
        self._reader.shutdown(wait=False)
