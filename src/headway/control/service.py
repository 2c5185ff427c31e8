"""The replicas that serve one model: who of them may take a request, who chooses, and who waits in front."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from heapq import heapify, heappop, heappush

from headway.control.live import HELD, Live
from headway.control.observe import View
from headway.core.errors import HeadwayError
from headway.core.fleet import Role
from headway.core.policy import Learner, MovingOrdering, Ordering, Router
from headway.core.view import ReplicaView


class Member:
    """One replica of a service, as control knows it."""

    __slots__ = (
        "deployment", "is_draining", "is_gone", "is_half", "is_up", "max_num_waiting", "max_tokens", "num_switches",
        "role", "view",
    )  # fmt: skip

    def __init__(self, view: ReplicaView, max_tokens: int, max_num_waiting: int | None, deployment: str = "") -> None:
        self.view = view
        self.role = view.role
        """What it is for while its combo has somebody for each phase."""
        self.deployment = deployment
        """The pool or kind of combo that it is one of."""
        self.max_tokens = max_tokens
        """Longest request, prompt and output together, that the replica can hold."""
        self.max_num_waiting = max_num_waiting
        self.is_up = True
        self.is_draining = False
        self.is_gone = False
        """It was given back, and does not return."""
        self.num_switches = 0
        """Changes of its role that are under way; it takes nothing new meanwhile."""
        self.is_half = False
        """Its engine was started for one phase: it does nothing unless its combo has somebody for the other."""

    @property
    def is_ready(self) -> bool:
        """It is up, and what it is for does not change just now."""
        return self.is_up and not self.num_switches

    def takes(self, tokens: int) -> bool:
        """It may be given a request of so many tokens, room or not."""
        return self.is_ready and not self.is_draining and tokens <= self.max_tokens


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
        self._router_name = type(router).__name__
        self.pairs = bool(getattr(router, "pairs", False))
        """The router says who decodes; else that is seen to when the prompt is computed."""
        self.learners: list[Learner] = []
        """Policies that hear of every end."""
        self.hear(router)
        self.ordering = hold_ordering
        self.window = window
        self.view = view
        self.line: list[tuple[object, int, Live]] = []
        """Who is held back, a heap by rank; empty = nobody."""
        self._longest_tokens = self._shortest_tokens = sys.maxsize
        """As long as there has been no replica, and none is announced, nobody knows what fits."""
        self.refresh()

    def hear(self, policy: object) -> None:
        """Let a policy hear of every end, if it wants to."""
        if isinstance(policy, Learner):
            self.learners.append(policy)

    def refresh(self) -> None:
        """Members came, went up or down, or drain. While all that are up drain, they are all that there is."""
        up = _paired([member for member in self.members if member.is_ready])
        self._has_roles = any(member.view.role != "mixed" for member in up)
        self._has_halves = any(member.is_half for member in up)
        self._all_open = _paired([member for member in up if not member.is_draining]) or up
        self._open = self._all_open
        if self._has_roles and not self.pairs:
            self._open = [member for member in self._open if member.view.role != "decode"] or self._open
        self._up: Sequence[ReplicaView] = [member.view for member in self._open]
        self._up_ids = {view.id for view in self._up}
        self._by_id = {member.view.id: member for member in self.members}
        if self.members:
            self._longest_tokens = max(self._limit(member) for member in self.members)
            self._shortest_tokens = min(member.max_tokens for member in self.members)
        self._limited = self.window is not None or any(m.max_num_waiting is not None for m in self.members)

    def _limit(self, member: Member) -> int:
        """The longest request that it can hold, of a half with the best of the others."""
        if not member.is_half:
            return member.max_tokens
        others = [m.max_tokens for m in self.members if m.view.combo == member.view.combo and m.role != member.role]
        return min(member.max_tokens, max(others, default=member.max_tokens))

    @property
    def any_up(self) -> bool:
        """Something is up that can do requests."""
        return bool(_paired([member for member in self.members if member.is_up]))

    def member(self, replica: int) -> Member | None:
        """The member that this replica is."""
        return self._by_id.get(replica)

    def _candidates(self, tokens: int) -> Sequence[ReplicaView]:
        """Replicas that may be given a request of so many tokens now."""
        able = [member for member in self._able(tokens) if self._is_open(member)]
        if self._has_halves:
            pairs = _paired([m for m in self._all_open if tokens <= m.max_tokens and self._is_open(m)])
            able = [member for member in able if member in pairs]
        return [member.view for member in able]

    def _able(self, tokens: int) -> Sequence[Member]:
        """Who can hold so many tokens; one that decodes is as good as another where none that prefills can."""
        able = [member for member in self._open if tokens <= member.max_tokens]
        return able or [member for member in self._all_open if tokens <= member.max_tokens]

    def _is_open(self, member: Member) -> bool:
        view = member.view
        if self.window is not None and view.num_in_flight >= self.window:
            return False
        return member.max_num_waiting is None or view.num_waiting < member.max_num_waiting

    def refuses(self, live: Live) -> bool:
        """The request fits no replica, or all that are up have full queues and nothing is held in front of them."""
        return not self.fits(live) or (self.window is None and bool(self._up))

    def announce(self, max_tokens: int) -> None:
        """A replica that can hold so many tokens will come; until there is one, no more than that fits."""
        if not self.members:
            known = 0 if self._longest_tokens == sys.maxsize else self._longest_tokens
            self._longest_tokens = max(known, max_tokens)

    @property
    def longest_tokens(self) -> int:
        """Prompt and output of the longest request that some replica can hold, or could when there last was one."""
        return self._longest_tokens

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
        if live.sent_to and (there := [replica for replica in candidates if replica.region == live.sent_to]):
            candidates, ids = there, {replica.id for replica in there}
        if not candidates:
            return None
        view = self.view
        view.now = now
        view.replicas = candidates
        placement = self.router.route(live, view)
        replica = placement.replica
        decode = placement.decode if self.pairs else None
        if replica not in ids or (decode is not None and decode not in self._by_id):
            name = self._router_name
            chosen = replica if replica not in ids else decode
            raise HeadwayError(f"router {name} chose replica {chosen!r}; it was offered {sorted(ids)}")
        if self._has_roles:
            live.decode = -1 if decode is None or decode == replica else decode
            first = self._by_id[replica]
            if first.is_half and first.view.role != "prefill":
                what = "alone, whose engine does one phase only"
                raise HeadwayError(f"router {self._router_name} has a request done by replica {replica} {what}")
            if first.view.role == "prefill" and (not self.pairs or (first.is_half and live.decode < 0)):
                live.decode = self.decoder(live, replica)
        else:
            live.decode = -1
        return replica

    def decoder(self, live: Live, replica: int) -> int:
        """The least loaded replica that decodes what this one prefills; -1 if there is none."""
        tokens, combo = live.prompt_tokens + live.output_tokens, self._by_id[replica].view.combo
        there = [m for m in self.members if m.view.combo == combo and m.view.role != "prefill"]
        able = [m.view for m in there if m.takes(tokens)]
        if not able and self._by_id[replica].is_half:  # while all that are up drain, they are all that there is
            able = [m.view for m in there if m.is_ready and tokens <= m.max_tokens]
        if not able:
            return -1
        return min(able, key=_load).id

    def cover(self) -> dict[int, Role]:
        """Who has to take on another role, as a combo has lost, or has again, all that prefill or all that decode."""
        changes: dict[int, Role] = {}
        split = [m for m in self.members if not m.is_half and (m.role != "mixed" or m.view.role != "mixed")]
        for combo in sorted({m.view.combo for m in split}):
            up = [m for m in self.members if m.view.combo == combo and m.is_up]
            ready = [m for m in up if m.is_ready]
            whole = any(m.role != "decode" for m in ready) and any(m.role != "prefill" for m in ready)
            for member in up:
                role: Role = member.role if whole else "mixed"
                if role != member.view.role:
                    changes[member.view.id] = role
        return changes

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
        return bool(self._able(live.prompt_tokens + live.output_tokens))

    def unhold(self) -> None:
        """The first in line is placed."""
        heappop(self.line)

    def held(self) -> list[Live]:
        """Who is held back."""
        return [entry[2] for entry in self.line if entry[2].stage is HELD]


def _paired(members: list[Member]) -> list[Member]:
    """All but halves whose combos have nobody for the other phase among these."""
    if not any(member.is_half for member in members):
        return members
    there = {(member.view.combo, member.view.role) for member in members}
    whole = {combo for combo, _ in there if {(combo, "prefill"), (combo, "decode")} <= there}
    return [member for member in members if not member.is_half or member.view.combo in whole]


def _load(replica: ReplicaView) -> tuple[int, int]:
    return replica.num_in_flight + replica.num_arriving, replica.id
