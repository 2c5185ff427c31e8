# The types of what `headway.__getattr__` imports.
from headway.api.advice import advise as advise
from headway.api.demand import Demand as Demand
from headway.api.demand import forecast_demand as forecast_demand
from headway.api.figures import Figure as Figure
from headway.api.fleets import serve as serve
from headway.api.plans import Plan as Plan
from headway.api.plans import plan_capacity as plan_capacity
from headway.api.plans import plan_cascade as plan_cascade
from headway.api.plans import plan_combos as plan_combos
from headway.api.plans import plan_fleet as plan_fleet
from headway.api.plans import plan_goodput as plan_goodput
from headway.api.plans import plan_scaling as plan_scaling
from headway.api.plans import plan_tiers as plan_tiers
from headway.api.results import Comparison as Comparison
from headway.api.results import Result as Result
from headway.api.results import Sweep as Sweep
from headway.api.runs import compare as compare
from headway.api.runs import simulate as simulate
from headway.api.runs import sweep as sweep
from headway.api.scenarios import load as load
from headway.api.slow_requests import why as why
from headway.config.scenario import Scenario as Scenario
from headway.core.errors import HeadwayError as HeadwayError
from headway.core.fleet import Engine as Engine
from headway.core.fleet import Gpu as Gpu
from headway.core.fleet import Model as Model

__version__: str
__all__: list[str]
