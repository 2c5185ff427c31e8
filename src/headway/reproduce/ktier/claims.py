"""K-tier Llumnix's claims: those of its printed tables, and the others from `claims.yaml`."""

from __future__ import annotations

from dataclasses import dataclass

from headway.reproduce.claims import AtLeast, Claim, read_claims

MIXES = ("uniform", "gaussian", "enterprise")
SCALES = {"10k": 10_000, "15k": 15_000}
TABLE_TIERS = (3, 4, 5)
METRICS = {
    "prefill-p99": "prefill P99",
    "prefill-mean": "prefill mean",
    "e2e-p99": "E2E P99",
    "e2e-mean": "E2E mean",
    "cost": "cost per latency",
}
"""Columns of Tables 2 to 4. Prefill is the time to the first token, waiting included."""


@dataclass(frozen=True)
class PrintedRow:
    """A row of Tables 2 to 4: speed-ups over INFaaS with vLLM, and the improvement in cost per latency."""

    prefill_p99: float
    prefill_mean: float
    e2e_p99: float
    e2e_mean: float
    cost: float

    def value(self, metric: str) -> float:
        """By a key of `METRICS`."""
        return float(getattr(self, metric.replace("-", "_")))


PRINTED = {
    ("uniform", "10k", 3): PrintedRow(4.79, 8.23, 2.87, 2.80, 0.65),
    ("uniform", "10k", 4): PrintedRow(4.87, 8.23, 3.13, 2.88, 0.68),
    ("uniform", "10k", 5): PrintedRow(4.16, 8.11, 3.04, 2.92, 0.67),
    ("uniform", "15k", 3): PrintedRow(2.98, 5.00, 1.87, 1.97, 0.46),
    ("uniform", "15k", 4): PrintedRow(3.16, 5.16, 2.12, 2.08, 0.53),
    ("uniform", "15k", 5): PrintedRow(2.72, 5.07, 2.04, 2.12, 0.51),
    ("gaussian", "10k", 3): PrintedRow(3.24, 7.47, 2.26, 2.45, 0.56),
    ("gaussian", "10k", 4): PrintedRow(4.25, 8.33, 3.07, 2.79, 0.67),
    ("gaussian", "10k", 5): PrintedRow(3.49, 7.51, 2.43, 2.74, 0.59),
    ("gaussian", "15k", 3): PrintedRow(2.00, 4.68, 1.49, 1.71, 0.33),
    ("gaussian", "15k", 4): PrintedRow(2.70, 5.24, 2.02, 1.96, 0.51),
    ("gaussian", "15k", 5): PrintedRow(2.25, 4.88, 1.97, 1.67, 0.41),
    ("enterprise", "10k", 3): PrintedRow(3.10, 8.06, 2.18, 2.27, 0.54),
    ("enterprise", "10k", 4): PrintedRow(4.41, 8.28, 3.02, 2.79, 0.67),
    ("enterprise", "10k", 5): PrintedRow(4.12, 8.14, 2.96, 2.89, 0.66),
    ("enterprise", "15k", 3): PrintedRow(1.77, 4.51, 1.31, 1.44, 0.24),
    ("enterprise", "15k", 4): PrintedRow(2.76, 5.04, 1.94, 1.95, 0.48),
    ("enterprise", "15k", 5): PrintedRow(2.61, 5.06, 1.97, 2.08, 0.49),
}
"""Tables 2, 3 and 4: (mix, requests, K)."""


def cost_improvement(e2e_p99_speed_up: float) -> float:
    """What a request's P99 costs less: the fleet is the same, so `1 - 1 / speed-up`.

    The paper gives no definition. This one matches 17 of its 18 numbers to a percentage point; the exception is
    Gaussian, 15,000 requests, K = 5, with 41% where its P99 says 49% and its mean 40%.
    """
    return 1.0 - 1.0 / e2e_p99_speed_up


def table_claims() -> tuple[Claim, ...]:
    """A row for each column of Tables 2 to 4 at K = 4, which the paper finds best."""
    claims = []
    for mix in MIXES:
        for scale, num in SCALES.items():
            for metric, words in METRICS.items():
                value = PRINTED[mix, scale, 4].value(metric)
                where = f"{mix}, {num:,} requests, K=4"
                if metric == "cost":
                    text, paper, rule = f"{where}: {words} improves.", f"{value:.0%}", AtLeast(value, unit="%")
                else:
                    text, paper = f"{where}: {words} is so much faster than with INFaaS and vLLM.", f"{value}x"
                    rule = AtLeast(value, neutral=1.0, unit="x")
                claims.append(Claim(f"{mix}-{scale}-{metric}", text, paper, rule))
    return tuple(claims)


def _peak(mix: str) -> Claim:
    """K = 4 against the better of its neighbours, 10,000 requests."""
    three, four, five = (PRINTED[mix, "10k", k].e2e_p99 for k in TABLE_TIERS)
    lead = round(four - max(three, five), 2)
    text = f"{mix}: the speed-up of E2E P99 is highest with four tiers."
    return Claim(f"{mix}-peak", text, f"{lead}x ahead of K=3 and K=5", AtLeast(lead, unit="x"))


_GROUPS = read_claims(__package__)
CLAIMS = (
    *_GROUPS["tiers"], *_GROUPS["parity"], *table_claims(), *(_peak(mix) for mix in MIXES), *_GROUPS["seats"],
    *_GROUPS["trade-offs"], *_GROUPS["sustained-load"],
)  # fmt: skip
"""Of sections 5.1, 5.2, 5.3 (Tables 2 to 4, their best K, and what such numbers would need), 6.2 and 6.5."""
