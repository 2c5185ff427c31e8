"""Preble's E2: uses a cached prefix, or explores another replica."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from headway.core.decision import Placement
from headway.core.record import Ended
from headway.core.view import FleetView, ReplicaView, RequestView
from headway.policies.arguments import require_above, require_at_least
from headway.policies.routing.work_left import MeanOutput, uncached_tokens


class PrebleRouter:
    """The replica with the longest cached prefix or, if less than half of the prompt is cached, the replica with the
    lowest cost.

    *Exploit*: if the longest cached prefix is longer than the rest of the prompt, the request goes to the least loaded
    of the replicas with that prefix, unless its load is above `imbalance` times the lightest load of all replicas; then
    to the lightest replica. *Explore*: otherwise it goes to the replica with the lowest cost. The cost sums the
    replica's load, the request's uncached tokens, and the tokens that these evict, weighted with the share of prompt
    tokens that the replica has served from its cache.

    The load of a replica is the work assigned to it in the last `window_s`: uncached prompt tokens plus `decode_weight`
    times output tokens, which are assumed to be the mean of finished requests. The paper takes both times from a
    profile. Tokens are evicted when a request has more uncached tokens than the replica has free blocks. Among equals,
    the lowest id wins. Source: Preble (Srivatsa et al., ICLR 2025), algorithm E2, with a window of three minutes.
    """

    def __init__(self, window_s: float = 180.0, imbalance: float = 2.0, decode_weight: float = 1.0) -> None:
        require_above(0, window_s=window_s)
        require_at_least(1, imbalance=imbalance)
        require_at_least(0, decode_weight=decode_weight)
        self._window_s, self._imbalance, self._decode_weight = window_s, imbalance, decode_weight
        self._placed: deque[tuple[float, int, float, int, int]] = deque()
        """Requests placed in the window, oldest first: (time, replica, work, prompt tokens, cached tokens)."""
        self._work: dict[int, float] = {}
        self._prompt_tokens: dict[int, int] = {}
        self._cached_tokens: dict[int, int] = {}
        """Sums of cached tokens over the window, by replica."""
        self._output = MeanOutput()

    def route(self, request: RequestView, view: FleetView) -> Placement:
        self._forget(view.now - self._window_s)
        replicas = view.replicas
        uncached = [uncached_tokens(request, replica) for replica in replicas]
        tokens = request.prompt_tokens + request.generated_tokens
        longest = tokens - min(uncached)
        if longest > tokens - longest:
            chosen = self._exploit(replicas, uncached)
        else:
            chosen = min(range(len(replicas)), key=lambda i: (self._cost(replicas[i], uncached[i]), replicas[i].id))
        replica = replicas[chosen].id
        self._place(view.now, replica, uncached[chosen], tokens)
        return Placement(replica)

    def _exploit(self, replicas: Sequence[ReplicaView], uncached: Sequence[int]) -> int:
        loads = [self._work.get(replica.id, 0.0) for replica in replicas]
        least = min(uncached)
        holders = [i for i, tokens in enumerate(uncached) if tokens == least]
        chosen = min(holders, key=lambda i: (loads[i], replicas[i].id))
        lightest = min(range(len(replicas)), key=lambda i: (loads[i], replicas[i].id))
        # An idle fleet counts as balanced: a replica may be ahead by one request of this size.
        slack = least + self._decode_weight * self._output.tokens
        return lightest if loads[chosen] > self._imbalance * loads[lightest] + slack else chosen

    def _cost(self, replica: ReplicaView, uncached: int) -> float:
        id = replica.id
        free = (replica.kv_blocks_total - replica.kv_blocks_used) * replica.block_size_tokens
        hit_rate = self._cached_tokens.get(id, 0) / max(self._prompt_tokens.get(id, 0), 1)
        return self._work.get(id, 0.0) + uncached + max(0, uncached - free) * hit_rate

    def _place(self, now: float, replica: int, uncached: int, tokens: int) -> None:
        work = uncached + self._decode_weight * self._output.tokens
        self._add(replica, work, tokens, tokens - uncached)
        self._placed.append((now, replica, work, tokens, tokens - uncached))

    def _forget(self, before_s: float) -> None:
        while self._placed and self._placed[0][0] < before_s:
            _, replica, work, tokens, cached = self._placed.popleft()
            self._add(replica, -work, -tokens, -cached)
            if not self._prompt_tokens[replica]:
                del self._work[replica], self._prompt_tokens[replica], self._cached_tokens[replica]

    def _add(self, replica: int, work: float, tokens: int, cached: int) -> None:
        self._work[replica] = self._work.get(replica, 0.0) + work
        self._prompt_tokens[replica] = self._prompt_tokens.get(replica, 0) + tokens
        self._cached_tokens[replica] = self._cached_tokens.get(replica, 0) + cached

    def learn(self, record: Ended) -> None:
        self._output.learn(record)
