"""The prompts at a service's replicas, by control's own counts. Unlike an engine's metrics, these are never stale."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from math import inf

from headway.control.live import Live
from headway.core.view import ReplicaView


class SentTo:
    """Prompt tokens at one replica. `Live.sent_to` refers to it while the request is there."""

    __slots__ = ("all", "unstarted", "waiting")

    def __init__(self) -> None:
        self.all = 0
        self.waiting = 0
        """Of requests without a first token."""
        self.unstarted = 0
        """The part of these whose first token is seen when it is out. Those of the others may have started."""


class SentPrompts:
    """Which replicas have room for requests of shares that have their part, and which are soonest for the others.

    Engines start requests in order of arrival. What they were sent and have not started is in front of every later
    request, whoever sends it. So a replica gets no more while its requests without a first token have
    `window_tokens` prompt tokens, or while its KV cache is full but for `headroom` (a part of it): they wait in the
    hold queue, where the order is fair. A replica without such requests gets at least one, whatever its length.
    """

    def __init__(self, window_tokens: int | None, headroom: float) -> None:
        self._window_tokens = inf if window_tokens is None else window_tokens
        self._most_kv, self._most_seen_kv = 1 - headroom, 1 - 2 * headroom
        self._at: defaultdict[int, SentTo] = defaultdict(SentTo)
        """By replica."""
        self._elsewhere: dict[int, tuple[int, int]] = {}
        """What of these counts other schedulers have sent, by replica: `all` and `unstarted`."""

    # Events.

    def set_elsewhere(self, replica: int, all_tokens: int, unstarted_tokens: int) -> None:
        """What the fleet's other schedulers have at a replica, as they have told last."""
        before_all, before_unstarted = self._elsewhere.get(replica, (0, 0))
        at = self._at[replica]
        at.all += all_tokens - before_all
        at.waiting += unstarted_tokens - before_unstarted
        at.unstarted += unstarted_tokens - before_unstarted
        self._elsewhere[replica] = all_tokens, unstarted_tokens

    def add(self, live: Live, replica: int) -> None:
        """A request is sent to a replica, for the first time or anew."""
        if live.sent_to is not None:
            self.discard(live)
        live.sent_to = at = self._at[replica]
        live.sent_tokens = live.prompt_tokens
        # Tokens that are out already are computed again with the prompt.
        live.unstarted_tokens = tokens = live.prompt_tokens + live.generated_tokens
        at.all += live.sent_tokens
        at.waiting += tokens
        if live.is_streamed:
            at.unstarted += tokens

    @staticmethod
    def start(live: Live) -> None:
        """The prompt of a request is computed. Later calls do nothing."""
        at, tokens = live.sent_to, live.unstarted_tokens
        if at is not None and tokens:
            live.unstarted_tokens = 0
            at.waiting -= tokens
            if live.is_streamed:
                at.unstarted -= tokens

    def move(self, live: Live, replica: int) -> None:
        """A request goes on at another replica."""
        if live.sent_to is not None:
            has_started = not live.unstarted_tokens
            self.add(live, replica)
            if has_started:
                self.start(live)

    def discard(self, live: Live) -> None:
        """A request has left its replica. Later calls do nothing."""
        at = live.sent_to
        if at is not None:
            live.sent_to = None
            at.all -= live.sent_tokens
            if tokens := live.unstarted_tokens:
                live.unstarted_tokens = 0
                at.waiting -= tokens
                if live.is_streamed:
                    at.unstarted -= tokens

    # Room.

    def most_unstarted(self, replicas: Sequence[ReplicaView], window: int, kv_tokens: float, live: Live) -> float:
        """The most unstarted prompt tokens at a replica, or infinity.

        It is infinite if a replica has `window` requests, or may have no room for this request with a KV cache of
        `kv_tokens`. `has_room` decides that more closely, but takes several times as long.
        """
        sent_to, tokens, most = self._at, live.prompt_tokens + live.generated_tokens, 0
        most_waiting, most_all = self._window_tokens - tokens, kv_tokens * self._most_kv - tokens
        for replica in replicas:
            at = sent_to[replica.id]
            if at.waiting > most_waiting or replica.num_in_flight >= window or at.all + _kv_tokens(replica) > most_all:
                return inf
            if at.unstarted > most:
                most = at.unstarted
        return most

    def has_room(self, replica: ReplicaView, live: Live) -> bool:
        """Whether the replica may be sent a request of a share that has its part."""
        at = self._at[replica.id]
        if not at.all:
            return True
        tokens, unstarted = live.prompt_tokens + live.generated_tokens, at.unstarted
        if at.waiting + tokens > self._window_tokens:  # before the engine's metric, which takes longer
            if at.waiting > unstarted and replica.num_waiting:
                unstarted = at.waiting
            if unstarted and unstarted + tokens > self._window_tokens:
                return False
        most = replica.kv_blocks_total * replica.block_size_tokens * self._most_kv
        if at.all + tokens + _kv_tokens(replica) <= most or not replica.num_in_flight:
            return True
        # Control's own count ignores that prompts share prefixes, so the engine's must agree. That one may be old, so
        # it decides from twice the headroom on.
        return replica.kv_blocks_used <= replica.kv_blocks_total * self._most_seen_kv

    def kv_excess(self, replica: ReplicaView) -> float:
        """Tokens beyond all but half of the headroom in the KV cache: by control's count, if the engine's agrees."""
        tokens = replica.kv_blocks_total * replica.block_size_tokens
        excess = self._at[replica.id].all + _kv_tokens(replica) - tokens * (1 + self._most_kv) / 2
        if excess > 0 and replica.kv_blocks_used <= replica.kv_blocks_total * self._most_seen_kv:
            return 0.0
        return excess

    def soonest(self, replicas: Sequence[ReplicaView], live: Live) -> Sequence[ReplicaView]:
        """The replicas without those at which the request would start later than at another of their pool.

        That is certain where more prompt tokens are to be computed before the request's own than at the other one with
        its own, even if the first has all of its prompt in a prefix cache.
        """
        at, most = self._at, live.prompt_tokens
        unstarted = [at[replica.id].unstarted for replica in replicas]
        if max(unstarted) <= most:
            return replicas
        least: dict[str, int] = {}
        for replica, tokens in zip(replicas, unstarted, strict=True):
            least[replica.pool] = min(tokens, least.get(replica.pool, tokens))
        return [each for each, tokens in zip(replicas, unstarted, strict=True) if tokens <= least[each.pool] + most]


def _kv_tokens(replica: ReplicaView) -> float:
    """Tokens in the KV cache besides prompts. The last block of each request is half full in the mean."""
    return replica.tokens_generated + 0.5 * replica.num_in_flight * replica.block_size_tokens
