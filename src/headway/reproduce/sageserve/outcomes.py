"""What the runs of SageServe's evaluation came to."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from statistics import fmean
from typing import Any

from headway.reproduce import charts
from headway.reproduce.findings import Figure, Outcome, Table
from headway.reproduce.sageserve.runs import (
    CHIRON,
    LT_I,
    LT_U,
    LT_UA,
    ORDERINGS,
    REACTIVE,
    SILOED,
    STRATEGIES,
)

_LONG_TERM = (LT_I, LT_U, LT_UA)


class Outcomes:
    """Values by claim, and charts, of what was run."""

    def __init__(self, found: Mapping[tuple[Any, ...], Any], seeds: Sequence[int], tps: float) -> None:
        self._found, self._seeds, self._tps = found, seeds, tps

    def outcomes(self) -> dict[str, Outcome]:
        """Of all claims whose runs are there."""
        made: dict[str, Outcome] = {}
        if self._has("day", SILOED):
            made |= self._silos()
        if self._has("day", CHIRON):
            made["chiron-hours"] = Outcome(
                [
                    a / b
                    for a, b in zip(self._day(CHIRON, "instance_hours"), self._reactive("instance_hours"), strict=True)
                ],
                f"Instance-hours: {self._means((REACTIVE, CHIRON), 'instance_hours')}.",
            )
        for name in _LONG_TERM if self._has("day", LT_I) else ():
            made |= self._long_term(name)
        if self._has("burst", LT_UA):
            made |= self._burst()
        if self._has("order", "fcfs"):
            made |= self._order()
        return made

    def exhibits(self) -> list[Figure | Table]:
        """In the paper's order."""
        made: list[Figure | Table] = []
        days = [name for name in STRATEGIES if self._has("day", name)]
        if days:
            shows = (
                "Instances of Llama-2-70B in all regions, 15 minutes at a time, from 11:00 on; starting ones included."
            )
            curves = charts.curves(self._instances("day", days), "hours", "instances")
            made += [Figure("Figure 11", "Instances over the day", shows, curves), self._table(days)]
        if self._has("order", "fcfs"):
            bars = {
                label: [[100 * share for share in self._violations(name, tier)] for name in ORDERINGS]
                for label, tier in (("fast", "0"), ("normal", "1"))
            }
            shows = "SLA violations of the interactive tiers: first tokens later than 1 s, and than 60 s."
            made.append(Figure("Figure 15b", "Orderings", shows, charts.bars(list(ORDERINGS), bars, "violations (%)")))
        if self._has("burst", LT_UA):
            shows = "Instances in all regions. Eight times the load comes from 1.58 h to 2 h."
            curves = charts.curves(self._instances("burst", _LONG_TERM), "hours", "instances")
            made.append(Figure("Figure 16a", "A burst", shows, curves))
        return made

    def _silos(self) -> dict[str, Outcome]:
        hours = f"Instance-hours: {self._means((SILOED, REACTIVE), 'instance_hours')}"
        tails = f"P95 TTFT: {self._means((SILOED, REACTIVE), 'ttft_p95_s')}"
        spot = zip(self._day(SILOED, "spot_hours"), self._reactive("spot_hours"), strict=True)
        return {
            "unified-hours": Outcome(self._less(REACTIVE, SILOED, "instance_hours"), f"{hours}."),
            "unified-tail": Outcome([-v for v in self._less(REACTIVE, SILOED, "ttft_p95_s")], f"{tails}."),
            "unified-spot": Outcome(
                [b / a - 1 if a else None for a, b in spot], f"Hours: {self._means((SILOED, REACTIVE), 'spot_hours')}."
            ),
        }

    def _long_term(self, name: str) -> dict[str, Outcome]:
        both = (REACTIVE, name)
        wasted = zip(self._day(name, "wasted_hours"), self._reactive("wasted_hours"), strict=True)
        return {
            f"{name}-hours": Outcome(
                self._less(name, REACTIVE, "instance_hours"), f"Instance-hours: {self._means(both, 'instance_hours')}."
            ),
            f"{name}-waste": Outcome(
                [1 - a / b if b else None for a, b in wasted],
                f"Instance-hours in which instances start: {self._means(both, 'wasted_hours')}; starts:"
                f" {self._means(both, 'starts')}.",
            ),
            f"{name}-tail": Outcome(
                [-v for v in self._less(name, REACTIVE, "ttft_p90_s")],
                f"P90 TTFT: {self._means(both, 'ttft_p90_s')}; P99: {self._means(both, 'ttft_p99_s')}.",
            ),
        }

    def _burst(self) -> dict[str, Outcome]:
        tails = {name: self._values("burst", name, lambda run: run["ttft_p95_s"]) for name in _LONG_TERM}
        why = "P95 TTFT: " + ", ".join(f"{fmean(values):.3g} ({name})" for name, values in tails.items()) + "."
        return {
            f"burst-{name}": Outcome([1 - a / b for a, b in zip(tails[LT_UA], tails[name], strict=True)], why)
            for name in (LT_U, LT_I)
        }

    def _order(self) -> dict[str, Outcome]:
        share = {tier: {name: self._violations(name, tier) for name in ORDERINGS} for tier in ("0", "1")}
        made: dict[str, Outcome] = {}
        for label, tier, sign in (("fast", "0", -1), ("normal", "1", 1)):
            why = ", ".join(f"{100 * fmean(values):.1f}% ({name})" for name, values in share[tier].items())
            for name in ("edf", "pf", "dpa"):
                pairs = zip(share[tier][name], share[tier]["fcfs"], strict=True)
                made[f"{name}-{label}"] = Outcome([sign * (a - b) for a, b in pairs], f"Violations: {why}.")
            order = ("fcfs", "edf", "dpa", "pf")
            columns = zip(*(share[tier][name] for name in order), strict=True)
            made[f"order-{label}"] = Outcome(
                [all(sign * a < sign * b for a, b in pairwise(column)) for column in columns], f"Violations: {why}."
            )
        return made

    def _table(self, days: Sequence[str]) -> Table:
        keys = (
            "instance_hours",
            "wasted_hours",
            "starts",
            "spot_hours",
            "kv_use",
            "ttft_p90_s",
            "ttft_p95_s",
            "ttft_p99_s",
        )
        heads = ("", "instance-hours", "starting", "starts", "spot hours", "KV use", "TTFT P90", "P95", "P99 (s)")
        rows: list[list[str | float | None]] = [[name, *(fmean(self._day(name, key)) for key in keys)] for name in days]
        shows = (
            f"Means over seeds. TTFT of interactive tiers. theta is {self._tps:,.0f} input tokens/s. A leaked forecast"
            f" is fitted on the day itself: cheating, to show what it is worth."
        )
        return Table("Figures 12, 13", "Strategies over the day", shows, heads, rows)

    def _instances(self, kind: str, names: Sequence[str]) -> dict[str, list[tuple[float, list[float]]]]:
        lines = {}
        for name in names:
            all_seeds = [self._found[kind, name, seed]["instances"] for seed in self._seeds]
            lines[name] = [(bins[0][0], [each[1] for each in bins]) for bins in zip(*all_seeds, strict=False)]
        return lines

    def _has(self, kind: str, name: str) -> bool:
        return (kind, name, self._seeds[0]) in self._found

    def _values(self, kind: str, name: str, of: Callable[[Any], float]) -> list[float]:
        return [of(self._found[kind, name, seed]) for seed in self._seeds]

    def _violations(self, ordering: str, tier: str) -> list[float]:
        return self._values("order", ordering, lambda run: float(run["violations"][tier]))

    def _day(self, name: str, key: str) -> list[float]:
        return self._values("day", name, lambda run: float(run[key]))

    def _reactive(self, key: str) -> list[float]:
        return self._day(REACTIVE, key)

    def _less(self, name: str, than: str, key: str) -> list[float]:
        """By which share it is less, seed by seed."""
        return [1 - a / b for a, b in zip(self._day(name, key), self._day(than, key), strict=True)]

    def _means(self, names: Sequence[str], key: str) -> str:
        return ", ".join(f"{fmean(self._day(name, key)):.3g} ({name})" for name in names)
