"""Cauchy's claims, and a rule for each."""

from __future__ import annotations

from headway.reproduce.claims import AtLeast, AtMost, Between, Claim, EverySeed

WORKLOADS = {"cnn-dailymail": "DailyMail", "sharegpt": "ShareGPT", "longwriter": "LongWriter"}
P90_S = {"cnn-dailymail": (25.57, 21.88), "sharegpt": (11.16, 10.68), "longwriter": (36.77, 32.83)}
"""Figure 10: P90 of E2E without and with autoscaling."""
TABLE_3 = {
    1: ((2.14, 2.32), (1505.23, 1636.24), (22.03, 20.16)),
    2: ((2.90, 3.14), (1525.31, 1630.15), (17.75, 16.38)),
    3: ((2.96, 3.22), (1231.35, 1329.15), (14.56, 14.47)),
}
"""By decode GPUs: goodput (requests/s), CE (K tokens/USD), mean E2E (s); basic round robin, then opportunistic."""
COMBINED = {"h800-h20": "H800 and H20", "h800-a800": "H800 and A800", "a800-h20": "A800 and H20"}
FEWER_TOKENS = {"cnn-dailymail": 0.03, "longwriter": 0.03}
LENGTHS = (256, 512, 1024)
"""Prompts of Figure 11 that nothing is fitted to."""
_DIRECTION = "the paper gives no figure for this workload"


def _figure_2() -> tuple[Claim, ...]:
    found = []
    for key, name in COMBINED.items():
        text = f"ShareGPT on two of each of {name}: split by type, they serve more tokens per USD than split alike."
        paper = "over 5%" if key == "h800-h20" else "superior"
        rule = AtLeast(0.05, unit="%") if key == "h800-h20" else AtLeast(0.0, share=1.0, unit="%")
        found.append(Claim(f"fig2-{key}", text, paper, rule))
    return tuple(found)


def _overall(workload: str, name: str) -> tuple[Claim, ...]:
    """Figures 6 and 7. The paper gives ranges over the three workloads: the rules take their lower ends."""
    p = f"{name}, demand that moves: "
    return (
        Claim(
            f"fig7-{workload}",
            f"{p}Cauchy has more tokens per USD than Melange.",
            "16.4-38.3%",
            AtLeast(0.164, unit="%"),
        ),
        Claim(
            f"fig7-star-{workload}",
            f"{p}so has CAUCHY*, aggregated combos with autoscaling.",
            "7.8-17.1%",
            AtLeast(0.078, unit="%"),
        ),
        Claim(
            f"fig7-order-{workload}",
            f"{p}CAUCHY* lies between Melange and Cauchy in tokens per USD.",
            "in between",
            EverySeed(),
        ),
        Claim(
            f"fig6-e2e-{workload}",
            f"{p}mean E2E is lower with Cauchy than with Melange.",
            "21.2-59.1%",
            AtLeast(0.212, unit="%"),
        ),
        Claim(f"fig6-ttft-{workload}", f"{p}so is mean TTFT.", "28.5-95.1%", AtLeast(0.285, unit="%")),
        Claim(
            f"fig6-tbt-{workload}", f"{p}so is the mean time per output token.", "18.9-61.5%", AtLeast(0.189, unit="%")
        ),
    )


def _programs(workload: str, name: str) -> tuple[Claim, ...]:
    """Figure 8."""
    found = []
    for other, effect in (("mce", 0.469), ("mc", 0.289)):
        known = workload == "cnn-dailymail"
        rule = AtLeast(effect, unit="%", exact=True) if known else AtLeast(0.0, share=1.0, unit="%", exact=True)
        text = f"{name}: the tokens asked for, per USD of the plan: CO-LP above {other.upper()}-LP."
        found.append(Claim(f"fig8-{other}-{workload}", text, f"{effect:.1%}" if known else "highest", rule))
    return tuple(found)


def _between(workload: str, name: str) -> tuple[Claim, ...]:
    """Figure 9."""
    known = workload == "longwriter"
    turns = AtLeast(0.254, unit="%") if known else AtLeast(0.0, share=1.0, unit="%")
    fewer = FEWER_TOKENS.get(workload)
    tokens = Between(-0.01, 0.01, unit="%") if fewer is None else AtLeast(fewer, unit="%")
    return (
        Claim(
            f"fig9-rr-{workload}",
            f"{name}, unlike combos: mean E2E with goodput-weighted turns is below that of equal turns.",
            "25.4%" if known else "lowest",
            turns,
        ),
        Claim(
            f"fig9-tokens-{workload}",
            f"{name}, unlike combos: goodput-weighted against token-weighted turns, mean E2E.",
            "within 1%" if fewer is None else "3-6% lower",
            tokens,
        ),
    )


