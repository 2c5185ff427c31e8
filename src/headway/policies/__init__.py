"""Every policy by its name. To add a policy, write one file beside the others and add one line here."""

from __future__ import annotations

from headway.core.policy import Admission, Cascade, Migration, Ordering, Router, Scaler
from headway.policies.admission.queue_manager import QueueManagerAdmission
from headway.policies.cascade.deadline_aware import DeadlineAwareCascade
from headway.policies.cascade.load_based import LoadBasedCascade
from headway.policies.cascade.pre_routed import PreRoutedCascade
from headway.policies.cascade.thresholds import ThresholdsCascade
from headway.policies.migration.headway import HeadwayMigration
from headway.policies.migration.llumnix import LlumnixMigration
from headway.policies.migration.pascal import PascalMigration
from headway.policies.ordering.deadline_priority import DeadlinePriorityOrdering
from headway.policies.ordering.edf import EdfOrdering
from headway.policies.ordering.fcfs import FcfsOrdering
from headway.policies.ordering.fewest_quanta import FewestQuantaOrdering
from headway.policies.ordering.pascal import PascalOrdering
from headway.policies.ordering.priority import PriorityOrdering
from headway.policies.ordering.priority_first import PriorityFirstOrdering
from headway.policies.ordering.round_robin import RoundRobinOrdering
from headway.policies.ordering.shortest_remaining import ShortestRemainingOrdering
from headway.policies.ordering.shortest_to_answer import ShortestToAnswerOrdering
from headway.policies.ordering.tier_promotion import TierPromotionOrdering
from headway.policies.ordering.tiers_and_phases import TiersAndPhasesOrdering
from headway.policies.routing.cauchy import CauchyRouter
from headway.policies.routing.freest import FreestRouter
from headway.policies.routing.headway import HeadwayRouter
from headway.policies.routing.infaas import InfaasRouter
from headway.policies.routing.jsq_tokens import JsqTokensRouter
from headway.policies.routing.jsq_tokens_oracle import JsqTokensOracleRouter
from headway.policies.routing.least_footprint import LeastFootprintRouter
from headway.policies.routing.least_kv import LeastKvRouter
from headway.policies.routing.least_loaded import LeastLoadedRouter
from headway.policies.routing.pascal import PascalRouter
from headway.policies.routing.power_of_two import PowerOfTwoRouter
from headway.policies.routing.prefix_affinity import PrefixAffinityRouter
from headway.policies.routing.random import RandomRouter
from headway.policies.routing.round_robin import RoundRobinRouter
from headway.policies.routing.sageserve import SageServeRouter
from headway.policies.routing.session_affinity import SessionAffinityRouter
from headway.policies.scaling.chiron import ChironScaler
from headway.policies.scaling.combos import CombosScaler
from headway.policies.scaling.freeness import FreenessScaler
from headway.policies.scaling.long_term import LongTermGapScaler, LongTermImmediateScaler, LongTermUtilizationScaler
from headway.policies.scaling.reactive import ReactiveScaler
from headway.policies.scaling.target_utilization import TargetUtilizationScaler
from headway.policies.scaling.timetable import TimetableScaler

ROUTERS: dict[str, type[Router]] = {
    "headway": HeadwayRouter,
    "round-robin": RoundRobinRouter,
    "random": RandomRouter,
    "least-loaded": LeastLoadedRouter,
    "jsq-tokens": JsqTokensRouter,
    "jsq-tokens-oracle": JsqTokensOracleRouter,
    "power-of-two": PowerOfTwoRouter,
    "least-kv": LeastKvRouter,
    "least-footprint": LeastFootprintRouter,
    "freest": FreestRouter,
    "infaas": InfaasRouter,
    "prefix-affinity": PrefixAffinityRouter,
    "session-affinity": SessionAffinityRouter,
    "pascal": PascalRouter,
    "cauchy": CauchyRouter,
    "sageserve": SageServeRouter,
}

ORDERINGS: dict[str, type[Ordering]] = {
    "fcfs": FcfsOrdering,
    "round-robin": RoundRobinOrdering,
    "fewest-quanta": FewestQuantaOrdering,
    "priority": PriorityOrdering,
    "edf": EdfOrdering,
    "priority-first": PriorityFirstOrdering,
    "deadline-priority": DeadlinePriorityOrdering,
    "shortest-remaining": ShortestRemainingOrdering,
    "shortest-to-answer": ShortestToAnswerOrdering,
    "pascal": PascalOrdering,
    "tier-promotion": TierPromotionOrdering,
    "tiers-and-phases": TiersAndPhasesOrdering,
}

MIGRATIONS: dict[str, type[Migration]] = {
    "headway": HeadwayMigration,
    "pascal": PascalMigration,
    "llumnix": LlumnixMigration,
}

ADMISSIONS: dict[str, type[Admission]] = {
    "queue-manager": QueueManagerAdmission,
}

CASCADES: dict[str, type[Cascade]] = {
    "thresholds": ThresholdsCascade,
    "load-based": LoadBasedCascade,
    "pre-routed": PreRoutedCascade,
    "deadline-aware": DeadlineAwareCascade,
}

SCALERS: dict[str, type[Scaler]] = {
    "freeness": FreenessScaler,
    "combos": CombosScaler,
    "target-utilization": TargetUtilizationScaler,
    "reactive": ReactiveScaler,
    "lt-i": LongTermImmediateScaler,
    "lt-u": LongTermUtilizationScaler,
    "lt-ua": LongTermGapScaler,
    "chiron": ChironScaler,
    "timetable": TimetableScaler,
}
