"""The store of peers in Valkey or Redis. A gateway counts as connected while a client listens to the channel of its
name, and only the gateway does. Leases and streams expire by the server's clock."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

from headway.gateway.peers.store import KEEP_PARTS_S, OVER, PeerStore, StoredPart
from headway.gateway.valkey import Subscription, Valkey

_ACQUIRE_LEASE = """
local holder = redis.call('GET', KEYS[1])
if holder and holder ~= ARGV[1] then return 0 end
redis.call('SET', KEYS[1], ARGV[1], 'PX', ARGV[2])
return 1
"""
_RELEASE_LEASE = "if redis.call('GET', KEYS[1]) == ARGV[1] then redis.call('DEL', KEYS[1]) end"
# A stream is a hash. The value of a part is the gateway's name, a zero byte, and the content.
_ADD_PARTS = """
for i, stream in ipairs(KEYS) do
  redis.call('HSET', stream, ARGV[2 * i], ARGV[2 * i + 1])
  redis.call('PEXPIRE', stream, ARGV[1])
end
"""
_REMOVE = """
local gateway, only = ARGV[1] .. '\\0', ARGV[2]
for _, stream in ipairs(KEYS) do
  local fields = redis.call('HGETALL', stream)
  for i = 1, #fields, 2 do
    if string.sub(fields[i + 1], 1, #gateway) == gateway and (not only or fields[i] == only) then
      redis.call('HDEL', stream, fields[i])
    end
  end
end
"""
"""Remove a gateway's parts of streams. With a number: only the part with this number."""
_TAKE = """
redis.call('HDEL', KEYS[1], ARGV[2])
local fields = redis.call('HGETALL', KEYS[1])
for i = 1, #fields, 2 do
  local zero = string.find(fields[i + 1], '\\0', 1, true)
  redis.call('HSET', KEYS[1], fields[i], ARGV[1] .. string.sub(fields[i + 1], zero))
end
"""
_TRY_S = 60.0


class ValkeyPeerStore(PeerStore):
    """Connections to one database of a server."""

    def __init__(self, address: str, gateway: str, timeout_s: float) -> None:
        self._address, self._gateway, self._timeout_s = address, gateway, timeout_s
        self._valkey: Valkey | None = None
        self._listening: asyncio.Task[None] | None = None

    async def connect(self, receive: Callable[[str], None], lost: Callable[[], None]) -> None:
        await self.close()
        self._valkey = valkey = Valkey(self._address, self._timeout_s)
        await self.tidy()
        subscription = await valkey.subscribe(valkey.channel("messages"), self._channel_of(self._gateway))
        self._listening = asyncio.create_task(_listen(subscription, receive, lost))

    async def close(self) -> None:
        listening, self._listening = self._listening, None
        valkey, self._valkey = self._valkey, None
        if listening is not None:
            listening.cancel()
            await asyncio.gather(listening, return_exceptions=True)
        if valkey is not None:
            await valkey.close()

    @property
    def _connected(self) -> Valkey:
        if self._valkey is None:
            raise ConnectionError("not connected")
        return self._valkey

    def _channel_of(self, gateway: str) -> str:
        return self._connected.channel("gateway", gateway)

    def _stream(self, digest: bytes) -> str:
        return self._connected.key("stream", digest.hex())

    async def publish(self, messages: Sequence[str]) -> None:
        for message in messages:
            await self._connected.run("PUBLISH", self._connected.channel("messages"), message)

    async def acquire_lease(self, name: str, lease_s: float) -> bool:
        key, lease_ms = self._connected.key("lease", name), max(round(1000 * lease_s), 1)
        return bool(await self._connected.run_script(_ACQUIRE_LEASE, [key], [self._gateway, lease_ms]))

    async def release_lease(self, name: str) -> None:
        await self._connected.run_script(_RELEASE_LEASE, [self._connected.key("lease", name)], [self._gateway])

    async def add_parts(self, parts: Sequence[tuple[bytes, int, bytes]]) -> None:
        streams = [self._stream(digest) for digest, _, _ in parts]
        owner = self._gateway.encode() + b"\0"
        values = [value for _, number, body in parts for value in (number, owner + body)]
        await self._connected.run_script(_ADD_PARTS, streams, [round(1000 * KEEP_PARTS_S), *values])

    async def remove_streams(self, digests: Sequence[bytes]) -> None:
        await self._connected.run_script(_REMOVE, list(map(self._stream, digests)), [self._gateway])

    async def resume_streams(self, digests: Sequence[bytes]) -> None:
        await self._connected.run_script(_REMOVE, list(map(self._stream, digests)), [self._gateway, OVER])

    async def take_stream(self, digest: bytes) -> None:
        await self._connected.run_script(_TAKE, [self._stream(digest)], [self._gateway, OVER])

    async def parts(self, digest: bytes) -> list[StoredPart]:
        fields = iter(await self._connected.run("HGETALL", self._stream(digest)))
        found = []
        for number, value in zip(fields, fields, strict=True):
            gateway, _, body = value.partition(b"\0")
            found.append((int(number), gateway.decode(), body))
        return sorted(found)

    async def tidy(self) -> None:
        # A server that has become a replica of another server still publishes, but accepts no writes.
        await self._connected.run("SET", self._connected.key("written"), "1", "PX", round(1000 * _TRY_S))

    async def is_alive(self, gateway: str) -> bool:
        _, num = await self._connected.run("PUBSUB", "NUMSUB", self._channel_of(gateway))
        return int(num) > 0


async def _listen(subscription: Subscription, receive: Callable[[str], None], lost: Callable[[], None]) -> None:
    """Receive until the connection breaks."""
    try:
        while True:
            receive((await subscription.next()).decode(errors="replace"))
    except OSError:
        lost()
    finally:
        await subscription.close()
