"""Who prefills and who decodes, and what becomes of requests when that changes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, cast

from headway.control.live import WAITING, Live
from headway.control.service import Service
from headway.core.fleet import Role


class Effects(Protocol):
    """What a driver does when roles change."""

    def set_role(self, replica: int, role: Role) -> None:
        """A replica is for something else from now on."""

    def move(self, live: Live, target: int, stage_blocks: int | None, now: float) -> None:
        """Take a request to another replica."""


class Roles:
    """Of replicas of combos, at present."""

    def __init__(self, effects: Effects) -> None:
        self._effects = effects

    def cover(self, service: Service) -> list[int]:
        """A replica came, went or changed: the others of its combo take over its part, or give it back.

        Returns those that are for something else now.
        """
        changes = service.cover()
        for replica, role in changes.items():
            self._effects.set_role(replica, role)
        service.refresh()
        return list(changes)

    def rearrange(self, service: Service, now: float) -> None:
        """A role was changed: so is where requests that have not begun are prefilled, and where they decode."""
        for replica in self.cover(service):
            member = service.member(replica)
            assert member is not None
            for live in sorted(cast(Sequence[Live], member.view.requests), key=_by_id):
                self._fit_in(service, live, member.view.role, now)

    def _fit_in(self, service: Service, live: Live, role: Role, now: float) -> None:
        """A request at a replica that has this role from now on."""
        live.decode = -1
        if live.stage is not WAITING or live.swapped_tokens:
            return
        if role == "prefill":
            live.decode = service.decoder(live, live.replica)
        elif role == "decode":
            chosen = service.choose(live, now)
            if chosen is not None and chosen != live.replica:
                self._effects.move(live, chosen, None, now)


def _by_id(live: Live) -> int:
    return live.id
