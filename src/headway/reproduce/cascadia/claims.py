"""What Cascadia says of its results, with the rule for each, fixed before the full run.

A share other than one half: bounds and directions are taken as the paper states them. Averages are over the cases of
Table 2, each at the rate at which the largest model alone needs an SLO scale of 12 (the paper's example has 11.88).
"""

from __future__ import annotations

from headway.reproduce.claims import AtLeast, AtMost, Claim, EverySeed


def _times(id: str, claim: str, paper: float) -> Claim:
    return Claim(id, claim, f"{paper:g}x", AtLeast(paper, neutral=1.0, unit="x"))


CASES = (("deepseek", 1, 90.0), ("deepseek", 1, 85.0), ("deepseek", 1, 80.0), ("deepseek", 2, 80.0),
         ("deepseek", 3, 80.0), ("deepseek", 3, 70.0))  # fmt: skip
"""(cascade, trace, quality) of Table 2."""
LLAMA = (("llama", 1, 80.0), ("llama", 2, 80.0))
END_TO_END = (
    _times("slo-stand-alone", "4.2, Fig. 5: the SLO scale for 95% attainment is 2.8 times a stand-alone model's.", 2.8),
    _times("slo-cascade-serve", "4.2, Fig. 5: CascadeServe needs an SLO scale 1.7 times as large.", 1.7),
    _times("throughput-stand-alone", "4.2, Fig. 6: throughput is 3 times a stand-alone model's.", 3.0),
    _times("throughput-cascade-serve", "4.2, Fig. 6: throughput is 1.7 times CascadeServe's.", 1.7),
    Claim("always-faster", "4.2: in every case the SLO scale is smaller than both baselines'.", "always", EverySeed()),
    Claim(
        "quality",
        "1: the required quality is kept, in the case where it is nearest to being missed.",
        "kept",
        AtLeast(0.0, share=1.0, unit=" points"),
    ),
    _times("ablation-parallelism", "4.3, Fig. 9: uniform parallelism costs 1.4 times.", 1.4),
    _times("ablation-allocation", "4.3, Fig. 9: uniform allocation costs 1.7 times.", 1.7),
    Claim(
        "cost-stand-alone",
        "L, Table 7: at quality 90, trace 1, a request costs 33% less than with a stand-alone model.",
        "33%",
        AtLeast(0.33, unit="%"),
    ),
    Claim(
        "cost-cascade-serve",
        "L, Table 7: at quality 90, trace 1, a request costs 29% less than with CascadeServe.",
        "29%",
        AtLeast(0.29, unit="%"),
    ),
    Claim(
        "plans-move",
        "E, Table 2: on trace 1, from quality 90 to 80, ever fewer requests and GPUs go to the largest model.",
        "50, 21, 11%; 20, 16, 12 GPUs",
        EverySeed(),
    ),
    Claim(
        "no-largest",
        "E, Table 2: on trace 3, at quality 80 and 70, the largest model gets no GPUs.",
        "0 GPUs",
        EverySeed(),
    ),
    Claim("plan-time", "4.4, Fig. 10: for 32 GPUs, scheduling takes 20 s.", "20 s", AtMost(20.0, share=1.0, unit=" s")),
)
JUDGE = (
    Claim(
        "judge-time",
        "N: a judge that takes no time lowers latency by less than 5%.",
        "<5%",
        AtMost(0.05, share=1.0, unit="%"),
    ),
)
SARATHI = (_times("sarathi", "F, Table 4: at quality 90, trace 1, throughput is 1.32 times Sarathi-Serve's.", 1.322),)
FIGURE_7 = (_times("slo-llama", "4.2, Fig. 7: with Llama models, a stand-alone model needs 2.6 times the scale.", 2.6),)
OPTIMALITY = (
    Claim(
        "optimality",
        "J: plans are within 6% of exhaustive search.",
        "2-6%",
        AtMost(0.06, share=1.0, unit="%"),
    ),
    Claim(
        "search-effort",
        "J: the search is 15 times as fast as exhaustive search; here, by the simulations that it asks for.",
        "15x",
        AtLeast(15.0, neutral=1.0, unit="x"),
    ),
)
CLAIMS = (*END_TO_END, *JUDGE, *SARATHI, *FIGURE_7, *OPTIMALITY)
