"""Roles of replicas: who covers for a lost phase of a combo, and where waiting requests go after a change."""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

from headway.control.effects import Effects
from headway.control.live import WAITING, Live
from headway.control.service import Service
from headway.core.fleet import Role


class Roles:
    """Applies the roles that services ask for."""

    def __init__(self, effects: Effects) -> None:
        self._effects = effects

    def cover(self, service: Service) -> list[int]:
        """Let a combo's replicas take over a phase that lost all its replicas, or give it back.

        Returns the ids of the replicas whose role changed.
        """
        changes = service.role_changes()
        for replica, role in changes.items():
            self._effects.set_role(replica, role)
        service.refresh()
        return list(changes)

    def rearrange(self, service: Service, now: float) -> None:
        """Apply changed roles, and re-place requests at the changed replicas that have not begun."""
        for replica in self.cover(service):
            member = service.member(replica)
            assert member is not None
            for live in sorted(cast(Sequence[Live], member.view.requests), key=_by_id):
                self._adapt(service, live, member.view.role, now)

    def _adapt(self, service: Service, live: Live, role: Role, now: float) -> None:
        """Adapt one request at a replica to the replica's new role."""
        live.decode_replica = -1
        if live.stage is not WAITING or live.swapped_tokens:
            return
        if role == "prefill":
            live.decode_replica = service.choose_decoder(live, live.replica)
        elif role == "decode":
            chosen = service.choose(live, now)
            if chosen is not None and chosen != live.replica:
                self._effects.move(live, chosen, None, now)


def _by_id(live: Live) -> int:
    return live.id
