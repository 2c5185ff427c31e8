"""PASCAL's claims, from `claims.yaml`."""

from __future__ import annotations

from headway.reproduce.claims import read_claims

_GROUPS = read_claims(__package__)
PHASES, ALPACA, WORSE, ARENA, MIGRATION, HEAVY, ORACLE, TRACE = _GROUPS.values()
CLAIMS = tuple(claim for group in _GROUPS.values() for claim in group)
