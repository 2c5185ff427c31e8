"""Views for trying policies out: they show what `core.view` names, note every read, and forbid the rest."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from random import Random
from typing import Any, cast

from headway.core.record import Ended, Outcome
from headway.core.request import Phase, Segment
from headway.core.view import (
    FleetView,
    OracleReplicaView,
    OracleRequestView,
    ReplicaView,
    RequestView,
)

Values = Mapping[str, Any]


class BrokenPolicyError(AssertionError):
    """A policy does what no policy may; `str(error)` says what."""


@dataclass
class Visit:
    """One call of a policy: what it may read, until when, and what it did read."""

    oracle: bool = False
    is_over: bool = False
    reads: set[str] = field(default_factory=set)
    """Such as `replica.num_waiting`."""


class StrictView:
    """A read-only view with exactly the given attributes, readable until its visit is over."""

    __slots__ = ("__weakref__", "_hidden", "_kind", "_values", "_visit")

    def __init__(self, kind: str, values: Values, hidden: frozenset[str], visit: Visit) -> None:
        for name, value in zip(self.__slots__[1:], (hidden, kind, values, visit), strict=True):
            object.__setattr__(self, name, value)

    def __getattr__(self, name: str) -> Any:
        shown = f"{self._kind}.{name}"
        if name not in self._values:
            raise AttributeError(f"{shown} is not in headway.core.view")
        if self._visit.is_over:
            raise BrokenPolicyError(f"read {shown} after the call that it was shown to: a policy may not keep a view")
        if name in self._hidden and not self._visit.oracle:
            raise BrokenPolicyError(f"read {shown}, which only a policy with `oracle = True` may")
        self._visit.reads.add(shown)
        return self._values[name]

    def __setattr__(self, name: str, value: object) -> None:
        raise BrokenPolicyError(f"set {self._kind}.{name}: views are read-only")

    def __reduce__(self) -> Any:
        raise BrokenPolicyError(f"was pickled with a {self._kind} view in it: a policy may not keep a view")


def _attributes(protocol: type) -> frozenset[str]:
    return frozenset(name for name, value in vars(protocol).items() if isinstance(value, property))


_ORACLE_REQUEST = _attributes(OracleRequestView)
_ORACLE_REPLICA = _attributes(OracleReplicaView)
_SHOWN = {
    "request": _attributes(RequestView) | _ORACLE_REQUEST,
    "replica": _attributes(ReplicaView) | _ORACLE_REPLICA,
    "view": _attributes(FleetView),
}


def request_view(values: Values, visit: Visit) -> RequestView:
    """A request as a policy sees it."""
    return cast(RequestView, _view("request", values, _ORACLE_REQUEST, visit))


def fleet_view(now: float, random: Random, replicas: list[Values], visit: Visit) -> FleetView:
    """A fleet as a router sees it."""
    views = [_view("replica", values, _ORACLE_REPLICA, visit) for values in replicas]
    values = {"now": now, "random": random, "replicas": views}
    return cast(FleetView, _view("view", values, frozenset(), visit))


def _view(kind: str, values: Values, hidden: frozenset[str], visit: Visit) -> StrictView:
    if values.keys() != _SHOWN[kind]:
        odd = sorted(values.keys() ^ _SHOWN[kind])
        raise ValueError(f"a {kind} view differs from headway.core.view in {', '.join(odd)}")
    return StrictView(kind, values, hidden, visit)


def draw_request(rng: Random, id: int, now: float) -> dict[str, Any]:
    """A request with some generated tokens, and more to come; anything optional may be there or not."""
    arrival_s = now - rng.choice((0.0, rng.expovariate(0.1)))
    generated = rng.choice((0, 0, rng.randrange(3000)))
    output = generated + rng.randrange(1, 3000)
    return {
        "id": id,
        "arrival_s": arrival_s,
        "prompt_tokens": rng.choice((1, rng.randrange(1, 100_000))),
        "model": "",
        "tier": rng.randrange(4),
        "region": rng.choice(("", "east", "west")),
        "session_id": rng.choice((None, rng.randrange(12))),
        "prefix": tuple(Segment(rng.randrange(6), rng.randrange(1, 900)) for _ in range(rng.randrange(4))),
        "slo_ttft_s": rng.choice((None, rng.uniform(0.1, 5))),
        "slo_tpot_s": rng.choice((None, rng.uniform(0.01, 1))),
        "slo_e2e_s": rng.choice((None, rng.uniform(1, 300))),
        "deadline_s": rng.choice((None, arrival_s + rng.uniform(-1, 300))),
        "generated_tokens": generated,
        "phase": rng.choice(tuple(Phase)),
        "turn": rng.choice((0, rng.randrange(100_000))),
        "attempt": rng.randrange(3),
        "output_tokens": output,
        "reasoning_tokens": rng.randrange(output + 1),
    }


_HUGE = 10**15
_MOST = {"idle": 0, "equal": 0, "ordinary": 400, "huge": _HUGE}


def draw_replica(rng: Random, id: int, mood: str) -> dict[str, Any]:
    """A replica that is `idle`, `equal` to all others, `ordinary`, or reports `huge` or missing loads."""
    most = _MOST[mood]
    level = 7 if mood == "equal" else 0
    kv_blocks_total = rng.choice((0, 1, _HUGE)) if mood == "huge" else 10_000
    loads = {
        name: level + rng.randrange(most * scale + 1)
        for name, scale in (
            ("num_in_flight", 1), ("num_waiting", 1), ("num_running", 1), ("prefill_tokens_left", 200),
            ("tokens_generated", 200), ("output_tokens_left", 200),
        )
    }  # fmt: skip
    identity = {"id": id, "pool": "main", "model": "", "gpu": "", "region": "", "max_num_seqs": 256}
    blocks = {"kv_blocks_used": rng.randrange(kv_blocks_total + 1) if most else level}
    return {**identity, **loads, **blocks, "kv_blocks_total": kv_blocks_total}


@dataclass(frozen=True)
class Step:
    """What a router meets at one moment: an ending to learn from, then a request to place."""

    now: float
    request: dict[str, Any]
    replicas: list[dict[str, Any]]
    ended: Ended | None


def draw_story(seed: int, num_steps: int = 60) -> list[Step]:
    """A run in brief: requests come, replicas vanish and return, at times there is only one."""
    rng = Random(seed)
    steps = []
    now = 0.0
    for i in range(num_steps):
        if i % 6 == 0:
            num_replicas = rng.choice((1, 2, 3, 8, 20))
            ids = rng.sample(range(24), num_replicas)
            mood = rng.choice(tuple(_MOST))
        now += rng.choice((0.0, rng.expovariate(1.0)))
        replicas = [draw_replica(rng, id, mood) for id in ids]
        ended = draw_ended(rng, i, now) if rng.random() < 0.4 else None
        steps.append(Step(now, draw_request(rng, i, now), replicas, ended))
    return steps


def draw_ended(rng: Random, id: int, now: float) -> Ended:
    """A request that ended just now, in whichever way."""
    outcome = rng.choice(tuple(Outcome))
    generated = 0 if outcome is Outcome.REJECTED else rng.randrange(1, 2000)
    replica = -1 if outcome is Outcome.REJECTED else rng.randrange(24)
    first_token_s = now - 1.0 if generated else None
    return Ended(
        id, outcome, "", rng.randrange(4), replica, now - 2.0, first_token_s, now,
        rng.randrange(1, 9000), generated,
    )  # fmt: skip
