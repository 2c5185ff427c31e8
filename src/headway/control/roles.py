"""Prefill and decode roles of replicas: role changes, and phases that have lost all their replicas."""

from __future__ import annotations

from collections.abc import Sequence
from operator import attrgetter
from typing import cast

from headway.control.effects import Effects
from headway.control.live import WAITING, Live
from headway.control.service import Member, Service


class Roles:
    """Changes replica roles, and moves requests that have not started there."""

    def __init__(self, effects: Effects) -> None:
        self._effects = effects

    def cover(self, service: Service) -> list[int]:
        """Let a combo's replicas take over a phase that lost all its replicas, or return it. Returns the ids of changed
        replicas."""
        changes = service.role_changes()
        for replica, role in changes.items():
            self._effects.set_role(replica, role)
        service.refresh()
        return list(changes)

    def rearrange(self, service: Service, now: float) -> None:
        """Apply changed member roles, and place the requests there again that have not started."""
        for replica in self.cover(service):
            member = service.member(replica)
            assert member is not None
            for live in sorted(cast(Sequence[Live], member.view.requests), key=attrgetter("id")):
                live.decode_replica = -1
                if live.stage is not WAITING or live.swapped_tokens:
                    continue
                if member.view.role == "prefill":
                    live.decode_replica = service.choose_decoder(live, live.replica)
                elif member.view.role == "decode":
                    chosen = service.choose(live, now)
                    if chosen is not None and chosen != live.replica:
                        self._effects.move(live, chosen, None, now)


def memberships(services: Sequence[Service], replica: int) -> list[tuple[Service, Member]]:
    """The services that a replica serves, with its member in each."""
    found = [(service, service.member(replica)) for service in services]
    return [(service, member) for service, member in found if member is not None and not member.is_gone]
