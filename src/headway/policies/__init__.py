"""Every policy by its name. Adding one is one file beside the others and one line here."""

from __future__ import annotations

from headway.core.policy import Admission, Cascade, Migration, Ordering, Router, Scaler
from headway.policies.admission.queue_manager import QueueManager
from headway.policies.cascade.deadline_aware import DeadlineAware
from headway.policies.cascade.load_based import LoadBased
from headway.policies.cascade.pre_routed import PreRouted
from headway.policies.cascade.thresholds import Thresholds
from headway.policies.migration.headway import Headway as HeadwayMigration
from headway.policies.migration.llumnix import Llumnix
from headway.policies.migration.pascal import Pascal as PascalMigration
from headway.policies.ordering.deadline_priority import DeadlinePriority
from headway.policies.ordering.edf import Edf
from headway.policies.ordering.fcfs import Fcfs
from headway.policies.ordering.fewest_quanta import FewestQuanta
from headway.policies.ordering.pascal import Pascal as PascalOrdering
from headway.policies.ordering.priority import Priority
from headway.policies.ordering.priority_first import PriorityFirst
from headway.policies.ordering.round_robin import RoundRobin as RoundRobinOrdering
from headway.policies.ordering.shortest_remaining import ShortestRemaining
from headway.policies.ordering.shortest_to_answer import ShortestToAnswer
from headway.policies.ordering.tier_promotion import TierPromotion
from headway.policies.ordering.tiers_and_phases import TiersAndPhases
from headway.policies.routing.cauchy import Cauchy
from headway.policies.routing.freest import Freest
from headway.policies.routing.headway import Headway
from headway.policies.routing.infaas import Infaas
from headway.policies.routing.jsq_tokens import JsqTokens
from headway.policies.routing.jsq_tokens_oracle import JsqTokensOracle
from headway.policies.routing.least_footprint import LeastFootprint
from headway.policies.routing.least_kv import LeastKv
from headway.policies.routing.least_loaded import LeastLoaded
from headway.policies.routing.pascal import Pascal
from headway.policies.routing.power_of_two import PowerOfTwo
from headway.policies.routing.prefix_affinity import PrefixAffinity
from headway.policies.routing.random import Random
from headway.policies.routing.round_robin import RoundRobin
from headway.policies.routing.sageserve import SageServe
from headway.policies.routing.session_affinity import SessionAffinity
from headway.policies.scaling.chiron import Chiron
from headway.policies.scaling.combos import Combos
from headway.policies.scaling.freeness import Freeness
from headway.policies.scaling.long_term import LongTermGap, LongTermImmediate, LongTermUtilization
from headway.policies.scaling.reactive import Reactive
from headway.policies.scaling.target_utilization import TargetUtilization
from headway.policies.scaling.timetable import Timetable

ROUTERS: dict[str, type[Router]] = {
    "headway": Headway,
    "round-robin": RoundRobin,
    "random": Random,
    "least-loaded": LeastLoaded,
    "jsq-tokens": JsqTokens,
    "jsq-tokens-oracle": JsqTokensOracle,
    "power-of-two": PowerOfTwo,
    "least-kv": LeastKv,
    "least-footprint": LeastFootprint,
    "freest": Freest,
    "infaas": Infaas,
    "prefix-affinity": PrefixAffinity,
    "session-affinity": SessionAffinity,
    "pascal": Pascal,
    "cauchy": Cauchy,
    "sageserve": SageServe,
}

ORDERINGS: dict[str, type[Ordering]] = {
    "fcfs": Fcfs,
    "round-robin": RoundRobinOrdering,
    "fewest-quanta": FewestQuanta,
    "priority": Priority,
    "edf": Edf,
    "priority-first": PriorityFirst,
    "deadline-priority": DeadlinePriority,
    "shortest-remaining": ShortestRemaining,
    "shortest-to-answer": ShortestToAnswer,
    "pascal": PascalOrdering,
    "tier-promotion": TierPromotion,
    "tiers-and-phases": TiersAndPhases,
}

MIGRATIONS: dict[str, type[Migration]] = {
    "headway": HeadwayMigration,
    "pascal": PascalMigration,
    "llumnix": Llumnix,
}

ADMISSIONS: dict[str, type[Admission]] = {
    "queue-manager": QueueManager,
}

CASCADES: dict[str, type[Cascade]] = {
    "thresholds": Thresholds,
    "load-based": LoadBased,
    "pre-routed": PreRouted,
    "deadline-aware": DeadlineAware,
}

SCALERS: dict[str, type[Scaler]] = {
    "freeness": Freeness,
    "combos": Combos,
    "target-utilization": TargetUtilization,
    "reactive": Reactive,
    "lt-i": LongTermImmediate,
    "lt-u": LongTermUtilization,
    "lt-ua": LongTermGap,
    "chiron": Chiron,
    "timetable": Timetable,
}
