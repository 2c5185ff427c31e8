"""The LoRA adapters of the latest requests placed at a replica: an estimate of the adapters in the engine's slots.
Engines report the adapters of running and waiting requests, but not the idle adapters that remain in a slot. An engine
that evicts the least recently used adapter still has the adapters of the latest requests. The estimate needs no report,
so it is never stale. Simulator and gateway use the same estimate.
"""

from __future__ import annotations

from collections.abc import Set


class RecentAdapters:
    """At most one adapter per slot of the replica."""

    __slots__ = ("_names", "num_slots")

    def __init__(self, num_slots: int) -> None:
        self.num_slots = num_slots
        self._names: dict[str, None] = {}
        """Adapters; the latest is last."""

    def note(self, lora: str) -> None:
        """A request for this adapter is placed at the replica."""
        self._names.pop(lora, None)
        self._names[lora] = None
        self.resize(self.num_slots)

    def resize(self, num_slots: int) -> None:
        self.num_slots = num_slots
        while len(self._names) > num_slots:
            del self._names[next(iter(self._names))]

    def clear(self) -> None:
        """Forget the adapters, after the replica restarted."""
        self._names.clear()

    @property
    def names(self) -> Set[str]:
        return self._names.keys()
