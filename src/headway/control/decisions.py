"""The decision observer: the input and the choice of each decision by control's policies.

Without an observer, a decision costs one comparison. An observer without listeners only tracks the held requests.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal

from msgspec import Struct

from headway.control.live import Live
from headway.core.decision import Move, Placement
from headway.core.view import ReplicaView


class OfferedReplica(Struct, frozen=True, omit_defaults=True, gc=False):
    """A candidate replica as the policy saw it. Only a gateway sets the fields with defaults."""

    replica: int
    in_flight: int
    waiting: int
    kv_share: float
    """Share of the KV cache in use, 0 to 1."""
    age_s: float | None
    """Age of the replica's metrics; None: never scraped, so all values are Headway's own counts."""
    name: str = ""
    """Name in headers, logs and records."""
    running: int | None = None
    """Number of requests in the engine's batch."""
    prompt_tokens_left: int | None = None
    """Prompt tokens of the replica's requests that are not computed yet."""
    tokens_generated: int | None = None
    """Output tokens so far of all requests placed at the replica."""
    kv_blocks_used: int | None = None
    kv_blocks_total: int | None = None


class Decision(Struct, frozen=True, omit_defaults=True, gc=False):
    """One line of the decision log. Fields with default values are omitted."""

    time_s: float
    """Seconds since the run began; in a gateway, since 1970."""
    what: Literal[
        "placed", "moved", "refused", "ejected", "returned", "reloaded", "fallback", "cache", "shadow", "autopilot"
    ]
    """Kind of decision.

    A gateway only: `ejected`, `returned`, `reloaded` and `cache` concern a replica (`choice`); `why` says how its fleet
    file changed or how well its prefix cache is known. `fallback`: from now on `model` answers instead of the model in
    `why`. `shadow`: a candidate's ordering or admission would have decided differently (`why`), or the result of its
    rehearsal. `autopilot`: one step of a trial change.
    """
    request: str
    model: str
    tier: int
    phase: str
    choice: int | None = None
    """The chosen replica."""
    source: int | None = None
    """The replica that a moving request leaves."""
    decode: int | None = None
    """The replica that decodes after the prefill."""
    attempt: int = 0
    """Attempt number: 0 for the first attempt, plus one for each replica that failed the request."""
    moves: int = 0
    """Moves completed before this decision."""
    held_s: float = 0.0
    """Time held before this decision."""
    why: str = ""
    """Reason to hold, move or reject the request."""
    scores: tuple[tuple[int, float], ...] = ()
    """The policy's scores as (replica, score)."""
    replicas: tuple[OfferedReplica, ...] = ()
    """The candidate replicas."""
    shadow: int | None = None
    """The replica chosen by the candidate configuration's router, if a candidate runs in shadow."""


