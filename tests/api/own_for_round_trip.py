"""Policies of a user's module, for test_round_trip.py."""

from __future__ import annotations

from typing import Any

from headway.core.decision import Placement


class Nearest:
    def __init__(self, bias: int = 0) -> None:
        self.bias = bias

    def route(self, request: Any, view: Any) -> Placement:
        return Placement(min(view.replicas, key=lambda each: each.num_in_flight).id)
