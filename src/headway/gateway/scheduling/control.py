"""Control and cascades, as they are where requests fail one by one, and nobody knows how an answer will be."""

from __future__ import annotations

import logging
from typing import Any

from headway.control.cascade_stages import CascadeStages
from headway.control.control import Control
from headway.control.live import ENDED, HELD, Live
from headway.control.service import Service
from headway.core.errors import HeadwayError
from headway.core.record import Outcome
from headway.core.request import Phase

log = logging.getLogger("headway.gateway")


class LiveCascadeStages(CascadeStages):
    """A cascade's, where how long an answer reasons shows only as it comes."""

    def escalate(self, live: Live) -> None:
        """The next model answers anew."""
        live.reasoning_tokens = 0  # type: ignore[misc]  # of a frozen base, thawed here
        live.phase = Phase.ANSWERING
        super().escalate(live)


class LiveControl(Control):
    """Control, told besides of what goes wrong with one request only."""

    cascade_type = LiveCascadeStages

    def __init__(self, *given: Any, **named: Any) -> None:
        super().__init__(*given, **named)
        self._releasing: set[Service] = set()

    def release_held(self, service: Service, now: float) -> None:
        """As ever; but whom a policy fails over is turned away: those behind it, and who made the room, go on."""
        if service in self._releasing:
            return  # the call that is under way has not come to its end
        self._releasing.add(service)
        try:
            while not self._released(service, now):
                pass
        finally:
            self._releasing.discard(service)

    def _released(self, service: Service, now: float) -> bool:
        try:
            super().release_held(service, now)
        except Exception as error:
            live = service.first_held(now)
            if live is None:
                raise
            log.error("request %d is turned away: %s", live.id, error, exc_info=not isinstance(error, HeadwayError))
            self.end(live, now, Outcome.REJECTED)
            return False
        return True

    def failed(self, live: Live, now: float, by: int | None = None) -> None:
        """Its replica would not have it, or lost it: it is placed anew, elsewhere, with the tokens already out kept.

        Where there is no other, it is rejected. `by`: another one did that was to help.
        """
        service = self.service_of(live)
        replica = live.replica if by is None else by
        member = service.member(replica)
        live.attempt += 1
        live.enter(HELD)
        if member is None or not member.is_up:
            self.place(live, now, jumps_queue=True)
        elif service.is_served_without(replica):
            self.place(live, now, jumps_queue=True, exclude=replica)
        else:
            self.end(live, now, Outcome.REJECTED)

    def other_decodes(self, live: Live, prefilled_by: int, now: float) -> bool:
        """Its decode replica would not have it: another one of the combo may, by what was prefilled for it."""
        service = self.service_of(live)
        if service.member(prefilled_by) is None or service.member(live.replica) is None:
            return False
        chosen = service.choose_decoder(live, prefilled_by, exclude=live.replica)
        if chosen < 0 or chosen == prefilled_by:
            return False
        live.attempt += 1
        self.effects.hand_over(live, chosen, now)
        return True

    def refused(self, live: Live, now: float) -> None:
        """Nobody will have it."""
        if live.stage is not ENDED:
            self.end(live, now, Outcome.REJECTED)

    def gave_up(self, live: Live, now: float) -> None:
        """Its client is gone."""
        self.on_timeout(now, live)

    def emptied(self, live: Live, now: float) -> None:
        """A request that ended before has left its replica: there is room."""
        self.on_room(self.service_of(live), now)

    def unjudged(self, live: Live, accept: bool, now: float) -> None:
        """A cascade's answer has no score: it will do all the same, or the next model answers."""
        if self._judged.pop(live.id, None) is None:
            return
        assert self.cascade is not None
        if accept:
            self.end(live, now, Outcome.FINISHED, is_learned=True)
        else:
            self.cascade.escalate(live)
            self.place(live, now)
