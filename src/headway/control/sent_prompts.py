"""The prompt tokens at a service's replicas, by control's own counts, which are never stale."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from math import inf

from headway.control.live import Live
from headway.core.view import ReplicaView


class SentTo:
    """Prompt tokens at one replica. `Live.sent_to` is this object while the request is there."""

    __slots__ = ("all", "unstarted", "waiting")

    def __init__(self) -> None:
        self.all = 0
        self.waiting = 0
        """Prompt tokens of requests without a first token."""
        self.unstarted = 0
        """Prompt tokens of streamed requests without a first token. Unstreamed requests are left out, because they may
        have started unnoticed."""


class SentPrompts:
    """Selects replicas by the prompts already sent to them. For a request of a share that has its fair part: the
    replicas with room. For other requests: the replicas that start the request soonest.

    Engines start requests in order of arrival, so every request that has been sent and has not started delays all
    later requests, of any tenant. A replica has no room while its requests without a first token have `window_tokens`
    prompt tokens, or while its free KV cache is below `headroom` (a share of the cache). Requests without room wait
    in the hold queue, which is fair. A replica without unstarted requests gets at least one request of any length.
    """

    def __init__(self, window_tokens: int | None, headroom: float) -> None:
        self._window_tokens = inf if window_tokens is None else window_tokens
        self._most_kv, self._most_seen_kv = 1 - headroom, 1 - 2 * headroom
        self._at: defaultdict[int, SentTo] = defaultdict(SentTo)
        """Keyed by replica id."""
        self._elsewhere: dict[int, tuple[int, int]] = {}
        """Maps each replica to the waiting and unstarted tokens that other schedulers have sent."""

    # Events.

    def set_elsewhere(self, replica: int, all_tokens: int, unstarted_tokens: int) -> None:
        """Set the counts that the fleet's other schedulers last reported for a replica."""
        before_all, before_unstarted = self._elsewhere.get(replica, (0, 0))
        at = self._at[replica]
        at.all += all_tokens - before_all
        at.waiting += unstarted_tokens - before_unstarted
        at.unstarted += unstarted_tokens - before_unstarted
        self._elsewhere[replica] = all_tokens, unstarted_tokens

    def add(self, live: Live, replica: int) -> None:
        """A request is sent to a replica, for the first time or again."""
        if live.sent_to is not None:
            self.discard(live)
        live.sent_to = at = self._at[replica]
        live.sent_tokens = live.prompt_tokens
        # Tokens that were already generated are computed again with the prompt.
        live.unstarted_tokens = tokens = live.prompt_tokens + live.generated_tokens
        at.all += live.sent_tokens
        at.waiting += tokens
        if live.is_streamed:
            at.unstarted += tokens

    @staticmethod
    def start(live: Live) -> None:
        """The prompt of a request is computed. Repeated calls have no effect."""
        at, tokens = live.sent_to, live.unstarted_tokens
        if at is not None and tokens:
            live.unstarted_tokens = 0
            at.waiting -= tokens
            if live.is_streamed:
                at.unstarted -= tokens

    def move(self, live: Live, replica: int) -> None:
        """A request moves to another replica."""
        if live.sent_to is not None:
            has_started = not live.unstarted_tokens
            self.add(live, replica)
            if has_started:
                self.start(live)

    def discard(self, live: Live) -> None:
        """A request has left its replica. Repeated calls have no effect."""
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
        """Maximum of unstarted prompt tokens at a replica, or infinity.

        It is infinite if a replica has `window` requests, or may lack room for this request in a KV cache of
        `kv_tokens`. `has_room` decides exactly, but takes several times as long.
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
        """Whether the replica may be sent a request of a share that has its fair part."""
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
        # Control's own count ignores shared prefixes, so the engine's metric must confirm the count. The metric may be
        # old, so it decides only beyond twice the headroom.
        return replica.kv_blocks_used <= replica.kv_blocks_total * self._most_seen_kv

    def kv_excess(self, replica: ReplicaView) -> float:
        """KV cache tokens above the limit of the cache size minus half the headroom, by control's count, if the
        engine's metric agrees."""
        tokens = replica.kv_blocks_total * replica.block_size_tokens
        excess = self._at[replica.id].all + _kv_tokens(replica) - tokens * (1 + self._most_kv) / 2
        if excess > 0 and replica.kv_blocks_used <= replica.kv_blocks_total * self._most_seen_kv:
            return 0.0
        return excess

    def soonest(self, replicas: Sequence[ReplicaView], live: Live) -> Sequence[ReplicaView]:
        """The replicas that may start the request soonest: a replica is left out if the request would surely start
        later there than at another replica of the same pool.

        A later start is certain if the prompt tokens before the request exceed those at the other replica plus the
        request's own, even if the first replica has the whole prompt cached.
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
    """KV cache tokens besides prompts; on average, each request's last block is half full."""
    return replica.tokens_generated + 0.5 * replica.num_in_flight * replica.block_size_tokens
