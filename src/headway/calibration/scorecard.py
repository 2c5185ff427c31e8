"""The scorecard: errors of the predictions by file, GPU, model family, engine version and load, as a Markdown page."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from statistics import median

from headway.calibration.validation import ExperimentErrors

COLUMNS = ("e2e_mean", "tpot_mean", "itl_mean", "ttft_mean", "ttft_p99")
KS_KINDS = ("ttft", "tpot", "e2e")
BANDS = ((0.25, "low: under a quarter of the sequences"), (0.75, "medium"), (float("inf"), "high: over three quarters"))
"""Upper bound of a band, and its name. The bound is a share of `max_num_seqs` in use, by Little's law from the measured
rate and E2E."""


def band(one: ExperimentErrors) -> str:
    return next(name for most, name in BANDS if one.concurrency <= most)


def family(one: ExperimentErrors) -> str:
    """The model's name without its version and size: llama, qwen, mixtral."""
    found = re.match(r"[a-z]+(-oss)?", one.model)
    return found[0] if found else one.model


GROUPS: tuple[tuple[str, Callable[[ExperimentErrors], str]], ...] = (
    ("file", lambda one: one.file),
    ("GPU", lambda one: one.gpu),
    ("model family", family),
    ("engine", lambda one: f"{one.engine} {one.engine_version}".strip()),
    ("load", band),
)


def page(compared: Sequence[ExperimentErrors], command: str) -> str:
    """The page, with the command that writes it."""
    return "\n".join(_lines(compared, command)) + "\n"


def _lines(compared: Sequence[ExperimentErrors], command: str) -> Iterator[str]:
    yield "# Scorecard"
    yield ""
    yield "Mean absolute errors of the predictions, in percent, over experiments; in brackets the mean signed error."
    yield "The load error is the median distance from 1 of the load factor: the factor on the arrival rate at which the"
    yield "predicted TTFT equals the measured one, for experiments near saturation only. Written by"
    yield ""
    yield f"    {command}"
    for title, key in GROUPS:
        yield ""
        yield f"## By {title}"
        yield ""
        yield f"| {title} | experiments | {' | '.join(COLUMNS)} | load error |"
        yield f"|---|---|{'---|' * len(COLUMNS)}---|"
        for name in sorted({key(one) for one in compared}):
            yield _row(name, [one for one in compared if key(one) == name])
        if title == "file":
            yield _row("**all**", compared)
    yield ""
    yield "## By experiment"
    yield ""
    kinds = KS_KINDS if any(one.ks_distance for one in compared) else ()
    distances = "".join(f" K-S {kind} |" for kind in kinds)
    yield f"| experiment | {' | '.join(COLUMNS)} | load factor | first requests' share of TTFT |{distances}"
    yield f"|---|{'---|' * len(COLUMNS)}---|---|{'---|' * len(kinds)}"
    for one in compared:
        shape = f"tp{one.tp}" + (f" pp{one.pp}" if one.pp > 1 else "") + (f" dp{one.dp}" if one.dp > 1 else "")
        cells = [_signed(one, column) for column in COLUMNS]
        factor = "-" if one.load_factor is None else f"{one.load_factor:.2f}"
        cold = "-" if one.first_share_of_ttft is None else f"{one.first_share_of_ttft:.0%}"
        mark = " \\*" if one.contradiction else ""
        name = f"{one.id}{mark} {one.model} {shape} {one.gpu} {one.workload}"
        own = one.ks_distance or {}
        distances = "".join(f" {own[kind]:.2f} |" if kind in own else " - |" for kind in kinds)
        yield f"| {name} | {' | '.join(cells)} | {factor} | {cold} |{distances}"
    if kinds:
        yield ""
        yield "K-S is the Kolmogorov-Smirnov distance between the predicted and the measured latencies of the requests,"
        yield "the largest difference between the shares of requests below any latency. 0: the same distribution."
    if any(one.contradiction for one in compared):
        yield ""
        yield "\\* The measurement contradicts itself: its ITL is not the time per token that its E2E and TTFT leave."


def _row(name: str, chosen: Sequence[ExperimentErrors]) -> str:
    cells = []
    for column in COLUMNS:
        errors = [one.errors[column].error_pct for one in chosen if column in one.errors]
        mean = f"{sum(map(abs, errors)) / len(errors):.1f} ({sum(errors) / len(errors):+.1f})" if errors else "-"
        cells.append(mean)
    factors = [abs(one.load_factor - 1) for one in chosen if one.load_factor is not None]
    load = f"{median(factors):.0%}" if factors else "-"
    return f"| {name} | {len(chosen)} | {' | '.join(cells)} | {load} |"


def _signed(one: ExperimentErrors, column: str) -> str:
    return f"{one.errors[column].error_pct:+.1f}" if column in one.errors else "-"
