"""Requests pass from one replica to another: from who computes a prompt to who decodes, and from who drains."""

from __future__ import annotations

from typing import TYPE_CHECKING

from headway.gateway.fleet.replica import LiveReplica
from headway.gateway.scheduling.in_flight import InFlightRequest

if TYPE_CHECKING:
    from headway.gateway.scheduling.driver import Driver


def pass_on(driver: Driver, ticket: InFlightRequest, kept: bool, outcome: str, failures: int = 0) -> bool:
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
    driver.control.on_prefilled(live, driver.now)
    if ticket.replica is not replica:
        return True
    live.attempt -= failures
    ticket.is_kept = False
    return False


def move_out(driver: Driver, replica: LiveReplica) -> None:
    """What can go on elsewhere leaves a replica that drains."""
    service, now = driver.services[replica.model], driver.now
    for ticket in list(driver.tickets.values()):
        if ticket.replica is replica and ticket.can_move and ticket.moving_to is None:
            target = service.choose(ticket.live, now)
            if target is not None and replica.id not in (target, ticket.live.decode_replica):
                driver.move(ticket.live, target, None, now)