def _within(num: int) -> tuple[Claim, ...]:
    """Table 3."""
    (low, high), (less, more), (slow, fast) = TABLE_3[num]
    p = f"1P{num}D of H800 and H20, ShareGPT: opportunistic scheduling "
    return (
        Claim(
            f"table3-goodput-1p{num}d",
            f"{p}has a higher goodput than strict round robin.",
            f"{high / low - 1:.1%}",
            AtLeast(round(high / low - 1, 3), unit="%"),
        ),
        Claim(
            f"table3-ce-1p{num}d",
            f"{p}serves more tokens per USD.",
            f"{more / less - 1:.1%}",
            AtLeast(round(more / less - 1, 3), unit="%"),
        ),
        Claim(
            f"table3-e2e-1p{num}d",
            f"{p}has a lower mean E2E at the load that round robin can serve.",
            f"{1 - fast / slow:.1%}",
            AtLeast(round(1 - fast / slow, 3), unit="%"),
        ),
    )


def _autoscaled(workload: str, name: str) -> Claim:
    before, after = P90_S[workload]
    text = f"{name}, demand that moves: autoscaling lowers the P90 of E2E against the plan for the mean demand."
    return Claim(
        f"fig10-{workload}", text, f"{1 - after / before:.1%}", AtLeast(round(1 - after / before, 3), unit="%")
    )


CLAIMS = (
    Claim(
        "fig1-prefill",
        "DailyMail on an H800: prefill is most of a request's latency.",
        "> 60%",
        AtLeast(0.6, share=1.0, unit="%", exact=True),
    ),
    Claim(
        "fig1-decode",
        "LongWriter on an H800: decode is nearly all of a request's latency.",
        "> 95%",
        AtLeast(0.95, share=1.0, unit="%", exact=True),
    ),
    *_figure_2(),
    Claim(
        "example-residual",
        "3.3.2's example: for a residual goodput of 0.80, CO-LP takes the A800 combo, not the H20 combo.",
        "the A800 combo",
        Between(1.0, 1.0, exact=True),
    ),
    Claim(
        "example-plan",
        "3.3.3's example: its plan fits the cluster's 8 GPUs of each type; of the scarcest it takes so many.",
        "feasible",
        AtMost(8.0, share=1.0, exact=True),
    ),
    *(claim for workload, name in WORKLOADS.items() for claim in _overall(workload, name)),
    *(claim for workload, name in WORKLOADS.items() for claim in _programs(workload, name)),
    Claim(
        "fig9-identical",
        "LongWriter, identical combos (as the paper has it): goodput-weighted below equal turns in mean E2E.",
        "25.4%",
        AtLeast(0.254, unit="%"),
    ),
    *(claim for workload, name in WORKLOADS.items() for claim in _between(workload, name)),
    *(claim for num in TABLE_3 for claim in _within(num)),
    *(_autoscaled(workload, name) for workload, name in WORKLOADS.items()),
    Claim(
        "fig11-2048",
        "2,048 tokens: eight streams, layer by layer, are faster than one bulk transfer (fitted, so no evidence).",
        "7.4x",
        AtLeast(7.4, neutral=1.0, unit="x", exact=True),
    ),
    *(
        Claim(
            f"fig11-{length}",
            f"{length:,} tokens: eight streams, layer by layer, are faster than one bulk transfer.",
            "3.4-5.5x",
            AtLeast(3.4, neutral=1.0, unit="x", exact=True),
        )
        for length in LENGTHS
    ),
    Claim("fig11-degree", "2,048 tokens: eight streams are best of 1 to 16.", "8", Between(8.0, 8.0, exact=True)),
    Claim(
        "eq18-8b",
        "Eq. 18, Llama-3.1-8B, 2,048 tokens on an A100: the network it asks for, in GB/s, to a factor of two.",
        "10 GB/s",
        Between(5.0, 20.0, unit=" GB/s", exact=True),
    ),
    Claim(
        "eq18-70b",
        "Eq. 18, the 70B model: the same.",
        "5 GB/s",
        Between(2.5, 10.0, unit=" GB/s", exact=True),
    ),
    Claim(
        "eq18-ratio",
        "Eq. 18: the 70B model asks for less than the 8B model.",
        "0.5x",
        AtMost(0.5, neutral=1.0, unit="x", exact=True),
    ),
)
