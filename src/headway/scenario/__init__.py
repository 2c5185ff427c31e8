"""A scenario file, its parts, and a run. Only this package combines the parts."""

from headway.config.scenario import Scenario, StepTimes, variant, variants
from headway.scenario.policies import policies_of
from headway.scenario.run import Progress, Simulator, assemble, compare, load, provenance, replicate, run

__all__ = [
    "Progress", "Scenario", "Simulator", "StepTimes", "assemble", "compare", "load", "policies_of", "provenance",
    "replicate", "run", "variant", "variants",
]  # fmt: skip
