"""The turns of a session go to the replica that caches its history."""

from __future__ import annotations

from collections import OrderedDict

from headway.core.decision import Placement
from headway.core.view import FleetView, RequestView
from headway.policies.arguments import require_at_least
from headway.policies.routing.least_loaded import least_loaded


class SessionAffinityRouter:
    """A session stays with its replica while that exists; a new session goes to the least loaded replica.

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
