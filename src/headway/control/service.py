"""The replicas of one model: which replicas may take a request, which replica gets the request, and the hold
queue."""

from __future__ import annotations

import sys
from collections.abc import Collection, Sequence
from math import inf
from typing import Any

from headway.control.decisions import DecisionObserver
from headway.control.hold_queue import hold_queue, is_sharing
from headway.control.live import HELD, Live
from headway.control.observe import MutableFleetView
from headway.control.sent_prompts import SentPrompts
from headway.control.shadow import Shadow
from headway.core.errors import HeadwayError, unusable
from headway.core.fleet import Role
from headway.core.policy import Learner, Ordering, Router
from headway.core.record import Ended, Outcome
from headway.core.view import ReplicaView


class Member:
    """One replica of a service, as control sees it."""

    __slots__ = (
        "deployment", "is_draining", "is_gone", "is_single_phase", "is_unready", "is_up", "loras", "max_num_waiting",
        "max_tokens", "num_switches", "role", "view", "window",
    )  # fmt: skip

    def __init__(
        self,
        view: ReplicaView,
        max_tokens: int,
        max_num_waiting: int | None,
        deployment: str = "",
        loras: Collection[str] = (),
    ) -> None:
        self.view = view
        self.role = view.role
        """The intended role. `view.role` is `mixed` while the replica also covers a lost phase of its combo."""
        self.deployment = deployment
        """Name of the pool or combo that the replica belongs to."""
        self.max_tokens = max_tokens
        """The longest request that the replica can hold: prompt plus output tokens."""
        self.max_num_waiting = max_num_waiting
        self.loras: Collection[str] = loras
        """LoRA adapters that the replica can load."""
        self.window: int | None = None
        """Maximum requests at the replica, in addition to the service's window."""
        self.is_up = True
        self.is_draining = False
        self.is_unready = False
        """Whether the cluster reports the replica as not ready. An unready replica keeps its requests, and gets new
        requests only if no replica is ready."""
        self.is_gone = False
        """Released for good."""
        self.num_switches = 0
        """Number of role changes in progress. During a change, the replica takes no new request."""
        self.is_single_phase = False
        """Whether the engine was started for prefill only or decode only. It serves only while its combo has a
        replica for the other phase."""

    @property
    def is_ready(self) -> bool:
        """Whether the replica is up and not changing its role."""
        return self.is_up and not self.num_switches

    def can_serve(self, tokens: int, lora: str = "") -> bool:
        """Whether the replica could serve a request of this length and adapter, room aside."""
        is_open = self.is_ready and not self.is_draining and not self.is_unready and tokens <= self.max_tokens
        return is_open and (not lora or lora in self.loras)


class SlowStart:
    """A replica's return after an ejection: its share of the placements grows."""

    __slots__ = ("_credit", "_duration_s", "_start_s")
    _LEAST = 0.1

    def __init__(self, start_s: float, duration_s: float) -> None:
        self._start_s, self._duration_s = start_s, duration_s
        self._credit = 0.0

    def is_over(self, now: float) -> bool:
        return now >= self._start_s + self._duration_s

    def offers(self, now: float) -> bool:
        """Whether the replica is a candidate for this placement."""
        self._credit += max((now - self._start_s) / self._duration_s, self._LEAST)
        if self._credit < 1:
            return False
        self._credit -= 1
        return True


class _OpenMembers:
    """Members that may get new requests: the members that are up, and neither draining nor unready; if there are none,
    those that are not draining; if there are none, all that are up."""

    __slots__ = ("all", "has_roles", "has_single_phase", "ids", "start", "views")

    def __init__(self, members: Sequence[Member], names_decoder: bool) -> None:
        ready = _complete([member for member in members if member.is_ready])
        self.has_roles = any(member.view.role != "mixed" for member in ready)
        self.has_single_phase = any(member.is_single_phase for member in ready)
        staying = _complete([member for member in ready if not member.is_draining]) or ready
        self.all = _complete([member for member in staying if not member.is_unready]) or staying
        self.start = self.all
        """Members at which a request can start: all members except decode-only ones. If the router chooses decoders:
        all members."""
        if self.has_roles and not names_decoder:
            self.start = [member for member in self.all if member.view.role != "decode"] or self.all
        self.views: Sequence[ReplicaView] = [member.view for member in self.start]
        self.ids = {view.id for view in self.views}

    def fitting(self, tokens: int) -> Sequence[Member]:
        """Members that can hold a request of this length; decode members if no prefill member can."""
        able = [member for member in self.start if tokens <= member.max_tokens]
        return able or [member for member in self.all if tokens <= member.max_tokens]


