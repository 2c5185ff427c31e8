"""What K-tier Llumnix claims: its tables as printed, and a rule for each claim."""

from __future__ import annotations

from dataclasses import dataclass

from headway.reproduce.claims import AtLeast, AtMost, Between, Claim, EverySeed

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
    found = []
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
                found.append(Claim(f"{mix}-{scale}-{metric}", text, paper, rule))
    return tuple(found)


def _peak(mix: str) -> Claim:
    """K = 4 against the better of its neighbours, 10,000 requests."""
    three, four, five = (PRINTED[mix, "10k", k].e2e_p99 for k in TABLE_TIERS)
    lead = round(four - max(three, five), 2)
    text = f"{mix}: the speed-up of E2E P99 is highest with four tiers."
    return Claim(f"{mix}-peak", text, f"{lead}x ahead of K=3 and K=5", AtLeast(lead, unit="x"))


_LATENCY_SHARE = 0.15
"""By how much an absolute latency may differ: another step-time model, other percentiles of unprinted lengths."""

CLAIMS = (
    # Section 5.1: tiers differ.
    Claim(
        "k1-median",
        "Without tiers (K=1), 10,000 requests at 1,250/s take 10 to 12 s, median E2E.",
        "10-12 s",
        Between(round(10 * (1 - _LATENCY_SHARE), 2), round(12 * (1 + _LATENCY_SHARE), 2), unit=" s"),
    ),
    Claim(
        "k3-gap",
        "uniform, K=3: tier 0 has a tenth of tier 2's median TTFT.",
        "0.3 s against 3 s",
        AtMost(0.1, neutral=1.0, unit="x"),
    ),
    Claim(
        "k5-ends",
        "uniform, K=5: tier 0 has the shortest P99 of E2E, tier 4 the longest.",
        "as in Figure 5",
        EverySeed(),
    ),
    Claim(
        "k5-narrower",
        "uniform: tiers in the middle lie closer together with K=5 than with K=3 (tiers 1 and 2, median TTFT).",
        "as in Figure 5",
        EverySeed(),
    ),
    Claim("k5-p99", "uniform: E2E P99 of all rises a little from K=3 to K=5.", "slightly", Between(0.0, 0.1, unit="%")),
    Claim(
        "gaussian-tier0",
        "gaussian, K=5: tier 0's median TTFT is below 0.5 s.",
        "< 0.5 s",
        AtMost(0.5, share=1.0, unit=" s"),
    ),
    Claim(
        "gaussian-last",
        "gaussian: the lowest tier's P99 of E2E is longer with K=5 than with K=3.",
        "significantly worse",
        EverySeed(),
    ),
    Claim(
        "enterprise-middle",
        "enterprise, K=5: tiers 1 and 2 are kept apart from tier 4: their median TTFT is at most half of its.",
        "isolated",
        AtMost(0.5, share=1.0, unit="x"),
    ),
    Claim(
        "enterprise-largest",
        "enterprise has the largest speed-up of E2E P99 of the three mixes (10,000 requests, K=4).",
        "consistently (5.1); not so in Tables 2-4",
        EverySeed(),
    ),
    # Section 5.2: parity at 10 requests/s, and no collapse.
    Claim(
        "parity-p99",
        "10 requests/s, K=1: E2E P99 with Llumlet.",
        "1.58 s",
        Between(round(1.58 * (1 - _LATENCY_SHARE), 3), round(1.58 * (1 + _LATENCY_SHARE), 3), unit=" s"),
    ),
    Claim(
        "parity-schedulers",
        "10 requests/s, K=1: E2E P99 of Llumlet against vLLM, Orca and Sarathi: the farthest of the three.",
        "within 3.2%",
        Between(-0.05, 0.05, unit="%"),
    ),
    Claim(
        "parity-vllm",
        "10 requests/s, K=1: vLLM's E2E P99 lies above that of the others' mean.",
        "2.8%",
        AtLeast(0.028, unit="%"),
    ),
    Claim(
        "parity-tiers",
        "10 requests/s: E2E P99 of Llumlet at its worst K of 2 to 10, against K=1.",
        "+1.6%",
        AtMost(0.05, share=1.0, unit="%"),
    ),
    Claim(
        "parity-decode",
        "10 requests/s, K=10: mean decode time against vLLM with round robin.",
        "stable and slightly better",
        AtMost(0.0, share=1.0, unit="%"),
    ),
    Claim(
        "overhead-prefill",
        "10 requests/s: from K=1 to K=10, mean prefill time grows by a larger share than mean decode time.",
        "concentrated in prefill",
        AtLeast(0.0, share=1.0, unit="%"),
    ),
    Claim(
        "k10-tail",
        "uniform, 1,250 requests/s: ten tiers do not make E2E P99 collapse: at most 1.5 times that of K=1.",
        "no collapse",
        AtMost(1.5, share=1.0, unit="x"),
    ),
    # Section 5.3: Tables 2 to 4.
    *table_claims(),
    *(_peak(mix) for mix in MIXES),
    # What such numbers would need: the paper's public Llumlet counts neither seats nor the KV cache of who decodes.
    Claim(
        "seats-prefill-mean",
        "uniform, K=4, 10,000 requests: prefill mean with seats and memory for all, over vLLM with 64 seats.",
        "8.23x",
        AtLeast(8.23, neutral=1.0, unit="x"),
    ),
    Claim("seats-e2e-mean", "The same: E2E mean.", "2.88x", AtLeast(2.88, neutral=1.0, unit="x")),
    # Section 6.2.
    Claim(
        "tier0-gains",
        "uniform, K=4, 10,000 requests: tier 0 is faster than with INFaaS and vLLM (mean E2E).",
        "the intended trade",
        EverySeed(),
    ),
    Claim(
        "last-tier-pays",
        "uniform, K=4, 10,000 requests: tier 3 is slower than with INFaaS and vLLM (mean E2E).",
        "the intended trade",
        EverySeed(),
    ),
    Claim(
        "load-effect",
        "uniform, K=4: the speed-up of E2E P99 with 15,000 requests against that with 10,000.",
        "0.68x",
        AtMost(0.68, neutral=1.0, unit="x"),
    ),
    # Section 6.5: what the paper leaves to others. Sustained load, a small KV cache, tier by tier.
    Claim(
        "sustained-tier0",
        "enterprise, K=4, 280 requests/s on small KV caches: tier 0's P99 TTFT against INFaaS with the same batches.",
        "asked for (6.5)",
        AtMost(0.5, share=1.0, unit="x"),
    ),
    Claim(
        "headroom-tier0",
        "The same: headroom shortens tier 0's P99 TTFT by a tenth at least.",
        "asked for (6.5)",
        AtLeast(0.1, share=1.0, unit="%"),
    ),
)
