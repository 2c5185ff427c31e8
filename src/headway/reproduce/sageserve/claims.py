"""What SageServe says of its results, with the rule for each, fixed before the full run.

Directions are asked for where the paper has no number. That tails are no worse is asked for as it stands.
"""

from __future__ import annotations

from headway.reproduce.claims import AtLeast, AtMost, Claim, EverySeed, Rule

_UP = AtLeast(0.0, share=1.0, unit="%")
_NO_WORSE = AtMost(0.0, share=1.0, unit="%")


def _cut(effect: float) -> Rule:
    return AtLeast(effect, unit="%")


SILOS = (
    Claim(
        "unified-hours", "4, Fig. 8: a pool for all tiers takes 34.5% fewer instance-hours than silos.", "34.5%",
        _cut(0.345),
    ),
    Claim(
        "unified-tail", "4, Table 1: and the interactive tiers' P95 TTFT stays within 12%.", "12%",
        AtMost(0.12, share=1.0, unit="%"),
    ),
    Claim("unified-spot", "4: and more instance-hours go to spot instances.", "52 hours more", _UP),
)  # fmt: skip
HOURS = (
    Claim("lt-i-hours", "7.2.1: LT-I takes 24.21% fewer instance-hours than reactive scaling.", "24.2%", _cut(0.2421)),
    Claim("lt-u-hours", "7.2.1: LT-U takes 19.65% fewer instance-hours than reactive scaling.", "19.7%", _cut(0.1965)),
    Claim("lt-ua-hours", "7.2.1: LT-UA takes 23.38% fewer than reactive scaling.", "23.4%", _cut(0.2338)),
    Claim(
        "chiron-hours", "7.2.3, Fig. 11: Chiron takes 3.17 times reactive scaling's instance-hours.", "3.17x",
        AtLeast(3.17, neutral=1.0, unit="x"),
    ),
)  # fmt: skip
WASTE = tuple(
    Claim(
        f"{name}-waste", f"7.2.4, Fig. 13b: {name.upper()} wastes 70% less GPU time on starting instances.", "70%",
        _cut(0.7),
    )
    for name in ("lt-i", "lt-u", "lt-ua")
)  # fmt: skip
TAILS = (
    Claim("lt-i-tail", "7.2.2, Fig. 13a: LT-I's P90 TTFT is worse than reactive scaling's.", "worse", _UP),
    Claim("lt-u-tail", "7.2.2, Fig. 13a: LT-U's P90 TTFT is no worse than reactive scaling's.", "no worse", _NO_WORSE),
    Claim("lt-ua-tail", "7.2.2, Fig. 13a: nor is LT-UA's.", "no worse", _NO_WORSE),
)
BURST = (
    Claim("burst-lt-u", "7.2.7, Fig. 16a: in an 8x burst, P95 TTFT is lower with LT-UA than with LT-U.", "lower", _UP),
    Claim("burst-lt-i", "7.2.7, Fig. 16a: and lower than with LT-I.", "lower", _UP),
)
_POINTS = {
    "edf": (0.14, 0.09, "45% to 31%", "25% to 34%"),
    "pf": (0.21, 0.35, "45% to 24%", "25% to 60%"),
    "dpa": (0.17, 0.13, "45% to 28%", "25% to 38%"),
}
ORDER = (
    *(
        Claim(
            f"{name}-fast", f"7.2.6, Fig. 15b: {name.upper()} lowers the fast tier's SLA violations.", paper, _cut(fast)
        )
        for name, (fast, _, paper, _) in _POINTS.items()
    ),
    *(
        Claim(
            f"{name}-normal", f"7.2.6, Fig. 15b: {name.upper()} raises the normal tier's SLA violations.", paper,
            _cut(normal),
        )
        for name, (_, normal, _, paper) in _POINTS.items()
    ),
    Claim(
        "order-fast", "7.2.6: violations of the fast tier are fewest with PF, then DPA, EDF and FCFS.", "PF first",
        EverySeed(),
    ),
    Claim("order-normal", "7.2.6: and of the normal tier the other way round.", "FCFS first", EverySeed()),
)  # fmt: skip
CLAIMS = (*SILOS, *HOURS, *WASTE, *TAILS, *BURST, *ORDER)
