"""The least of many values that change one at a time: which replica's iteration ends first, which request is checked
first."""

from __future__ import annotations

from heapq import heappop, heappush
from math import inf
from typing import Final

from librt.vecs import vec
from mypy_extensions import i64

IS_COMPILED: Final = not __file__.endswith(".py")
"""Whether `Tournament` is the faster one, or else `InterpretedTournament`."""


class Tournament:
    """A value for each slot, infinite at first. Of equal values the lowest slot's is first.

    A complete binary tree: a leaf is the value of a slot, every other node the less of its two children. A change walks
    towards the root until a node stays as it is.
    """

    __slots__ = ("_num_leaves", "_tree", "least")

    least: float
    """The least value; infinite if all are."""
    _num_leaves: i64
    _tree: vec[float]
    """The root is node 1, and the children of node i are 2*i and 2*i + 1."""

    def __init__(self) -> None:
        self.least, self._num_leaves = inf, 1
        self._tree = vec[float]([inf, inf])

    def extend_to(self, num_slots: i64) -> None:
        """Have at least this many slots."""
        values, num_leaves = self._tree, self._num_leaves
        if num_slots <= num_leaves:
            return
        while self._num_leaves < num_slots:
            self._num_leaves *= 2
        self._tree, self.least = vec[float]([inf] * (2 * self._num_leaves)), inf
        for slot in range(num_leaves):
            if values[num_leaves + slot] < inf:
                self.set(slot, values[num_leaves + slot])

    def set(self, slot: i64, value: float) -> None:
        """Change the value of a slot; infinite: remove it."""
        tree = self._tree
        node = self._num_leaves + slot
        tree[node] = value
        while node > 1:
            other = tree[node ^ 1]
            if other < value:
                value = other
            node >>= 1
            if tree[node] == value:
                return
            tree[node] = value
        self.least = value

    def pop(self) -> i64:
        """Remove the least value; one must be set. Returns its slot."""
        tree, least, num_leaves = self._tree, self.least, self._num_leaves
        node: i64 = 1
        while node < num_leaves:
            node *= 2
            if tree[node] != least:
                node += 1
        self.set(node - num_leaves, inf)
        return node - num_leaves


class InterpretedTournament(Tournament):
    """The same by Python's heap, which is faster while Python interprets this module."""

    __slots__ = ("_heap", "_values")

    def __init__(self) -> None:
        self.least = inf
        self._values: list[float] = []
        self._heap: list[tuple[float, int]] = []
        """(value, slot). Values that have changed are dropped when they are first."""

    def extend_to(self, num_slots: i64) -> None:
        self._values += [inf] * (num_slots - len(self._values))

    def set(self, slot: i64, value: float) -> None:
        self._values[slot] = value
        if value < inf:
            heappush(self._heap, (value, slot))
        if value <= self.least:
            self.least = value
        else:
            self._drop_changed()

    def pop(self) -> i64:
        heap, values = self._heap, self._values
        slot = heappop(heap)[1]
        values[slot] = inf
        if heap and values[heap[0][1]] == heap[0][0]:
            self.least = heap[0][0]
        else:
            self._drop_changed()
        return slot

    def _drop_changed(self) -> None:
        heap, values = self._heap, self._values
        while heap and values[heap[0][1]] != heap[0][0]:
            heappop(heap)
        self.least = heap[0][0] if heap else inf
