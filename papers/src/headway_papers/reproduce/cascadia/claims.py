"""Cascadia's claims, from `claims.yaml`, and the cases of its tables."""

from __future__ import annotations

from headway_papers.reproduce.claims import read_claims

CASES = (
    ("deepseek", 1, 90.0),
    ("deepseek", 1, 85.0),
    ("deepseek", 1, 80.0),
    ("deepseek", 2, 80.0),
    ("deepseek", 3, 80.0),
    ("deepseek", 3, 70.0),
)
"""(cascade, trace, quality) of Table 2."""
LLAMA = (("llama", 1, 80.0), ("llama", 2, 80.0))
ALL_CASES = tuple(("deepseek", trace, quality) for trace in (1, 2, 3) for quality in (90.0, 85.0, 80.0, 70.0))
"""The cases of Figures 5 and 6."""
QUALITY_90 = tuple(case for case in ALL_CASES if case[2] == 90.0)
"""The cases of Tables 4 and 7."""
EXAMPLE = ("deepseek", 3, 85.0)
"""The example of 4.2."""
_GROUPS = read_claims(__package__)
(
    FIGURE_1, FIGURE_2, TABLE_1, END_TO_END, ABLATIONS, LENGTHS, SHAPE, SIZES, DRIFT, SARATHI, FIGURE_7, ROUTER,
    OPTIMALITY, WEAKER, JUDGE, TRAINED, CACHES, BUDGET, SOME, REGRET, FOR_THROUGHPUT, OWN_LOAD,
) = _GROUPS.values()  # fmt: skip
CLAIMS = tuple(claim for group in _GROUPS.values() for claim in group)
