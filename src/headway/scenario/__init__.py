"""A scenario file, its parts, and a run: the only place where the parts meet."""

from headway.config.scenario import Scenario, variant, variants
from headway.scenario.run import (
    Lines,
    Progress,
    Simulator,
    assemble,
    compare,
    load,
    policies_of,
    provenance,
    records_of,
    run,
)

__all__ = [
    "Lines", "Progress", "Scenario", "Simulator", "assemble", "compare", "load", "policies_of", "provenance",
    "records_of", "run", "variant", "variants",
]  # fmt: skip
