"""SageServe's claims, from `claims.yaml`."""

from __future__ import annotations

from headway.reproduce.claims import read_claims

USD_PER_HOUR = 98.32
"""Price of an instance (7.2.1). The claim usd-saved expects 85 of 362.25 instance-hours at this price."""
_GROUPS = read_claims(__package__)
SILOS, HOURS, WASTE, TAILS, CHIRON, BEYOND, NOVEMBER, ABLATIONS, SCOUTS, BURST, WEEK, ORDER = _GROUPS.values()
DAY = (*HOURS, *WASTE, *TAILS)
ALONE = (*CHIRON, *BEYOND)
CLAIMS = tuple(claim for group in _GROUPS.values() for claim in group)
