"""The network between replicas: flows that share the capacity of both ends.

A flow gets an equal share of its source's outgoing capacity or of its target's incoming capacity, whichever is less.
Capacity left unused because a flow's other end is slower is not given to other flows.

Each start or end of a flow changes the ends of all flows beside it. So events belong to sources rather than flows: a
source has one event, at or before the earliest end of its flows. An event that comes too early is scheduled again.
"""

from __future__ import annotations

from collections.abc import Callable
from math import inf

from headway.sim.kernel import COMMAND, Kernel

Done = Callable[[float], None]


class Link:
    """A replica's network, in one direction."""

    __slots__ = ("armed_key", "armed_s", "capacity", "flows", "share", "version")

    def __init__(self, capacity: float) -> None:
        self.capacity = self.share = float(capacity)
        """`share`: the capacity of each flow. Every flow reads it whenever one begins or ends."""
        self.flows: dict[int, Flow] = {}
        """Flows of this network, by key."""
        self.armed_s = inf
        """Time of a source's event, no later than the first end of its flows. Infinite: no event."""
        self.armed_key = 0
        self.version = 0
        """Version of the event; events with another version are void."""

    def add(self, flow: Flow) -> None:
        self.flows[flow.key] = flow
        self.share = self.capacity / len(self.flows)

    def remove(self, flow: Flow) -> None:
        del self.flows[flow.key]
        if num := len(self.flows):
            self.share = self.capacity / num


class Flow:
    """A transfer of bytes from one replica to another."""

    __slots__ = (
        "done", "end_s", "into", "is_stopped", "key", "left_bytes", "limit", "out", "rate", "since_s", "source",
        "target",
    )  # fmt: skip

    def __init__(self, key: int, source: int, target: int, num_bytes: float, limit: float, done: Done) -> None:
        self.key, self.source, self.target = key, source, target
        self.left_bytes = num_bytes
        self.limit = limit
        self.rate = 0.0
        self.since_s = 0.0
        self.end_s = inf
        """Time at which all bytes will have arrived, at the current rate."""
        self.out: Link | None = None
        """The source's network; None: nothing is being sent."""
        self.into: Link | None = None
        self.is_stopped = False
        self.done = done


class Fabric:
    """All flows. `capacity(replica)` is in bytes per second, each way; every flow begins after `latency_s`."""

    def __init__(self, kernel: Kernel, capacity: Callable[[int], float], latency_s: float) -> None:
        self._kernel = kernel
        self._capacity = capacity
        self._latency_s = latency_s
        self._out: dict[int, Link] = {}
        self._in: dict[int, Link] = {}
        """Incoming links with flows, by replica."""

    def send(
        self, key: int, source: int, target: int, num_bytes: float, now: float, done: Done, limit: float = inf
    ) -> Flow:
        """Begin a flow of at most `limit` bytes per second; `done(time_s)` is called when all bytes have arrived.

        `key` is unique among the current flows.
        """
        flow = Flow(key, source, target, num_bytes, limit, done)
        self._kernel.at(now + self._latency_s, COMMAND, key, self._begin, flow)
        return flow

    def share(self, source: int, target: int, limit: float = inf) -> float:
        """The rate, in bytes per second, that one more flow would get."""
        out, into = self._out.get(source), self._in.get(target)
        num_out, num_in = 1 if out is None else len(out.flows) + 1, 1 if into is None else len(into.flows) + 1
        return min(self._capacity(source) / num_out, self._capacity(target) / num_in, limit)

    @staticmethod
    def left_bytes(flow: Flow, now: float) -> float:
        """Bytes that have not arrived yet."""
        left: float = flow.left_bytes - flow.rate * (now - flow.since_s)
        return left if left > 0.0 else 0.0

    def stop(self, flow: Flow, now: float) -> None:
        """End a flow without sending the rest."""
        flow.is_stopped = True
        out, into = flow.out, flow.into
        if out is None or into is None:
            return
        flow.out = flow.into = None
        out.remove(flow)
        into.remove(flow)
        if not out.flows:
            out.version += 1
            del self._out[flow.source]
        if not into.flows:
            del self._in[flow.target]
        self._share(out, into, now)

    def _begin(self, now: float, flow: Flow) -> None:
        if flow.is_stopped:
            return
        out, into = self._out.get(flow.source), self._in.get(flow.target)
        if out is None:
            out = self._out[flow.source] = Link(self._capacity(flow.source))
        if into is None:
            into = self._in[flow.target] = Link(self._capacity(flow.target))
        flow.out, flow.into, flow.since_s = out, into, now
        out.add(flow)
        into.add(flow)
        self._share(out, into, now)

    def _look(self, now: float, armed: tuple[Link, int]) -> None:
        """End the first flow of a source if it ends now; otherwise wait for it again."""
        out, version = armed
        if out.version != version:
            return
        first, out.armed_s = _first(out), inf
        if first.end_s == now and first.key == out.armed_key:
            self.stop(first, now)
            first.done(now)
        else:
            self._arm(out, first)

    def _arm(self, out: Link, flow: Flow) -> None:
        """Schedule an event no later than the end of this flow; equal times are ordered by key."""
        if flow.end_s < out.armed_s or (flow.end_s == out.armed_s and flow.key < out.armed_key):
            out.armed_s, out.armed_key = flow.end_s, flow.key
            out.version += 1
            self._kernel.at(flow.end_s, COMMAND, flow.key, self._look, (out, out.version))

    def _share(self, out: Link, into: Link, now: float) -> None:
        """Recompute rates and ends of all flows of two replicas, after one of their flows began or ended."""
        first: Flow | None = None
        for flow in out.flows.values():
            _update(flow, now)
            if first is None or _ends_before(flow, first):
                first = flow
        if first is not None:
            self._arm(out, first)
        for flow in into.flows.values():
            if flow.out is not None and flow.out is not out and _update(flow, now):
                self._arm(flow.out, flow)


def _update(flow: Flow, now: float) -> bool:
    """Recompute the rate and the end; returns whether they changed."""
    out, into = flow.out, flow.into
    assert out is not None and into is not None
    rate = out.share  # not `min`, which compiled code calls as any function
    if into.share < rate:
        rate = into.share
    if flow.limit < rate:
        rate = flow.limit
    if rate == flow.rate:
        return False
    left = Fabric.left_bytes(flow, now)
    flow.left_bytes, flow.since_s, flow.rate = left, now, rate
    flow.end_s = now + left / rate
    return True


def _first(out: Link) -> Flow:
    """The flow that ends first; on ties, the lowest key."""
    first: Flow | None = None
    for flow in out.flows.values():
        if first is None or _ends_before(flow, first):
            first = flow
    assert first is not None
    return first


def _ends_before(flow: Flow, other: Flow) -> bool:
    return flow.end_s < other.end_s or (flow.end_s == other.end_s and flow.key < other.key)