class Service:
    """One model's replicas, router and hold queue."""

    def __init__(
        self,
        model: str,
        members: Sequence[Member],
        router: Router,
        hold_ordering: Ordering,
        window: int | None,
        view: MutableFleetView,
        observer: DecisionObserver | None = None,
        prompt_window: int | None = None,
    ) -> None:
        self.model = model
        self.members = list(members)
        self._slow_starts: dict[int, SlowStart] = {}
        """Keyed by replica id."""
        self.view = view
        self._observer = observer
        self.longest_tokens = self._shortest_tokens = sys.maxsize
        """Longest request, in prompt plus output tokens, that a member can hold, or that the last member could hold.
        Unlimited until a replica exists or is announced, because no length is known to be too long."""
        self.shadow: Shadow | None = None
        """A candidate's policies, which run in shadow, without effect."""
        self.use(router, hold_ordering, window, prompt_window)

    def use(self, router: Router, hold_ordering: Ordering, window: int | None, prompt_window: int | None) -> None:
        """Use these policies and an empty hold queue. From now on, only these policies learn."""
        self.router = router
        self.names_decoder = bool(getattr(router, "pairs", False))
        """Whether the router also chooses the decode replica; otherwise control chooses it after the prefill."""
        self.learners: list[Learner] = []
        """Policies that learn from every ended request."""
        self.add_learner(router)
        self.sharing = hold_ordering if is_sharing(hold_ordering) else None
        """The hold queue's ordering, if the ordering counts the service of all requests, including requests that were
        never held."""
        self.hold_ordering = hold_ordering
        if self.sharing is None:
            self.add_learner(hold_ordering)
        self.sent: SentPrompts | None = None
        """Counts of sent prompt tokens, if the hold queue shares service."""
        if self.sharing is not None:
            self.sent = SentPrompts(self.sharing.prompt_window or prompt_window, self.sharing.headroom)
        self.preemptions: Any = None
        """The object of `control.preemptions` or `control.kv_pressure` that pauses running requests; None: running
        requests are not paused."""
        self.window = window
        self.hold_queue = hold_queue(hold_ordering)
        if self.shadow is not None:
            self.follow(self.shadow)
        self.refresh()

    def follow(self, shadow: Shadow) -> None:
        """Run a candidate's policies in shadow."""
        self.shadow = shadow
        if shadow.learners:
            self.learners.append(shadow)

    def add_learner(self, policy: object) -> None:
        """Report ended requests to the policy if it is a `Learner`."""
        if hasattr(policy, "learn") and isinstance(policy, Learner):
            self.learners.append(policy)

    def teach(self, live: Live, end_s: float, outcome: Outcome) -> None:
        """Let policies learn from the end of a request or of its cascade stage."""
        first = live.first_token_s
        record = Ended(
            id=live.id,
            outcome=outcome,
            model=live.model,
            tier=live.tier,
            replica=live.replica,
            arrival_s=live.arrival_s,
            first_token_s=None if first != first else first,
            end_s=end_s,
            prompt_tokens=live.prompt_tokens,
            generated_tokens=live.generated_tokens,
            slo_ttft_s=live.slo_ttft_s,
            slo_tpot_s=live.slo_tpot_s,
            slo_e2e_s=live.slo_e2e_s,
            tenant=live.tenant,
            num_sequences=live.num_sequences,
        )
        for learner in self.learners:
            learner.learn(record)

    def refresh(self) -> None:
        """Recompute the values that depend on the members. Call it after adding, removing or changing one."""
        self._open = _OpenMembers(self.members, self.names_decoder)
        self._open_by_lora: dict[str, _OpenMembers] = {}
        self._by_id = {member.view.id: member for member in self.members}
        if self.members:
            self.longest_tokens = max(self._max_tokens(member) for member in self.members)
            self._shortest_tokens = min(member.max_tokens for member in self.members)
        self._has_window = self.window is not None or any(member.window is not None for member in self.members)
        has_own_limits = any(m.window is not None or m.max_num_waiting is not None for m in self.members)
        self._is_limited = self._has_window or has_own_limits
        self._has_window_only = not has_own_limits and self.window is not None
        self._shared_window: int | None = None
        """The window less its headroom, if requests are counted by share and no replica has its own limits."""
        if self._has_window_only and self.window is not None and self.sharing is not None:
            self._shared_window = self.window - int(self.sharing.headroom * self.window)
            kv_tokens = [member.view.kv_blocks_total * member.view.block_size_tokens for member in self.members]
            self._least_kv_tokens = min(kv_tokens, default=0)

    def _max_tokens(self, member: Member) -> int:
        """The longest request that a member can hold; for a single-phase member, with the best partner in its combo."""
        if not member.is_single_phase:
            return member.max_tokens
        partners = [m.max_tokens for m in self.members if m.view.combo == member.view.combo and m.role != member.role]
        return min(member.max_tokens, max(partners, default=member.max_tokens))

    @property
    def is_full(self) -> bool:
        """Whether all replicas at which a request can start have reached their window."""
        return not self._within_window(self._open.start, self.window)

    @property
    def any_up(self) -> bool:
        """Whether a serving replica is up."""
        return self.is_served_without(None)

    def is_served_without(self, exclude: int | None) -> bool:
        """Whether a serving replica other than `exclude` is up."""
        return bool(_complete([member for member in self.members if member.is_up and member.view.id != exclude]))

    def up_views(self) -> list[ReplicaView]:
        """Views of the replicas that are up. Draining replicas are included."""
        return [member.view for member in self.members if member.is_up]

    def member(self, replica: int) -> Member | None:
        """The member with this replica id; None if there is none."""
        return self._by_id.get(replica)

    def announce(self, max_tokens: int) -> None:
        """Expect a replica that can hold a request of this length. `fits` uses the length until there is a member."""
        if not self.members:
            known = 0 if self.longest_tokens == sys.maxsize else self.longest_tokens
            self.longest_tokens = max(known, max_tokens)

    def fits(self, live: Live) -> bool:
        """Whether some replica can hold the request, room aside."""
        return live.prompt_tokens + live.output_tokens <= self.longest_tokens

    # Placement.

    def choose(self, live: Live, now: float, exclude: int | None = None) -> int | None:
        """Ask the router for a replica other than `exclude`; None if no replica can take the request now."""
        tokens = live.prompt_tokens + live.output_tokens
        opened = self._open if exclude is None and not live.lora else self._opened(live.lora, exclude)
        candidates, ids = opened.views, opened.ids
        if self._is_limited or tokens > self._shortest_tokens:
            candidates = self._with_room(opened, tokens, live)
            if candidates is not opened.views:
                ids = {candidate.id for candidate in candidates}
        if live.release_region:
            candidates, ids = _in_region(candidates, ids, live.release_region)
        if live.allowed is not None:
            candidates = [candidate for candidate in candidates if candidate.id in live.allowed]
            ids = {candidate.id for candidate in candidates}
        if self._slow_starts:
            candidates, ids = self._without_slow(candidates, ids, now)
        if not candidates:
            return None
        view = self.view
        view.now = now
        view.replicas = candidates
        placement = self.router.route(live, view)
        try:
            replica = placement.replica
            decode = placement.decode if self.names_decoder else None
            is_wrong = replica not in ids or (decode is not None and decode not in self._by_id)
        except (AttributeError, TypeError):
            raise unusable(self.router, "route", placement, "a Placement, as in Placement(replica.id)") from None
        if is_wrong:
            name = type(self.router).__name__
            chosen = replica if replica not in ids else decode
            raise HeadwayError(f"router {name} chose replica {chosen!r}; it was offered {sorted(ids)}")
        beside = None if self.shadow is None else self.shadow.route(live, candidates, replica, now)
        if live.placed_s != live.placed_s:
            live.placed_s = now
        live.decode_replica = -1
        if opened.has_roles:
            self._set_decoder(live, replica, decode, exclude)
        if self._observer is not None:
            source = None if live.stage is HELD else self.member(live.replica)
            leaves = source is not None and source.is_draining
            self._observer.record_placement(live, placement, candidates, leaves, now, beside)
        return replica

    def compare_order(self, live: Live, now: float) -> None:
        """Compare `live`, the held request that goes first, with the candidate ordering's first held request."""
        if self.shadow is None:
            return
        first = self.shadow.first(live, self.hold_queue, now)
        if first is not None and first is not live and self._observer is not None:
            self._observer.record_shadow(live, f"ordering: request {self._observer.name(first)} goes first", now)

    def compare_admission(self, live: Live, is_held: bool, now: float) -> None:
        """Compare whether an arriving request is held with the decision of the candidate's admission policy."""
        if self.shadow is None:
            return
        held = self.shadow.holds(live, is_held)
        if held is not None and held != is_held and self._observer is not None:
            self._observer.record_shadow(live, f"admission: the request is {'held' if held else 'not held'}", now)

    def start_slowly(self, replica: int, now: float, duration_s: float) -> None:
        """Let a replica's share of the placements grow from a tenth to all over this time."""
        if duration_s > 0:
            self._slow_starts[replica] = SlowStart(now, duration_s)

    def _without_slow(
        self, candidates: Sequence[ReplicaView], ids: set[int], now: float
    ) -> tuple[Sequence[ReplicaView], set[int]]:
        """The candidates without the slow-starting replicas that skip this placement. All candidates if none would be
        left."""
        hidden = set()
        for replica, start in list(self._slow_starts.items()):
            if start.is_over(now):
                del self._slow_starts[replica]
            elif replica in ids and len(ids) > 1 and not start.offers(now):
                hidden.add(replica)
        if not hidden or not ids - hidden:
            return candidates, ids
        return [candidate for candidate in candidates if candidate.id not in hidden], ids - hidden

    def _opened(self, lora: str, exclude: int | None) -> _OpenMembers:
        """The members that may get new requests for an adapter ("" = the model itself), without `exclude`."""
        members = [m for m in self.members if m.view.id != exclude and (not lora or lora in m.loras)]
        if exclude is not None:
            return _OpenMembers(members, self.names_decoder)
        if not lora:
            return self._open
        if lora not in self._open_by_lora:
            self._open_by_lora[lora] = _OpenMembers(members, self.names_decoder)
        return self._open_by_lora[lora]

    def _with_room(self, opened: _OpenMembers, tokens: int, live: Live) -> Sequence[ReplicaView]:
        """Replicas with room for a request of this length now."""
        window, sharing, sent = self.window, self.sharing, self.sent
        shared_window = self._shared_window
        if (
            shared_window is not None
            and sharing is not None
            and sent is not None
            and tokens <= self._shortest_tokens
            and not opened.has_single_phase
        ):
            most = sent.most_unstarted(opened.views, shared_window, self._least_kv_tokens, live)
            if most <= live.prompt_tokens or (most < inf and not sharing.is_below_share(live)):
                return opened.views  # same result as the steps below, several times as fast
        fitting = opened.start if tokens <= self._shortest_tokens else opened.fitting(tokens)
        if sharing is None or sent is None or window is None:
            able = self._within_window(fitting, window)
        elif sharing.is_below_share(live):
            able = self._within_window(fitting, window)
            if len(able) > 1 and not opened.has_roles:
                return sent.soonest(_views(able, opened), live)
        else:
            window -= int(sharing.headroom * window)
            able = [m for m in self._within_window(fitting, window) if sent.has_room(m.view, live)]
        if opened.has_single_phase:
            complete = _complete(self._within_window([m for m in opened.all if tokens <= m.max_tokens], window))
            able = [member for member in able if member in complete]
        return _views(able, opened)

    def _within_window(self, members: Sequence[Member], window: int | None) -> list[Member]:
        """The members with fewer requests than this window and their own limits."""
        if self._has_window_only and window is not None:
            return [member for member in members if member.view.num_in_flight < window]
        return [member for member in members if self._has_room(member, window)]

    @staticmethod
    def _has_room(member: Member, window: int | None) -> bool:
        view = member.view
        if window is not None and view.num_in_flight >= window:
            return False
        if member.window is not None and view.num_in_flight >= member.window:
            return False
        return member.max_num_waiting is None or view.num_waiting < member.max_num_waiting

    def _set_decoder(self, live: Live, replica: int, decode: int | None, exclude: int | None) -> None:
        if decode is not None and decode != replica:
            live.decode_replica = decode
        first = self._by_id[replica]
        if first.is_single_phase and first.view.role != "prefill":
            name, what = type(self.router).__name__, "alone, whose engine does one phase only"
            raise HeadwayError(f"router {name} has a request done by replica {replica} {what}")
        is_open = not self.names_decoder or (first.is_single_phase and live.decode_replica < 0)
        if first.view.role == "prefill" and is_open:
            live.decode_replica = self.choose_decoder(live, replica, exclude)

    def choose_decoder(self, live: Live, replica: int, exclude: int | None = None) -> int:
        """The least loaded replica that can decode the prefill of `replica`; -1 if there is none."""
        tokens, first = live.prompt_tokens + live.output_tokens, self._by_id[replica]
        partners = [
            m
            for m in self.members
            if m.view.combo == first.view.combo and m.view.role != "prefill" and m.view.id != exclude
        ]
        if live.allowed is not None:
            partners = [m for m in partners if m.view.id in live.allowed]
        able = [m.view for m in partners if m.can_serve(tokens, live.lora)]
        if not able and first.is_single_phase:  # if all partners drain, they still serve
            has_lora = [m for m in partners if not live.lora or live.lora in m.loras]
            able = [m.view for m in has_lora if m.is_ready and tokens <= m.max_tokens]
        return min(able, key=_load).id if able else -1

    def why_rejected(self, live: Live, exclude: int | None = None) -> str:
        """The reason to reject a request that no replica can take now: the request fits no replica, its adapter is
        missing, or all queues are full and holding is off. Empty: the request is held."""
        if self.is_without_candidate(live):
            return "no replica that is up has its adapter" if live.allowed is None else "no replica of its subset is up"
        if not self.fits(live):
            return "it is longer than any replica can hold"
        is_full = not self._has_window and bool(self._opened(live.lora, exclude).views)
        return "all queues are full" if is_full else ""

    def has_room(self, live: Live) -> bool:
        """Whether a replica has room for the request, with no held request before it."""
        return not self.hold_queue.num and bool(self.with_room(live))

    def with_room(self, live: Live) -> Sequence[ReplicaView]:
        """The replicas with room for the request, ignoring held requests."""
        opened, tokens = self._opened(live.lora, None), live.prompt_tokens + live.output_tokens
        if self._is_limited or tokens > self._shortest_tokens:
            return self._with_room(opened, tokens, live)
        return opened.views

    def able(self, live: Live) -> Sequence[ReplicaView]:
        """The replicas at which the request can start, room aside."""
        opened = self._opened(live.lora, None)
        views = [member.view for member in opened.fitting(live.prompt_tokens + live.output_tokens)]
        return views if live.allowed is None else [view for view in views if view.id in live.allowed]

    def is_without_candidate(self, live: Live) -> bool:
        """Whether replicas are up, but none has the request's adapter or is allowed for it. Other requests must not
        wait behind it."""
        if not self._open.views or not (live.lora or live.allowed is not None):
            return False
        opened = self._opened(live.lora, None)
        return not opened.views or (live.allowed is not None and opened.ids.isdisjoint(live.allowed))

    def role_changes(self) -> dict[int, Role]:
        """Roles to set, by replica: `mixed` for a whole combo that has lost a phase, else the intended role."""
        changes: dict[int, Role] = {}
        split = [m for m in self.members if not m.is_single_phase and (m.role != "mixed" or m.view.role != "mixed")]
        for combo in sorted({m.view.combo for m in split}):
            up = [m for m in self.members if m.view.combo == combo and m.is_up]
            ready = [m for m in up if m.is_ready]
            has_both = any(m.role != "decode" for m in ready) and any(m.role != "prefill" for m in ready)
            for member in up:
                role: Role = member.role if has_both else "mixed"
                if role != member.view.role:
                    changes[member.view.id] = role
        return changes

    # The hold queue.

    def started(self, live: Live, replica: int, now: float) -> None:
        """Count a request that starts at a replica, from the hold queue or directly."""
        if self.sent is not None and self.sharing is not None:
            self.sent.add(live, replica)
            self.sharing.started(live, now)
            if self.hold_queue.num:
                self.hold_queue.rerank(live, now)
            if self.preemptions is not None:
                self.preemptions.started(live, replica, now)

    def ended(self, live: Live, now: float) -> None:
        """Count the end of a request or of its cascade stage. Repeated calls have no effect."""
        if self.sent is not None and self.sharing is not None:
            self.sent.discard(live)
            self.sharing.ended(live)
            if self.hold_queue.num:
                self.hold_queue.rerank(live, now)

    def hold(self, live: Live, now: float, exclude: int | None = None) -> None:
        """Put a request into the hold queue."""
        if self.sent is not None:
            self.sent.discard(live)
        if self._observer is not None:
            self._observer.note_hold(live, now, self._hold_reason(exclude))
        live.stage = HELD
        if self.preemptions is not None:
            self.preemptions.enter(live, now)
        self.hold_queue.push(live, now)

    def take_held(self) -> list[Live]:
        """Empty the hold queue and return its requests in order of arrival."""
        held = self.hold_queue.requests()
        self.hold_queue = hold_queue(self.hold_ordering)
        return sorted(held, key=_arrival)

    def note_refusal(self, live: Live, now: float, why: str) -> None:
        """Tell the observer that a request is rejected."""
        if self._observer is not None:
            self._observer.record_refusal(live, now, why)

    def note_fallback(self, live: Live, model: str, why: str, now: float) -> None:
        """Tell the observer that another model answers a request."""
        if self._observer is not None:
            self._observer.record_fallback(live, model, why, now)

    def _hold_reason(self, exclude: int | None) -> str:
        if not self._opened("", exclude).views:
            return "no replica is up"
        return "others come first" if self.hold_queue.num else "no replica has room"

    def has_placeable_waiter(self, now: float) -> bool:
        """Whether a replica that is up could serve the first held request if it had room."""
        live = self.hold_queue.first(now)
        if live is None:
            return False
        return bool(self._open.fitting(live.prompt_tokens + live.output_tokens))


def _complete(members: list[Member]) -> list[Member]:
    """Drop the single-phase members whose combo has no member for the other phase here."""
    if not any(member.is_single_phase for member in members):
        return members
    phases = {(member.view.combo, member.view.role) for member in members}
    complete = {combo for combo, _ in phases if {(combo, "prefill"), (combo, "decode")} <= phases}
    return [member for member in members if not member.is_single_phase or member.view.combo in complete]


def _views(members: list[Member], opened: _OpenMembers) -> Sequence[ReplicaView]:
    """The members' views. If `members` are the members at which a request can start, these are the unchanged `opened`
    views."""
    return opened.views if members == opened.start else [member.view for member in members]


def _in_region(candidates: Sequence[ReplicaView], ids: set[int], region: str) -> tuple[Sequence[ReplicaView], set[int]]:
    """The candidates in a region, with their ids; all if the region has none."""
    local = [replica for replica in candidates if replica.region == region]
    return (local, {replica.id for replica in local}) if local else (candidates, ids)


def _arrival(live: Live) -> tuple[float, int]:
    return live.arrival_s, live.id


def _load(replica: ReplicaView) -> tuple[int, int]:
    return replica.num_in_flight + replica.num_arriving, replica.id
