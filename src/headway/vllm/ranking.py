"""An ordering over the requests of one engine: ranks, turns, quanta, and the fallback when the ordering fails.

The rules equal those of the simulator's replica (`sim.batch`, `sim.replica`). A *tick* is an iteration in which each
decoding request gained a token. A request that uses up its quantum, or changes queues, begins a new turn at that tick.
The scheduler calls `begin` before each decision and `gained` after each iteration; between two calls of `begin` a rank
is computed once. If the ordering raises an error, or returns ranks that cannot be compared, `fcfs` replaces it
permanently, because a policy must not stop an engine.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator
from heapq import heapify, heappop, heappush
from math import inf
from operator import itemgetter
from typing import Any

from headway.core.policy import MovingOrdering, Ordering, QueuedOrdering, SteppedOrdering
from headway.policies.ordering.fcfs import FcfsOrdering
from headway.vllm.request import EngineRequest, VllmRequest

NEVER = 1 << 62
"""A number of tokens larger than any request's."""


class Ranking:
    """The requests of one engine in the order of `ordering`."""

    def __init__(self, ordering: Ordering, name: str, on_failure: Callable[[str, Exception], None]) -> None:
        """`on_failure` is called with the ordering's name and the error, when `fcfs` replaces the ordering."""
        self._on_failure = on_failure
        self._num_requests = 0
        self._epoch = 0
        self.num_failures = 0
        self.version = 0
        """A number that increases when all ranks change at once."""
        self.now = 0.0
        self.tick = 0
        self._arrival_turn = 0
        """The tick at which the current iteration began. A request that arrives before the next decision arrived during
        this iteration."""
        self._use(ordering, name)

    def _use(self, ordering: Ordering, name: str) -> None:
        self.name = name
        self._ordering = ordering
        self._rank = ordering.rank
        self.preemptive = ordering.preemptive
        self._quantum = ordering.quantum
        self._moving = ordering if isinstance(ordering, MovingOrdering) else None
        self._stepped = ordering if isinstance(ordering, SteppedOrdering) else None
        self._queued = ordering if isinstance(ordering, QueuedOrdering) else None
        self.counts_tokens = self._quantum is not None or self._stepped is not None or self._queued is not None
        """Whether `gained` must be called."""
        self.version += 1

    def fail(self, error: Exception) -> None:
        """Continue as `fcfs`, so that an error of the ordering does not stop the engine."""
        name = self.name
        self.num_failures += 1
        self._use(FcfsOrdering(), "fcfs")
        self._epoch += 1
        self._on_failure(name, error)

    # Ranks.

    def begin(self, now: float) -> None:
        """Start a decision at `now` seconds."""
        self.now = now
        self._epoch += 1
        self._arrival_turn = self.tick

    def key(self, request: EngineRequest) -> tuple[Any, int]:
        """(the request's rank, its number among requests of equal rank)."""
        if request.epoch != self._epoch:
            try:
                rank = self._rank(request, self.now)
            except Exception as error:
                self.fail(error)
                rank = self._rank(request, self.now)
            request.key = rank, request.id
            request.epoch = self._epoch
        return request.key

    def ordered(self, requests: Iterable[VllmRequest], after: VllmRequest | None = None) -> list[VllmRequest]:
        """The requests ordered by rank. With `after`, only the requests that rank behind it."""
        requests = list(requests)
        while True:
            version, key = self.version, self.key
            try:
                keyed = [(key(request.headway), request) for request in requests]
                if after is not None:
                    first = key(after.headway)
                    keyed = [entry for entry in keyed if first < entry[0]]
                keyed.sort(key=itemgetter(0))
            except Exception as error:
                self.fail(error)
            if version == self.version:
                return [request for _, request in keyed]

    def behind(self, head: VllmRequest, in_order: list[VllmRequest]) -> list[VllmRequest]:
        """The requests of `in_order` that rank behind `head`; empty if the ordering fails."""
        version = self.version
        first = self.key(head.headway)
        try:
            at = bisect_right(in_order, first, key=lambda request: self.key(request.headway))
        except Exception as error:
            self.fail(error)
        return in_order[at:] if version == self.version else []

    def next_change_s(self, request: EngineRequest) -> float:
        """Time at which the rank of a waiting request changes by time alone; infinite = never."""
        if self._moving is None:
            return inf
        try:
            change_s = self._moving.next_change(request, self.now)
        except Exception as error:
            self.fail(error)
            return inf
        return inf if change_s is None else change_s

    # The life of a request.

    def join(self, view: EngineRequest) -> None:
        """The engine has received a request."""
        view.id = self._num_requests
        self._num_requests += 1
        view.turn = self._arrival_turn
        if self._queued is not None:
            view.last_phase = view.phase
            try:
                view.queue = self._queued.queue(view)
            except Exception as error:
                self.fail(error)

    def preempted(self, view: EngineRequest, is_late: bool) -> None:
        """A running request waits again. `is_late`: some of its tokens are still being generated."""
        view.quantum_start = -1
        view.tokens_before = view.generated_tokens
        view.is_late = is_late

    def gained(self, scheduled: Iterable[EngineRequest]) -> None:
        """An iteration of these requests has ended."""
        advances, changed = False, []
        by_phase = self._queued is not None
        for view in scheduled:
            generated = view.generated_tokens
            if view.quantum_start >= 0:
                advances = True
                if generated >= view.check_at or (by_phase and view.phase is not view.last_phase):
                    changed.append(view)
            elif generated > view.tokens_before:
                changed.append(view)
        self.tick += advances
        for view in changed:
            try:
                self._check(view)
            except Exception as error:
                self.fail(error)
                return

    def _check(self, view: EngineRequest) -> None:
        """Begin the request's next turn or quantum if it is due."""
        generated, quantum = view.generated_tokens, self._quantum
        view.tokens_before = generated
        if view.quantum_start < 0 and not view.is_late:
            view.quantum_start = generated - 1  # the prefill's token is the first of its quantum
        if 0 < view.turn_ends_at <= generated:
            view.turn = self.tick
        if self._queued is not None:
            view.last_phase = view.phase
            queue = self._queued.queue(view)
            if queue != view.queue:
                view.queue, view.turn = queue, self.tick
                view.quantum_start = -1 if view.is_late else generated
        if quantum is not None and 0 <= view.quantum_start <= generated - quantum:
            view.turn, view.quantum_start = self.tick, generated
        step = None if self._stepped is None else self._stepped.next_change_tokens(view)
        view.turn_ends_at = 0 if step is None else generated + step
        view.check_at = view.turn_ends_at or NEVER
        if quantum is not None:
            view.check_at = min(view.check_at, view.quantum_start + quantum)


