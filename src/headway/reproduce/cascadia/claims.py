"""Cascadia's claims, from `claims.yaml`, and the cases of its tables."""

from __future__ import annotations

from headway.reproduce.claims import read_claims

CASES = (("deepseek", 1, 90.0), ("deepseek", 1, 85.0), ("deepseek", 1, 80.0), ("deepseek", 2, 80.0),
         ("deepseek", 3, 80.0), ("deepseek", 3, 70.0))  # fmt: skip
"""(cascade, trace, quality) of Table 2."""
LLAMA = (("llama", 1, 80.0), ("llama", 2, 80.0))
OTHER_CASES = (("deepseek", 2, 90.0), ("deepseek", 3, 90.0), ("deepseek", 3, 85.0))
"""Further cases of Tables 4 and 7, and the example of 4.2."""
QUALITY_90 = (CASES[0], *OTHER_CASES[:2])
"""The cases of Tables 4 and 7."""
_GROUPS = read_claims(__package__)
(
    FIGURE_1, FIGURE_2, TABLE_1, END_TO_END, OTHER_COSTS, SHAPE, SIZES, DRIFT, SARATHI, SARATHI_ALL, FIGURE_7, ROUTER,
    OPTIMALITY, WEAKER, JUDGE, TRAINED, CACHES, BUDGET, SOME, REGRET,
) = _GROUPS.values()  # fmt: skip
CLAIMS = tuple(claim for group in _GROUPS.values() for claim in group)
