"""A cascade's answer has its score, or nobody could tell."""

from __future__ import annotations

from typing import TYPE_CHECKING

from headway.gateway.scheduling.in_flight import InFlightRequest

if TYPE_CHECKING:
    from headway.gateway.scheduling.driver import Driver


def scored(driver: Driver, ticket: InFlightRequest, score: float | None, accepts_unjudged: bool) -> None:
    """Let control say whether the answer will do; if not, the next model gives another."""
    live = ticket.live
    ticket.is_unjudged = False
    ticket.prefilled_by = None
    stage, model = live.stage_index, live.model
    live.lengths += ((model, live.generated_tokens),)  # type: ignore[misc]  # of a frozen base, thawed here
    if score is None:
        driver.control.unjudged(live, accepts_unjudged, driver.now)
    else:
        live.quality += ((model, score),)  # type: ignore[misc]
        driver.control.on_judged(live, score, driver.now)
    escalated = live.stage_index != stage
    driver.on_judged(model, "unscored" if score is None else "escalated" if escalated else "accepted")
    if escalated:
        driver.hope(ticket)
