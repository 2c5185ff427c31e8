"""The registry of policies by name. To add a policy, write one file beside the others and add one line here."""

from __future__ import annotations

from headway.core.policy import Admission, Cascade, Migration, Ordering, Router, Scaler
from headway.policies.admission.by_deadline import ByDeadlineAdmission
from headway.policies.admission.queue_manager import QueueManagerAdmission
from headway.policies.cascade.deadline_aware import DeadlineAwareCascade
from headway.policies.cascade.load_based import LoadBasedCascade
from headway.policies.cascade.pre_routed import PreRoutedCascade
from headway.policies.cascade.thresholds import ThresholdsCascade
from headway.policies.migration.headway import HeadwayMigration
from headway.policies.migration.llumnix import LlumnixMigration
from headway.policies.migration.pascal import PascalMigration
from headway.policies.ordering.attained import LeastAttainedServiceOrdering, VtcOrdering
from headway.policies.ordering.deadlines import DeadlinePriorityOrdering, EdfOrdering
from headway.policies.ordering.deficit import DeficitRoundRobinOrdering
from headway.policies.ordering.fair import FairOrdering
from headway.policies.ordering.fcfs import FcfsOrdering
from headway.policies.ordering.oracle import ShortestRemainingOrdering, ShortestToAnswerOrdering
from headway.policies.ordering.phases import PascalOrdering, TiersAndPhasesOrdering
from headway.policies.ordering.tiers import PriorityFirstOrdering, PriorityOrdering, TierPromotionOrdering
from headway.policies.ordering.time_sharing import FewestQuantaOrdering, RoundRobinOrdering
from headway.policies.routing.affinity import PrefixAffinityRouter, SessionAffinityRouter
from headway.policies.routing.cauchy import CauchyRouter
from headway.policies.routing.dlpm import DlpmRouter
from headway.policies.routing.dualmap import DualMapRouter
from headway.policies.routing.dynamo_cost import DynamoCostRouter
from headway.policies.routing.freest import FreestRouter
from headway.policies.routing.headway import HeadwayRouter
from headway.policies.routing.infaas import InfaasRouter
from headway.policies.routing.jsq_tokens import JsqTokensOracleRouter, JsqTokensRouter
from headway.policies.routing.kv import LeastFootprintRouter, LeastKvRouter, PascalRouter
from headway.policies.routing.least_loaded import LeastLoadedRouter, PowerOfTwoRouter
from headway.policies.routing.llm_d_scorers import LlmDScorersRouter
from headway.policies.routing.lmetric import LmetricRouter
from headway.policies.routing.lora_affinity import LoraAffinityRouter
from headway.policies.routing.preble import PrebleRouter
from headway.policies.routing.random import RandomRouter
from headway.policies.routing.remaining_work import RemainingWorkOracleRouter, RemainingWorkRouter
from headway.policies.routing.round_robin import RoundRobinRouter
from headway.policies.routing.sageserve import SageServeRouter
from headway.policies.scaling.chiron import ChironScaler
from headway.policies.scaling.combos import CombosScaler
from headway.policies.scaling.freeness import FreenessScaler
from headway.policies.scaling.headway import HeadwayScaler
from headway.policies.scaling.keda import KedaScaler
from headway.policies.scaling.long_term import LongTermGapScaler, LongTermImmediateScaler, LongTermUtilizationScaler
from headway.policies.scaling.minimum import MinimumScaler
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
    "lmetric": LmetricRouter,
    "dynamo-cost": DynamoCostRouter,
    "llm-d-scorers": LlmDScorersRouter,
    "preble": PrebleRouter,
    "dualmap": DualMapRouter,
    "remaining-work": RemainingWorkRouter,
    "remaining-work-oracle": RemainingWorkOracleRouter,
    "dlpm": DlpmRouter,
    "lora-affinity": LoraAffinityRouter,
    "pascal": PascalRouter,
    "cauchy": CauchyRouter,
    "sageserve": SageServeRouter,
}

ORDERINGS: dict[str, type[Ordering]] = {
    "fcfs": FcfsOrdering,
    "round-robin": RoundRobinOrdering,
    "fewest-quanta": FewestQuantaOrdering,
    "priority": PriorityOrdering,
    "fair": FairOrdering,
    "vtc": VtcOrdering,
    "drr": DeficitRoundRobinOrdering,
    "least-attained-service": LeastAttainedServiceOrdering,
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
    "by-deadline": ByDeadlineAdmission,
    "queue-manager": QueueManagerAdmission,
}

CASCADES: dict[str, type[Cascade]] = {
    "thresholds": ThresholdsCascade,
    "load-based": LoadBasedCascade,
    "pre-routed": PreRoutedCascade,
    "deadline-aware": DeadlineAwareCascade,
}

SCALERS: dict[str, type[Scaler]] = {
    "headway": HeadwayScaler,
    "keda": KedaScaler,
    "freeness": FreenessScaler,
    "combos": CombosScaler,
    "target-utilization": TargetUtilizationScaler,
    "reactive": ReactiveScaler,
    "lt-i": LongTermImmediateScaler,
    "lt-u": LongTermUtilizationScaler,
    "lt-ua": LongTermGapScaler,
    "chiron": ChironScaler,
    "timetable": TimetableScaler,
    "minimum": MinimumScaler,
}