class RankedQueue:
    """Waiting requests by rank: a `RequestQueue` for vLLM. Requests have no fixed place, so no request is prepended."""

    def __init__(self, ranking: Ranking) -> None:
        self._ranking = ranking
        self._version = ranking.version
        self._heap: list[tuple[Any, int, VllmRequest]] = []
        self._next_change_s = inf

    def refresh(self, is_stale: bool = False) -> None:
        """Recompute ranks that have changed with time; all ranks if `is_stale`."""
        if is_stale or self._version != self._ranking.version or self._next_change_s <= self._ranking.now:
            self._rebuild([entry[2] for entry in self._heap])

    def _rebuild(self, requests: list[VllmRequest]) -> None:
        ranking = self._ranking
        while True:
            self._version, self._next_change_s = ranking.version, inf
            heap = [self._entry(request) for request in requests]
            if self._version != ranking.version:
                continue
            try:
                heapify(heap)
            except Exception as error:
                ranking.fail(error)
                continue
            self._heap = heap
            return

    def _entry(self, request: VllmRequest) -> tuple[Any, int, VllmRequest]:
        view = request.headway
        change_s = self._ranking.next_change_s(view)
        if change_s < self._next_change_s:
            self._next_change_s = change_s
        return *self._ranking.key(view), request

    def add_request(self, request: VllmRequest) -> None:
        entry = self._entry(request)
        if self._version != self._ranking.version:
            self._rebuild([*(other[2] for other in self._heap), request])
            return
        try:
            heappush(self._heap, entry)
        except Exception as error:
            self._ranking.fail(error)
            requests = [other[2] for other in self._heap]  # the heap may or may not contain the request
            self._rebuild(requests if request in requests else [*requests, request])

    def pop_request(self) -> VllmRequest:
        self.refresh()
        head = self._heap[0][2]
        try:
            heappop(self._heap)
        except Exception as error:
            self._ranking.fail(error)
            self._rebuild([entry[2] for entry in self._heap if entry[2] is not head])
        return head

    def peek_request(self) -> VllmRequest:
        self.refresh()
        return self._heap[0][2]

    prepend_request = add_request

    def prepend_requests(self, requests: Iterable[VllmRequest]) -> None:
        for request in requests:
            self.add_request(request)

    def remove_request(self, request: VllmRequest) -> None:
        self.remove_requests([request])

    def remove_requests(self, requests: Iterable[VllmRequest]) -> None:
        gone = {id(request) for request in requests}
        left = [entry[2] for entry in self._heap if id(entry[2]) not in gone]
        if len(left) < len(self._heap):
            self._rebuild(left)

    def __bool__(self) -> bool:
        return bool(self._heap)

    def __len__(self) -> int:
        return len(self._heap)

    def __iter__(self) -> Iterator[VllmRequest]:
        """Iterate in order of rank. After the ordering has failed, in the last order before the failure."""
        return iter([entry[2] for entry in sorted(self._heap, key=lambda entry: entry[:2])])
