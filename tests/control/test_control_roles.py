"""Roles of a combo's replicas: who covers for a lost phase, and where waiting requests go."""

from __future__ import annotations

from control_fakes import fleet
from headway.control.live import WAITING


def test_the_rest_of_a_combo_covers_for_a_lost_phase_and_gives_it_back() -> None:
    run = fleet("prefill", "decode", combo=1)
    run.control.on_crashed(1, [], 0.0)
    assert run.effects.roles == [(0, "mixed")]
    run.control.on_recovered(1, 1.0)
    assert run.effects.roles == [(0, "mixed"), (0, "prefill")]


def test_nothing_is_covered_while_each_phase_has_a_replica() -> None:
    run = fleet("prefill", "decode", "decode", combo=1)
    run.control.on_crashed(1, [], 0.0)
    assert run.effects.roles == []


def test_a_role_changes_and_waiting_requests_are_prefilled_elsewhere() -> None:
    run = fleet("mixed", "mixed", combo=1)
    live = run.arrive(0)
    run.effects.replicas[0].requests = [live]  # type: ignore[list-item]
    assert live.stage is WAITING
    run.control.change_role(0, "decode", 1.0, is_ready=True)
    assert run.effects.roles == [(0, "decode")]
    assert run.effects.moved == [(0, 1, None)]


def test_a_replica_takes_no_request_while_its_role_changes() -> None:
    run = fleet("mixed", "mixed", combo=1)
    run.control.change_role(0, "mixed", 0.0, is_ready=False)
    run.arrive(0)
    assert run.effects.started == [(0, 1)]
    run.control.on_role_changed(0, 5.0)
    run.arrive(1)
    assert run.effects.started == [(0, 1), (1, 0)]
