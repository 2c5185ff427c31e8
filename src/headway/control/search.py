"""Finds the replica with the least score for a request by branch and bound, without reading all replicas.

A score depends on the request, so the replicas cannot be kept sorted. But the policy gives numbers per replica whose
sum, weighted by numbers of the request, is a lower bound of the score (`FleetView.find_least_score`). A tree keeps the
minimum of each number over the replicas below each node, so one sum can rule out a whole subtree.

Minima of several numbers may come from several replicas, so that their sum is too low. So the first number in the tree
includes the others with *base weights*, the least of recent requests, and only the rest of a weight counts apart.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from heapq import heappop, heappush
from math import inf
from typing import Any, Final

from librt.vecs import vec
from mypy_extensions import i64

from headway.control.changes import ChangeReader, Changes
from headway.core.view import Bounds, ReplicaView

_NONE: Final = 1e200
"""The numbers of an empty leaf: larger than any other numbers, yet 0 when multiplied by a weight of 0."""
_MARGIN: Final = 1e-9
"""Relative rounding error by which the sum may exceed the score."""
_MOST_ENTRIES: Final = 8
"""Maximum number of heap entries of kinds per replica. Beyond it, the kinds are rebuilt."""
_MOST_LEVELS: Final = 64
_REBASE_AFTER: Final = 4
"""Number of searches per replica after which base weights are chosen anew."""
_BELOW: Final = 0.98
"""Base weights as a share of the least weights, which may fall a little from request to request."""


class _Alike:
    """The replicas of one kind."""

    __slots__ = ("ids", "kind")

    def __init__(self, kind: Any) -> None:
        self.kind = kind
        self.ids: list[int] = []
        """A heap. The first one stands for the kind in the tree; outdated ids, and some twice, may follow it."""


class Search:
    """The lower bounds of each replica, recomputed only for replicas that have changed."""

    __slots__ = (
        "_alike", "_base", "_bounds", "_falls", "_key", "_kinds", "_least_weights", "_nodes", "_num_entries",
        "_num_searches", "_reader", "_size", "_sums", "_tree",
    )  # fmt: skip

    def __init__(self, key: Callable[[Any], Bounds], changes: Changes, falls: bool = False) -> None:
        """`falls`: ticks may lower scores, so that bounds are computed again when what they were read from ends."""
        self._key, self._falls, self._reader = key, falls, ChangeReader(changes, reports_ends=falls)
        self._size: i64 = 1
        """Number of leaves, which are the last nodes; node i has the children 2 i and 2 i + 1."""
        self._tree: vec[float] = vec[float]()
        """Four numbers of each node: the minimum of each number; the first one includes the others with the base
        weights."""
        self._base, self._least_weights = (0.0, 0.0, 0.0), (inf, inf, inf)
        """Base weights, and the least weights since they were chosen."""
        self._num_searches = sys.maxsize
        """Number of searches since the base weights were chosen. They are chosen at the first search."""
        self._nodes: vec[i64] = vec[i64]([0] * _MOST_LEVELS)
        self._sums: vec[float] = vec[float]([0.0] * _MOST_LEVELS)
        """The nodes of one search that are yet to visit, at most one of each level, and their sums."""
        self._bounds: vec[float] = vec[float]()
        """Four numbers of each position: those of the replica itself."""
        self._alike: dict[Any, _Alike] = {}
        """Maps each kind to the replicas of the kind."""
        self._kinds: list[_Alike | None] = []
        """Maps each position to the replicas of the same kind."""
        self._num_entries = 0
        """Number of heap entries of all kinds."""

    def least(
        self,
        replicas: Sequence[ReplicaView],
        weights: tuple[float, float, float],
        score: Callable[[Any], float],
        now: float,
    ) -> int:
        """The position of the least score (the lowest id on ties); -1 if these replicas are not cached yet."""
        # These replicas may be asked for only once, such as the replicas with room: keep their bounds from the second
        # use on.
        if not self._reader.follows(replicas):
            return -1
        self._update(now)
        self._choose_base(weights)
        return self._descend(weights, score)

    def _descend(self, weights: tuple[float, float, float], score: Callable[[Any], float]) -> int:
        tree, size, base, replicas = self._tree, self._size, self._base, self._reader.replicas
        num = len(replicas)
        v, w, x = weights[0] - base[0], weights[1] - base[1], weights[2] - base[2]
        nodes, sums = self._nodes, self._sums
        nodes[0], sums[0] = 1, -inf
        left: i64 = 1
        read: list[int] = []
        found, found_id, least, limit = -1, -1, inf, inf
        while left:
            left -= 1
            node = nodes[left]
            if sums[left] > limit:
                continue
            while node < size:
                near = 2 * node
                at = 4 * near
                sum = tree[at] + v * tree[at + 1] + w * tree[at + 2] + x * tree[at + 3]
                other = tree[at + 4] + v * tree[at + 5] + w * tree[at + 6] + x * tree[at + 7]
                far = near + 1
                if other < sum:
                    near, far, sum, other = far, near, other, sum
                if other <= limit:
                    nodes[left], sums[left] = far, other
                    left += 1
                if sum > limit:
                    break
                node = near
            else:
                position = int(node - size)
                if position >= num or position in read:
                    continue
                if not (self._falls or self._kinds[position] is None or self._keeps_kind(position)):
                    nodes[0], sums[0] = 1, -inf  # another replica stands for the kind now
                    left = 1
                    continue
                replica = replicas[position]
                value = score(replica)
                read.append(position)
                if value < least or (value == least and (found < 0 or replica.id < found_id)):
                    found, found_id, least, limit = position, replica.id, value, value + _MARGIN * abs(value)
        if not self._falls:
            for position in read:  # time has passed since these bounds were computed
                if position != found and self._kinds[position] is None:
                    self._compute(position)
        return found

    def _choose_base(self, weights: tuple[float, float, float]) -> None:
        """Choose base weights, each at most the given weight. Recent base weights stay if they are low enough."""
        v, w, x = weights
        least = self._least_weights
        if v < least[0] or w < least[1] or x < least[2]:
            self._least_weights = least = min(v, least[0]), min(w, least[1]), min(x, least[2])
        base = self._base
        if v < base[0] or w < base[1] or x < base[2] or self._num_searches >= _REBASE_AFTER * self._size:
            self._base = _BELOW * least[0], _BELOW * least[1], _BELOW * least[2]
            self._least_weights, self._num_searches = weights, 0
            tree, bounds, size = self._tree, self._bounds, self._size
            at: i64 = 4 * size
            for i in range(0, len(bounds), 4):
                if tree[at + 1] != _NONE:
                    tree[at] = self._with_base(bounds[i], bounds[i + 1], bounds[i + 2], bounds[i + 3])
                at += 4
            for node in range(size - 1, 0, -1):
                tree[4 * node] = min(tree[8 * node], tree[8 * node + 4])
        self._num_searches += 1

    def _with_base(self, first: float, second: float, third: float, fourth: float) -> float:
        v, w, x = self._base
        return first + v * second + w * third + x * fourth

    def _keeps_kind(self, position: int) -> bool:
        """Recompute a replica's bounds; whether its kind is the same after the ticks since then."""
        before = self._kinds[position]
        self._compute(position)
        return self._kinds[position] is before

    def _update(self, now: float) -> None:
        """Recompute the bounds of changed replicas."""
        if self._reader.is_void() or self._num_entries > _MOST_ENTRIES * self._size:
            self._fill()
            return
        for position in self._reader.changed(now):
            self._compute(position)

    def _fill(self) -> None:
        self._reader.begin()
        num = len(self._reader.replicas)
        self._size = size = 1 << max(num - 1, 0).bit_length()
        self._tree = vec[float]([_NONE] * (8 * size))
        self._bounds, self._kinds = vec[float]([_NONE] * (4 * num)), [None] * num
        self._alike, self._num_entries = {}, 0
        for position in range(num):
            self._compute(position)

    def _compute(self, position: int) -> None:
        replica = self._reader.replicas[position]
        values: Bounds = self._reader.read(position, self._key) if self._falls else self._key(replica)
        first, second, third, fourth, kind = values
        before, id = self._kinds[position], replica.id
        alike: _Alike | None = None
        if kind is not None:
            alike = self._alike.get(kind)
            if alike is None:
                alike = self._alike[kind] = _Alike(kind)
            elif alike is before:
                return
        self._kinds[position] = alike
        bounds, at = self._bounds, 4 * i64(position)
        bounds[at], bounds[at + 1], bounds[at + 2], bounds[at + 3] = first, second, third, fourth
        if before is not None and before.ids[0] == id:
            self._show_first(before)
        if alike is not None:
            ids = alike.ids
            shown = ids[0] if ids else id
            heappush(ids, id)
            self._num_entries += 1
            if shown < id:
                self._hide(position)
                return
            if shown != id:
                self._hide(self._reader.position(shown))
        self._put(position, first, second, third, fourth)

    def _hide(self, position: int) -> None:
        self._put(position, _NONE, _NONE, _NONE, _NONE)

    def _show_first(self, alike: _Alike) -> None:
        """Put the first replica of a kind into the tree."""
        ids = alike.ids
        while ids:
            position = self._reader.position(ids[0])
            if self._kinds[position] is alike:
                bounds, at = self._bounds, 4 * i64(position)
                self._put(position, bounds[at], bounds[at + 1], bounds[at + 2], bounds[at + 3])
                return
            heappop(ids)
            self._num_entries -= 1
        del self._alike[alike.kind]

    def _put(self, position: int, first: float, second: float, third: float, fourth: float) -> None:
        """Change the numbers of a leaf, and of the nodes above it."""
        if second != _NONE:
            first = self._with_base(first, second, third, fourth)
        tree, node = self._tree, position + self._size
        while True:
            at = 4 * node
            if tree[at] == first and tree[at + 1] == second and tree[at + 2] == third and tree[at + 3] == fourth:
                return
            tree[at], tree[at + 1], tree[at + 2], tree[at + 3] = first, second, third, fourth
            if node == 1:
                return
            at = 4 * (node ^ 1)
            first, second = min(first, tree[at]), min(second, tree[at + 1])
            third, fourth = min(third, tree[at + 2]), min(fourth, tree[at + 3])
            node >>= 1
