"""The comparisons of Headway's policies with others.

There is no paper to compare with: the rules require that one set of policies for all cases loses nothing.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from headway_papers.reproduce.claims import AtLeast, AtMost, Claim

RATIO: Literal["over"] = "over"
DIFFERENCE: Literal["less"] = "less"


@dataclass(frozen=True)
class PolicyComparison:
    """A claim on `number` with Headway's policies, divided by or minus its value with the policies `other`."""

    id: str
    text: str
    part: str
    """One of `runs.PARTS`."""
    other: str
    number: str
    """A key of `runs.measure`."""
    how: Literal["over", "less"]
    limit: float
    """The largest ratio, or difference in late answers; or the smallest difference in SLO attainment."""

    @property
    def claim(self) -> Claim:
        better_is_more = self.how == DIFFERENCE and self.number.endswith("slo")
        rule = AtLeast if better_is_more else AtMost
        paper = "the other policies" if self.part == "all" else "the paper's own"
        return Claim(
            self.id, self.text, paper, rule(self.limit, share=1.0, unit="%" if self.how == DIFFERENCE else "x")
        )


ROWS = (
    PolicyComparison("pascal-tail", "PASCAL's fleet: P99 of the first answering token, over PASCAL's.",
        "pascal", "pascal", "answer_p99_s", RATIO, 1.02),
    PolicyComparison("pascal-pace", "PASCAL's fleet: answers behind their reader, less PASCAL's.",
        "pascal", "pascal", "behind", DIFFERENCE, 0.005),
    PolicyComparison("ktier-burst", "K-tier's burst: P99 of tier 0's first token, over K-tier Llumnix's.",
        "ktier burst", "k-tier", "tier0_ttft_p99_s", RATIO, 1.02),
    PolicyComparison("ktier-steady", "K-tier's fleet at 150 requests/s: P99 of the first token, over K-tier Llumnix's.",
        "ktier steady", "k-tier", "ttft_p99_s", RATIO, 1.02),
    PolicyComparison("ktier-moves", "K-tier's fleet at 150 requests/s: moves, over K-tier Llumnix's.",
        "ktier steady", "k-tier", "moves", RATIO, 1.0),
    PolicyComparison("cauchy-slo", "Cauchy's three unlike combos at 55 requests/s: SLO attainment, less Cauchy's.",
        "cauchy", "cauchy", "slo", DIFFERENCE, 0.0),
    PolicyComparison("cauchy-e2e", "Cauchy's three unlike combos at 55 requests/s: mean E2E, over Cauchy's.",
        "cauchy", "cauchy", "e2e_mean_s", RATIO, 1.0),
    PolicyComparison("sageserve-slo", "SageServe's regions under LT-UA: SLO attainment, less that of its routing.",
        "sageserve", "sageserve", "slo", DIFFERENCE, 0.0),
    PolicyComparison("sageserve-cost", "SageServe's regions under LT-UA: cost, over that of its routing.",
        "sageserve", "sageserve", "usd", RATIO, 1.02),
    PolicyComparison("cascadia-e2e", "Cascadia's fleet for trace 1: P95 of E2E, over that of the least loaded replica.",
        "cascadia", "least loaded", "e2e_p95_s", RATIO, 1.02),
    PolicyComparison("all-tiers", "All at once: SLO attainment of tier 0, less that of first come, first served.",
        "all", "without tiers", "tier0_slo", DIFFERENCE, 0.0),
    PolicyComparison("all-forecast", "All at once: SLO attainment, less that of scaling by load.",
        "all", "by load", "slo", DIFFERENCE, 0.0),
    PolicyComparison("all-forecast-cost", "All at once: GPU hours, over those of scaling by load.",
        "all", "by load", "gpu_hours", RATIO, 1.0),
)  # fmt: skip
