"""A request of a combo passes from the replica that computes its prompt to the one that decodes."""

from __future__ import annotations

from typing import TYPE_CHECKING

from headway.gateway.ticket import Ticket

if TYPE_CHECKING:
    from headway.gateway.driver import Driver


def pass_on(driver: Driver, ticket: Ticket, kept: bool, outcome: str, failures: int = 0) -> bool:
    """Let control say who decodes: with the KV cache, where it is kept. False: nobody else does, or can."""
    live, replica = ticket.live, ticket.replica
    if ticket.moving_to is not None:
        driver.landed(ticket)
    if ticket.outcome is not None or ticket.replica is not replica:
        return True
    driver.on_prefilled(live.model, outcome)
    ticket.hang_up()
    ticket.is_kept, ticket.is_split, ticket.prefilled_by = kept, False, replica
    live.attempt += failures
    driver.control.prefilled(live, driver.now)
    if ticket.replica is not replica:
        return True
    live.attempt -= failures
    ticket.is_kept = False
    return False
