"""Sends requests with a common prefix, or of one session, to the replica that caches it."""

from __future__ import annotations

from collections import OrderedDict
from math import ceil

from headway.core.decision import Placement
from headway.core.view import FleetView, RequestView
from headway.policies.arguments import require_at_least
from headway.policies.routing.least_loaded import least_loaded

_MASK = (1 << 30) - 1  # products of two such numbers are the fastest in Python


class PrefixAffinityRouter:
    """Requests whose prompts begin alike go to the same replica, with bounded load.

    Requests whose first `num_segments` prefix segments are equal form a group. A group ranks the replicas by rendezvous
    hashing (Thaler and Ravishankar, 1998) and takes the first one with room, so that an added or removed replica
    affects only its own groups. A replica has room below `ceil(load_factor * (requests in flight + 1) / replicas) +
    spare_requests` requests in flight (Mirrokni et al., 2016; the spare requests keep an idle fleet from scattering its
    groups). A request without a prefix goes to the least loaded replica.
    """

    def __init__(self, load_factor: float = 1.25, spare_requests: int = 4, num_segments: int = 1) -> None:
        require_at_least(1, load_factor=load_factor, num_segments=num_segments)
        require_at_least(0, spare_requests=spare_requests)
        self._load_factor = load_factor
        self._spare_requests = spare_requests
        self._num_segments = num_segments
        self._ids: list[int] = []
        self._salts: list[int] = []

    def route(self, request: RequestView, view: FleetView) -> Placement:
        prefix = request.prefix
        replicas = view.replicas
        if not prefix:
            return Placement(least_loaded(replicas))
        ids = [replica.id for replica in replicas]
        if ids != self._ids:
            self._ids, self._salts = ids, [scrambled(i) | 1 for i in ids]
        group = scrambled(prefix[min(self._num_segments, len(prefix)) - 1].id)
        scores = [group * salt & _MASK for salt in self._salts]
        loads = [replica.num_in_flight for replica in replicas]
        room = ceil(self._load_factor * (sum(loads) + 1) / len(loads)) + self._spare_requests
        best = scores.index(max(scores))
        if loads[best] >= room:
            best = max((i for i, load in enumerate(loads) if load < room), key=scores.__getitem__)
        return Placement(ids[best])


def scrambled(number: int) -> int:
    """A 30-bit hash that is the same on every machine (the finaliser of SplitMix64)."""
    number = (number + 0x9E3779B97F4A7C15) & 0xFFFFFFFFFFFFFFFF
    number = (number ^ (number >> 30)) * 0xBF58476D1CE4E5B9 & 0xFFFFFFFFFFFFFFFF
    number = (number ^ (number >> 27)) * 0x94D049BB133111EB & 0xFFFFFFFFFFFFFFFF
    return (number ^ (number >> 31)) >> 34


class SessionAffinityRouter:
    """A session stays with its replica while the replica exists; a new session goes to the least loaded replica.

    The `max_sessions` most recently used sessions are remembered. A request without a session goes to the least loaded
    replica.
    """

    def __init__(self, max_sessions: int = 200_000) -> None:
        require_at_least(1, max_sessions=max_sessions)
        self._max_sessions = max_sessions
        self._homes: OrderedDict[int, int] = OrderedDict()

    def route(self, request: RequestView, view: FleetView) -> Placement:
        session = request.session_id
        replicas = view.replicas
        if session is None:
            return Placement(least_loaded(replicas))
        homes = self._homes
        home = homes.get(session)
        if home is not None:
            homes.move_to_end(session)
            for replica in replicas:
                if replica.id == home:
                    return Placement(home)
        homes[session] = home = least_loaded(replicas)
        if len(homes) > self._max_sessions:
            homes.popitem(last=False)
        return Placement(home)
