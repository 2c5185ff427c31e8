"""The LoRA adapters of the requests last placed at a replica: a router's own knowledge, which is never stale.

Engines report the adapters that run and that wait, but none that stays in its slot without requests. An engine that
evicts the least recently used adapter still has those of the last requests. Simulator and gateway estimate alike.
"""

from __future__ import annotations

from collections.abc import Set


class RecentAdapters:
    """At most as many adapters as the replica has slots."""

    __slots__ = ("_names", "num_slots")

    def __init__(self, num_slots: int) -> None:
        self.num_slots = num_slots
        self._names: dict[str, None] = {}
        """The latest last."""

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
        """The replica has lost its adapters."""
        self._names.clear()

    @property
    def names(self) -> Set[str]:
        return self._names.keys()
