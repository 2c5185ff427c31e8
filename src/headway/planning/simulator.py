"""What planners need of a simulator, so that planning does not import `headway.scenario`, which implements it."""

from __future__ import annotations

from typing import Protocol

from headway.config.scenario import Scenario
from headway.control.policies import Policies
from headway.core.record import Records
from headway.report.run import Run


class Simulator(Protocol):
    """Simulates scenarios that have one variant. Can be pickled, for worker processes.

    Every method raises HeadwayError where the scenario cannot be run.
    """

    def run(self, scenario: Scenario) -> Run:
        """Simulate, and summarize the records."""

    def records(self, scenario: Scenario) -> Records:
        """Simulate."""

    def policies(self, scenario: Scenario) -> Policies:
        """The scenario's policies, resolved."""
