"""Plans of cascades for scenarios: latencies simulated and kept by content, every plan rehearsed as a whole."""

from headway.planning.cascade.best_plan import Answer, plan, scenario_yaml
from headway.planning.cascade.planners import EFFORT, cascadia
from headway.planning.cascade.planning_request import PlanningRequest, ask, at_rate
from headway.planning.cascade.regret import Off, Regret, regrets
from headway.planning.cascade.rehearsal import Rehearsed, document_of, rehearse
from headway.planning.cascade.stage_latencies import Known, bounds, evaluator
from headway.planning.cascade.stage_simulator import Simulated
from headway.planning.cascade.tighten import Option, tighten_until_met

__all__ = [
    "EFFORT",
    "Answer",
    "Known",
    "Off",
    "Option",
    "PlanningRequest",
    "Regret",
    "Rehearsed",
    "Simulated",
    "ask",
    "at_rate",
    "bounds",
    "cascadia",
    "document_of",
    "evaluator",
    "plan",
    "regrets",
    "rehearse",
    "scenario_yaml",
    "tighten_until_met",
]  # fmt: skip
