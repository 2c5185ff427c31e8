"""A scenario file, its parts, and a run: the only place where the parts meet."""

from headway.scenario.run import (
    Lines,
    Progress,
    Scenario,
    assemble,
    compare,
    load,
    policies_of,
    provenance,
    records_of,
    run,
    variant,
    variants,
)

__all__ = [
    "Lines", "Progress", "Scenario", "assemble", "compare", "load", "policies_of", "provenance", "records_of", "run",
    "variant", "variants",
]  # fmt: skip
