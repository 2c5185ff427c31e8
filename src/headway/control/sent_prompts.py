"""The prompts at a service's replicas, by control's own counts. Unlike an engine's metrics, these are never stale."""

from __future__ import annotations

from collections.abc import Sequence
from math import inf

from headway.control.live import Live
from headway.core.view import ReplicaView


class _AtReplica:
    """Prompt tokens at one replica."""

    __slots__ = ("all", "unseen", "unstarted")

    def __init__(self) -> None:
        self.all = 0
        self.unstarted = 0
        """Of requests whose first token is not out."""
        self.unseen = 0
        """Of requests whose first token comes with the last one, so that nobody sees whether they have started."""


class _Sent:
    """One request at a replica."""

    __slots__ = ("at", "has_started", "is_streamed", "tokens")

    def __init__(self, at: _AtReplica, tokens: int, is_streamed: bool) -> None:
        self.at, self.tokens, self.is_streamed, self.has_started = at, tokens, is_streamed, False


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
        self._at: dict[int, _AtReplica] = {}
        """By replica."""
        self._sent: dict[int, _Sent] = {}
        """By request."""

    # Events.

    def add(self, live: Live, replica: int) -> None:
        """A request is sent to a replica, for the first time or anew."""
        self.discard(live)
        at = self._at.get(replica)
        if at is None:
            at = self._at[replica] = _AtReplica()
        sent = self._sent[live.id] = _Sent(at, live.prompt_tokens, live.is_streamed)
        at.all += sent.tokens
        if sent.is_streamed:
            at.unstarted += sent.tokens
        else:
            at.unseen += sent.tokens

    def start(self, live: Live) -> None:
        """The prompt of a request is computed. Later calls do nothing."""
        sent = self._sent.get(live.id)
        if sent is None or sent.has_started:
            return
        sent.has_started = True
        if sent.is_streamed:
            sent.at.unstarted -= sent.tokens
        else:
            sent.at.unseen -= sent.tokens

    def move(self, live: Live, replica: int) -> None:
        """A request goes on at another replica."""
        sent = self._sent.get(live.id)
        if sent is not None:
            has_started = sent.has_started
            self.add(live, replica)
            if has_started:
                self.start(live)

    def discard(self, live: Live) -> None:
        """A request has left its replica. Later calls do nothing."""
        if live.id in self._sent:
            self.start(live)
            sent = self._sent.pop(live.id)
            sent.at.all -= sent.tokens

    # Room.

    def has_room(self, replica: ReplicaView, live: Live) -> bool:
        """Whether the replica may be sent a request of a share that has its part."""
        at = self._at.get(replica.id)
        if at is None or not replica.num_in_flight:
            return True
        unstarted = at.unstarted
        if at.unseen and replica.num_waiting:
            unstarted += at.unseen
        if unstarted and unstarted + live.prompt_tokens > self._window_tokens:
            return False
        return not self._is_full(replica, at.all + live.prompt_tokens)

    def _is_full(self, replica: ReplicaView, prompt_tokens: int) -> bool:
        """Whether so many prompt tokens leave less than the headroom of the KV cache free.

        Two counts must say so. Control's own count ignores that prompts share prefixes. The engine's may be old, so it
        decides from twice the headroom on.
        """
        room_tokens = replica.kv_blocks_total * replica.block_size_tokens
        if prompt_tokens + replica.tokens_generated <= room_tokens * self._most_kv:
            return False
        return replica.kv_blocks_used > replica.kv_blocks_total * self._most_seen_kv

    def soonest(self, replicas: Sequence[ReplicaView], live: Live) -> Sequence[ReplicaView]:
        """The replicas without those at which the request would start later than at another of their pool.

        That is certain where more prompt tokens are to be computed before the request's own than at the other one with
        its own, even if the first has all of its prompt in a prefix cache.
        """
        at = self._at
        unstarted = [at[replica.id].unstarted if replica.id in at else 0 for replica in replicas]
        if max(unstarted) <= live.prompt_tokens:
            return replicas
        least: dict[str, int] = {}
        for replica, tokens in zip(replicas, unstarted, strict=True):
            least[replica.pool] = min(tokens, least.get(replica.pool, tokens))
        most = live.prompt_tokens
        return [each for each, tokens in zip(replicas, unstarted, strict=True) if tokens <= least[each.pool] + most]