class DecisionObserver:
    """Receives decisions from control and passes them to `listeners`."""

    def __init__(self, name: Callable[[Live], str] | None = None, start_s: float = 0.0, is_live: bool = False) -> None:
        """`is_live`: for a gateway, whose decisions record more about each replica."""
        self._is_live = is_live
        self.listeners: list[Callable[[Decision], None]] = []
        self.start_s = start_s
        """Offset that is added to every time in the log."""
        self.name = name or (lambda live: str(live.id))
        """The name of a request in the log."""
        self._held: dict[int, tuple[float, str]] = {}
        """Maps each request to (start, reason) of its hold."""

    def note_hold(self, live: Live, now: float, why: str) -> None:
        """Record that a hold begins."""
        self._held[live.id] = now, why

    def forget(self, live: Live) -> None:
        """Forget the hold of a request that has ended."""
        self._held.pop(live.id, None)

    def record_placement(
        self,
        live: Live,
        placement: Placement,
        offered: Sequence[ReplicaView],
        leaves_draining: bool,
        now: float,
        shadow: int | None = None,
    ) -> None:
        """Record the router's choice, and the choice of a candidate's router. `leaves_draining`: the request moves off
        a draining replica."""
        if not self.listeners:
            if not leaves_draining:
                self._held.pop(live.id, None)
            return
        chosen: dict[str, Any] = {
            "choice": placement.replica,
            "decode": None if live.decode_replica < 0 else live.decode_replica,
            "scores": placement.scores,
            "replicas": _snapshots(offered, now, self._is_live),
            "shadow": shadow,
        }
        if leaves_draining:
            self._record("moved", live, now, source=live.replica, why="its replica is drained", **chosen)
        else:
            self._record("placed", live, now, **chosen)

    def record_migration(self, live: Live, move: Move, offered: Sequence[ReplicaView], now: float) -> None:
        """Record a move requested by the migration policy."""
        if self.listeners:
            self._record(
                "moved",
                live,
                now,
                source=live.replica,
                choice=move.target,
                scores=move.scores,
                why="asked for by the migration policy",
                replicas=_snapshots(offered, now, self._is_live),
            )

    def record_shadow(self, live: Live, why: str, now: float) -> None:
        """Record that a candidate's policy would have decided differently about a request."""
        if self.listeners:
            self._record("shadow", live, now, why=why)

    def record_refusal(self, live: Live, now: float, why: str) -> None:
        """Record that a request was rejected at placement."""
        self._record("refused", live, now, why=why)

    def record_fallback(self, live: Live, model: str, why: str, now: float) -> None:
        """Record that `model` answers the request instead of its current model."""
        if self.listeners:
            self._record("fallback", live, now, model=model, why=why)

    def record_hold_refusal(self, live: Live, now: float, name: str) -> None:
        """Record that a held request was rejected, with the reason for its hold. No effect if it was not held."""
        if live.id in self._held:
            self._record("refused", live, now, request=name)

    def record_ejection(self, replica: int, model: str, why: str, is_return: bool, now: float) -> None:
        """Record the ejection of a replica that serves worse than its peers, or (`is_return`) the end of the
        ejection."""
        what: Literal["ejected", "returned"] = "returned" if is_return else "ejected"
        for listener in self.listeners:
            listener(Decision(self.start_s + now, what, "", model, 0, "", choice=replica, why=why))

    def record_cache_state(self, replica: int, model: str, state: str, why: str, now: float) -> None:
        """Record a change in how well a replica's prefix cache is known."""
        reason = f"{state}: {why}" if why else state
        for listener in self.listeners:
            listener(Decision(self.start_s + now, "cache", "", model, 0, "", choice=replica, why=reason))

    def _record(
        self, what: Literal["placed", "moved", "refused", "fallback", "shadow"], live: Live, now: float, **fields: Any
    ) -> None:
        since_s, why = self._held.pop(live.id, (now, "")) if what in ("placed", "refused") else (now, "")
        if self.listeners:
            name = fields.pop("request", "") or self.name(live)
            decision = Decision(
                time_s=self.start_s + now,
                what=what,
                request=name,
                tier=live.tier,
                phase=live.phase.name.lower(),
                attempt=live.attempt,
                moves=live.moves,
                held_s=now - since_s,
                **{"model": live.model, "why": why, **fields},
            )
            for listener in self.listeners:
                listener(decision)


def _snapshots(replicas: Sequence[ReplicaView], now: float, is_live: bool) -> tuple[OfferedReplica, ...]:
    return tuple(_snapshot(view, now, is_live) for view in replicas)


def _snapshot(view: ReplicaView, now: float, is_live: bool) -> OfferedReplica:
    used, total = view.kv_blocks_used, view.kv_blocks_total
    seen = view.id, view.num_in_flight, view.num_waiting, round(used / max(total, 1), 4), _age_s(view, now)
    if not is_live:
        return OfferedReplica(*seen)
    return OfferedReplica(
        *seen, f"{view.pool}/{view.id}", view.num_running, view.prefill_tokens_left, view.tokens_generated, used, total
    )


def _age_s(view: ReplicaView, now: float) -> float | None:
    seen_s = float(getattr(view, "seen_s", now))
    return None if seen_s == float("-inf") else now - seen_s
