"""The replicas that serve one model: who of them may take a request, who chooses, and who waits in front."""

from __future__ import annotations

from collections.abc import Sequence
from heapq import heapify, heappop, heappush

from headway.control.live import HELD, Live
from headway.core.errors import HeadwayError
from headway.core.policy import Learner, MovingOrdering, Ordering, Router
from headway.core.view import ReplicaView
from headway.observe import View


class Member:
    """One replica of a service, as control knows it."""

    __slots__ = ("is_draining", "is_up", "max_num_waiting", "max_tokens", "view")

    def __init__(self, view: ReplicaView, max_tokens: int, max_num_waiting: int | None) -> None:
        self.view = view
        self.max_tokens = max_tokens
        """Longest request, prompt and output together, that the replica can hold."""
        self.max_num_waiting = max_num_waiting
        self.is_up = True
        self.is_draining = False

    def takes(self, tokens: int) -> bool:
        """It may be given a request of so many tokens, room or not."""
        return self.is_up and not self.is_draining and tokens <= self.max_tokens


class Service:
    """One model's replicas, router and hold queue."""

    def __init__(
        self,
        model: str,
        members: Sequence[Member],
        router: Router,
        hold_ordering: Ordering,
        window: int | None,
        view: View,
    ) -> None:
        self.model = model
        self.members = list(members)
        self.router = router
        self.learners: list[Learner] = []
        """Policies that hear of every end."""
        self.hear(router)
        self.ordering = hold_ordering
        self.window = window
        self.view = view
        self.line: list[tuple[object, int, Live]] = []
        """Who is held back, a heap by rank; empty = nobody."""
        self.refresh()

    def hear(self, policy: object) -> None:
        """Let a policy hear of every end, if it wants to."""
        if isinstance(policy, Learner):
            self.learners.append(policy)

    def refresh(self) -> None:
        """Members came, went up or down, or drain. While all that are up drain, they are all that there is."""
        up = [member for member in self.members if member.is_up]
        self._open = [member for member in up if not member.is_draining] or up
        self._up: Sequence[ReplicaView] = [member.view for member in self._open]
        self._up_ids = {view.id for view in self._up}
        self._longest_tokens = max(member.max_tokens for member in self.members)
        self._shortest_tokens = min(member.max_tokens for member in self.members)
        self._limited = self.window is not None or any(m.max_num_waiting is not None for m in self.members)

    def member(self, replica: int) -> Member | None:
        """The member that this replica is."""
        return next((member for member in self.members if member.view.id == replica), None)

    def _candidates(self, tokens: int) -> Sequence[ReplicaView]:
        """Replicas that may be given a request of so many tokens now."""
        return [member.view for member in self._open if tokens <= member.max_tokens and self._is_open(member)]

    def _is_open(self, member: Member) -> bool:
        view = member.view
        if self.window is not None and view.num_in_flight >= self.window:
            return False
        return member.max_num_waiting is None or view.num_waiting < member.max_num_waiting

    def refuses(self, live: Live) -> bool:
        """The request fits no replica, or all that are up have full queues and nothing is held in front of them."""
        return not self.fits(live) or (self.window is None and bool(self._up))

    def fits(self, live: Live) -> bool:
        """Some replica can hold the request, when it has room."""
        return live.prompt_tokens + live.output_tokens <= self._longest_tokens

    def choose(self, live: Live, now: float) -> int | None:
        """Ask the router; None if no replica can take the request now."""
        tokens = live.prompt_tokens + live.output_tokens
        candidates, ids = self._up, self._up_ids
        if self._limited or tokens > self._shortest_tokens:
            candidates = self._candidates(tokens)
            ids = {candidate.id for candidate in candidates}
        if not candidates:
            return None
        view = self.view
        view.now = now
        view.replicas = candidates
        replica = self.router.route(live, view).replica
        if replica not in ids:
            name = type(self.router).__name__
            raise HeadwayError(f"router {name} chose replica {replica!r}; it was offered {sorted(ids)}")
        return replica

    # The hold queue.

    def hold(self, live: Live, now: float) -> None:
        """Keep a request back."""
        live.stage = HELD
        live.rank = self.ordering.rank(live, now)
        heappush(self.line, (live.rank, live.id, live))

    def first(self, now: float) -> Live | None:
        """Who is first in line."""
        if self.line and isinstance(self.ordering, MovingOrdering):
            lives = [entry[2] for entry in self.line]
            self.line = [(self.ordering.rank(live, now), live.id, live) for live in lives]
            heapify(self.line)
        while self.line:
            live = self.line[0][2]
            if live.stage is HELD:
                return live
            heappop(self.line)
        return None

    def hopes(self, now: float) -> bool:
        """A replica that is up could hold who is first in line, if it had room."""
        live = self.first(now)
        if live is None:
            return False
        tokens = live.prompt_tokens + live.output_tokens
        return any(tokens <= member.max_tokens for member in self._open)

    def unhold(self) -> None:
        """The first in line is placed."""
        heappop(self.line)

    def held(self) -> list[Live]:
        """Who is held back."""
        return [entry[2] for entry in self.line if entry[2].stage is HELD]
