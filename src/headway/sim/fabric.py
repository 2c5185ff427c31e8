"""The network between replicas: flows that share the capacity of both their ends.

A flow gets an equal share of its source's outgoing capacity and of its target's incoming capacity, whichever is less.
Capacity that a flow leaves unused because its other end is slower is not given to other flows.
"""

from __future__ import annotations

from collections.abc import Callable
from math import inf
from typing import Any

from headway.sim.kernel import COMMAND, Kernel

Done = Callable[[float], None]


class Flow:
    """A transfer of bytes from one replica to another."""

    __slots__ = ("done", "key", "left_bytes", "limit", "rate", "since_s", "source", "target", "version")

    def __init__(self, key: int, source: int, target: int, num_bytes: float, limit: float, done: Done) -> None:
        self.key, self.source, self.target = key, source, target
        self.left_bytes = num_bytes
        self.limit = limit
        self.rate = 0.0
        self.since_s = 0.0
        self.version = 0
        self.done = done


class Fabric:
    """All flows. `capacity(replica)` is in bytes per second, each way; every flow begins after `latency_s`."""

    def __init__(self, kernel: Kernel, capacity: Callable[[int], float], latency_s: float) -> None:
        self._kernel = kernel
        self._capacity = capacity
        self._latency_s = latency_s
        self._out: dict[int, dict[int, Flow]] = {}
        self._in: dict[int, dict[int, Flow]] = {}

    def send(
        self, key: int, source: int, target: int, num_bytes: float, now: float, done: Done, limit: float = inf
    ) -> Flow:
        """Begin a flow of at most `limit` bytes per second; `done(time_s)` is called when all bytes have arrived.

        `key` is unique among the present flows.
        """
        flow = Flow(key, source, target, num_bytes, limit, done)
        self._kernel.at(now + self._latency_s, COMMAND, key, self._begin, flow)
        return flow

    def share(self, source: int, target: int, limit: float = inf) -> float:
        """Bytes per second of one more flow."""
        out, into = len(self._out.get(source, ())) + 1, len(self._in.get(target, ())) + 1
        return min(self._capacity(source) / out, self._capacity(target) / into, limit)

    @staticmethod
    def left_bytes(flow: Flow, now: float) -> float:
        """Bytes that have not arrived yet."""
        return max(flow.left_bytes - flow.rate * (now - flow.since_s), 0.0)

    def stop(self, flow: Flow, now: float) -> None:
        """End a flow without sending the rest."""
        flow.version = -1
        if self._out.get(flow.source, {}).pop(flow.key, None) is not None:
            del self._in[flow.target][flow.key]
            self._share(flow.source, flow.target, now)

    def _begin(self, now: float, flow: Flow) -> None:
        if flow.version < 0:
            return
        flow.since_s = now
        self._out.setdefault(flow.source, {})[flow.key] = flow
        self._in.setdefault(flow.target, {})[flow.key] = flow
        self._share(flow.source, flow.target, now)

    def _end(self, now: float, timed: Any) -> None:
        flow, version = timed
        if flow.version != version:
            return
        self.stop(flow, now)
        flow.done(now)

    def _share(self, source: int, target: int, now: float) -> None:
        """Recompute the rates and ends of all flows of two replicas after one of their flows began or ended."""
        for key, flow in sorted((self._out.get(source, {}) | self._in.get(target, {})).items()):
            out, into = self._out[flow.source], self._in[flow.target]
            rate = min(self._capacity(flow.source) / len(out), self._capacity(flow.target) / len(into), flow.limit)
            if rate == flow.rate:
                continue
            flow.left_bytes = self.left_bytes(flow, now)
            flow.since_s, flow.rate = now, rate
            flow.version += 1
            self._kernel.at(now + flow.left_bytes / rate, COMMAND, key, self._end, (flow, flow.version))
