"""Plans of cascades for scenarios: latencies simulated and kept by content, every plan rehearsed as a whole."""

from headway.cascadeplan.answers import Answer, plan, scenario_yaml
from headway.cascadeplan.asked import Asked, ask, at_rate, read
from headway.cascadeplan.keeping import Option, kept
from headway.cascadeplan.regret import Off, Regret, regrets
from headway.cascadeplan.rehearsed import Rehearsed, document_of, rehearse
from headway.cascadeplan.stages import Known, bounds, evaluator
from headway.planner.cascade.search import EFFORT, cascadia
from headway.stages import Simulated

__all__ = [
    "EFFORT", "Answer", "Asked", "Known", "Off", "Option", "Regret", "Rehearsed", "Simulated", "ask", "at_rate",
    "bounds", "cascadia", "document_of", "evaluator", "kept", "plan", "read", "regrets", "rehearse", "scenario_yaml",
]  # fmt: skip
