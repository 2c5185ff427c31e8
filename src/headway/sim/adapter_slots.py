"""The LoRA adapter slots of one replica, and the times to fill them.

As in vLLM (`vllm/lora/worker_manager.py`): an adapter runs from a GPU slot; an evicted adapter stays in host memory
while there is room. In both places, the least recently used idle adapter is evicted first.
"""

from __future__ import annotations

from collections import OrderedDict

from msgspec import Struct


class LoadTimes(Struct, frozen=True):
    """Seconds to load an adapter into a slot."""

    load_s: float
    """Seconds to load an adapter that is not in host memory."""
    copy_s: float
    """Seconds to copy an adapter from host memory."""


class AdapterSlots:
    """Slots on the GPU and in host memory, and the adapters that may use them."""

    __slots__ = ("_in_host", "_max_in_host", "_num_users", "num_slots", "times")

    def __init__(self, num_slots: int, max_in_host: int, times: dict[str, LoadTimes]) -> None:
        self.num_slots, self._max_in_host = num_slots, max_in_host
        self.times = times
        """Times to load each adapter, by its name. An emulated engine adds and removes entries."""
        self.clear()

    def clear(self) -> None:
        """Forget all adapters, after a crash."""
        self._num_users: OrderedDict[str, int] = OrderedDict()
        """Maps each adapter in a slot to its number of running requests. The least recently used adapter comes
        first."""
        self._in_host: OrderedDict[str, None] = OrderedDict()

    def has_room_for(self, adapter: str) -> bool:
        """Whether the adapter has a slot, or can get one now."""
        users = self._num_users
        return adapter in users or len(users) < self.num_slots or 0 in users.values()

    def use(self, adapter: str) -> float:
        """Count a running request and return the seconds to load its adapter. The adapter must have a slot or room for
        one."""
        users = self._num_users
        if adapter in users:
            users[adapter] += 1
            users.move_to_end(adapter)
            return 0.0
        if len(users) >= self.num_slots:
            del users[next(name for name, num in users.items() if not num)]
        users[adapter] = 1
        is_in_host = adapter in self._in_host
        self._in_host[adapter] = None
        self._in_host.move_to_end(adapter)
        if len(self._in_host) > self._max_in_host:
            self._in_host.popitem(last=False)
        return self.times[adapter].copy_s if is_in_host else self.times[adapter].load_s

    def release(self, adapter: str) -> None:
        """A counted request has left the batch. The adapter keeps its slot until another one needs it."""
        self._num_users[adapter] -= 1
