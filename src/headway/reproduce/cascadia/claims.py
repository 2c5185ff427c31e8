"""What Cascadia says of its results, with the rule for each, fixed before the full run.

A share other than one half: bounds and directions are taken as the paper states them. Rows marked "Beyond" are not the
paper's: their rules ask for the direction. Averages are over the cases of Table 2 unless a row says otherwise, each at
the rate at which the largest model alone needs an SLO scale of 12 (the paper's example has 11.88).
"""

from __future__ import annotations

from headway.reproduce.claims import AtLeast, AtMost, Between, Claim, EverySeed


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
OTHER_CASES = (("deepseek", 2, 90.0), ("deepseek", 3, 90.0), ("deepseek", 3, 85.0))
"""Those that Tables 4 and 7 have, and the example of 4.2."""
QUALITY_90 = (CASES[0], *OTHER_CASES[:2])
"""Of Tables 4 and 7."""
FIGURE_1 = (
    Claim("size-latency", "1, Fig. 1: the larger the model, the longer a request takes, and the better.", "rises",
          EverySeed()),
)  # fmt: skip
FIGURE_2 = (
    _times("strategy-effect", "2, Fig. 2: the best parallelism has up to 3 times the throughput of the worst.", 3.0),
    Claim("strategy-varies", "2, Fig. 2: which is best depends on model and lengths.", "varies", EverySeed()),
)
TABLE_1 = (
    Claim("simulator", "B, Table 1: throughput of 7 shapes, scaled by one factor, is 2% to 7.7% off; here, the mean.",
          "2-7.7%", AtMost(0.077, share=1.0, unit="%")),
)  # fmt: skip
OTHERS = (
    _times("example-85-3", "4.2: on trace 3 at quality 85, the SLO scale is 3.75 in place of 11.88.", 3.17),
    Claim("cost-stand-alone-all", "L, Table 7: over the traces, a request costs 50% less than with one model.", "50%",
          AtLeast(0.50, unit="%")),
    Claim("cost-cascade-serve-all", "L, Table 7: over the traces, a request costs 29% less than with CascadeServe.",
          "29%", AtLeast(0.29, unit="%")),
)  # fmt: skip
SARATHI_ALL = (_times("sarathi-all", "F, Table 4: over the traces, throughput is 1.64 times Sarathi-Serve's.", 1.64),)
SHAPE = (
    Claim("other-shape", "4.3: at (90, 1), half the tensor parallelism costs the middle model 33.7%.", "33.7%",
          AtLeast(0.337, unit="%")),
)  # fmt: skip
SIZES = (Claim("plan-time-80", "4.4, Fig. 10: for 80 GPUs, scheduling takes less than a minute.", "60 s",
               AtMost(60.0, share=1.0, unit=" s")),)  # fmt: skip
DRIFT = (
    Claim("drift-stand-alone", "G, Table 5: under drift, the SLO scale is 45% below a stand-alone model's.", "45%",
          AtLeast(0.45, unit="%")),
    Claim("drift-cascade-serve", "G, Table 5: under drift, the SLO scale is 34% below CascadeServe's.", "34%",
          AtLeast(0.34, unit="%")),
    _times("drift-throughput", "4.4, Fig. 11: under drift, 2.2 times as much is done; here, within an SLO scale of 12.",
           2.2),
    Claim("drift-static", "Beyond: planning anew has a lower SLO scale than the first plan kept.", "below",
          AtLeast(0.0, share=1.0, unit="%")),
    Claim("drift-quality", "G: the required quality is kept while plans change.", "kept",
          AtLeast(0.0, share=1.0, unit=" points")),
)  # fmt: skip
ROUTER = (
    Claim("route-llm-slo", "I: with Llama models, the SLO scale is 21.3% below RouteLLM's.", "21.3%",
          AtLeast(0.213, unit="%")),
    Claim("route-llm-throughput", "I: with Llama models, throughput is 18.8% above RouteLLM's.", "18.8%",
          AtLeast(0.188, unit="%")),
)  # fmt: skip
WEAKER = (
    Claim("judge-mini-routing", "K, Table 6: a judge like GPT-4o-mini sends on 11.1% more.", "+11.1%",
          AtMost(0.111, share=1.0, unit="%")),
    Claim("judge-mini-latency", "K, Table 6: with it, latency rises by 6.8%.", "+6.8%",
          AtMost(0.068, share=1.0, unit="%")),
    Claim("judge-llama-routing", "K, Table 6: a judge like Llama 3.1 70B sends on 9.4% more.", "+9.4%",
          AtMost(0.094, share=1.0, unit="%")),
    Claim("judge-llama-latency", "K, Table 6: with it, latency rises by 5.5%.", "+5.5%",
          AtMost(0.055, share=1.0, unit="%")),
    Claim("judge-weak-quality", "K: with either, the quality is kept.", "kept",
          AtLeast(0.0, share=1.0, unit=" points")),
)  # fmt: skip
TRAINED = (
    Claim("judge-trained", "N: a judge trained on 70% of the answers falls short by 8% on the others.", "8%",
          AtLeast(0.08, unit="%")),
)  # fmt: skip
CACHES = (
    Claim("prefix-latency", "M: prefix caching lowers latency by about 2%.", "2%", Between(-0.05, 0.05, unit="%")),
    Claim("prefix-plan", "M: prefix caching leaves GPUs per model as they are.", "same", EverySeed()),
)
BUDGET = (
    Claim("latency-budget", "C: asked for a latency, the planner finds the quality that takes it, to half a point.",
          "same", AtLeast(-0.5, neutral=-0.5, share=1.0, unit=" points")),
)  # fmt: skip
SOME = (
    Claim("some-stand-alone", "Beyond: on trace 1, the SLO scale of a cascade that may leave out small models, against "
          "one model.", "better", AtLeast(1.0, neutral=1.0, share=1.0, unit="x")),
    Claim("some-cascadia", "Beyond: on trace 1, the SLO scale of a cascade that may leave out small models, against "
          "all models.", "better", AtLeast(1.0, neutral=1.0, share=1.0, unit="x")),
)  # fmt: skip
SARATHI = (_times("sarathi", "F, Table 4: at quality 90, trace 1, throughput is 1.32 times Sarathi-Serve's.", 1.322),)
FIGURE_7 = (_times("slo-llama", "4.2, Fig. 7: with Llama models, a stand-alone model needs 2.6 times the scale.", 2.6),)
REGRET = (
    Claim("regret-low", "Beyond: with a judge 9 points too low (sd 8), a plan by its scores is slower than one "
          "that knows it.", "slower", AtLeast(0.0, share=1.0, unit=" s")),
    Claim("regret-high", "Beyond: with a judge 9 points too high (sd 8), a plan by its scores falls short of the "
          "quality.", "short", AtLeast(0.0, share=1.0, unit=" points")),
    Claim("regret-known", "Beyond: with either judge, a plan that knows it keeps the quality.", "kept", EverySeed()),
)  # fmt: skip
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
CLAIMS = (
    *FIGURE_1, *FIGURE_2, *TABLE_1, *END_TO_END, *OTHERS, *SHAPE, *SIZES, *DRIFT, *SARATHI, *SARATHI_ALL, *FIGURE_7,
    *ROUTER, *OPTIMALITY, *WEAKER, *JUDGE, *TRAINED, *CACHES, *BUDGET, *SOME,
    *REGRET,
)  # fmt: skip
