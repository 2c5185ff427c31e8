"""Figure 11: the transfer time of a KV cache, by prompt length and number of streams.

The measured time is the part that prefill does not hide: from the end of the prompt's computation to the last byte. Two
numbers are fitted, both at 2,048 tokens: the speed of one stream to 625 ms in bulk, and the overhead of each stream to
85 ms with eight streams. The rest is predicted.
"""

from __future__ import annotations

from typing import Any

from headway.report.run import Run
from headway_papers.reproduce import charts
from headway_papers.reproduce.cauchy.claims import LENGTHS
from headway_papers.reproduce.cauchy.setup import HANDOVER, STREAM_OVERHEAD_S, split
from headway_papers.reproduce.findings import Figure, Finding
from headway_papers.reproduce.results import Key, Results
from headway_papers.reproduce.tasks import SimulationTask

DEGREES = (1, 2, 4, 8, 16)
SHOWN = (*LENGTHS, 2048)
"""Prompt lengths; two numbers are fitted at the last one."""
LESS_OVERHEAD_S = 0.003
"""An overhead of each stream with which eight are about as fast at 256 tokens as in the paper."""


def tasks() -> dict[Key, SimulationTask]:
    """Ten requests, one second apart, for each length and degree; degree 0 is one bulk transfer. Nothing is random.
    "less": eight streams with `LESS_OVERHEAD_S`."""
    documents: dict[Key, dict[str, Any]] = {
        (length, degree): _scenario(length, degree) for length in SHOWN for degree in (0, *DEGREES)
    }
    documents |= {(length, "less"): _scenario(length, 8, LESS_OVERHEAD_S) for length in SHOWN}
    return {("transfer", *key): SimulationTask(document, 0, measure) for key, document in documents.items()}


def _scenario(length: int, degree: int, overhead_s: float = STREAM_OVERHEAD_S) -> dict[str, Any]:
    kind = {"mode": "bulk"} if degree == 0 else {**HANDOVER, "degree": degree, "stream_overhead_s": overhead_s}
    handover = {**kind, "landing": "host", "stream_bytes_per_s": HANDOVER["stream_bytes_per_s"]}
    arrivals = {"kind": "deterministic", "rate": 1.0}
    return {
        "workload": {"prompt_tokens": length, "output_tokens": 20, "arrivals": arrivals, "num_requests": 10},
        "fleet": [],
        "combos": [{**split("pair", "h800-h20"), "handover": handover}],
        "policies": {"routing": {"name": "cauchy", "within": "strict"}},
    }


def measure(run: Run) -> dict[str, Any]:
    """Mean transfer time in seconds."""
    assert run.summary.transfer_s is not None
    return {"transfer_s": run.summary.transfer_s.mean}


class TransferRuns:
    """The findings on KV transfers."""

    def __init__(self, results: Results) -> None:
        self.results = results

    def seconds(self, length: int, degree: int | str) -> float:
        return float(self.results["transfer", length, degree]["transfer_s"])

    def outcomes(self) -> dict[str, Finding]:
        findings: dict[str, Finding] = {}
        less = ", ".join(f"{self.seconds(n, 0) / self.seconds(n, 'less'):.1f}x at {n:,}" for n in SHOWN)
        for length in LENGTHS:
            bulk, serial, eight = (self.seconds(length, degree) for degree in (0, 1, 8))
            best = min(DEGREES, key=lambda degree: self.seconds(length, degree))
            numbers = (
                f"{bulk * 1e3:.0f} ms in bulk, {serial * 1e3:.0f} ms with one stream, {eight * 1e3:.0f} ms with eight"
            )
            note = (
                f"; best with {best}, {bulk / self.seconds(length, best):.1f}x. What managing eight streams takes does "
                f"not shrink with the prompt. With {1e3 * LESS_OVERHEAD_S:g} ms for each in place of "
                f"{1e3 * STREAM_OVERHEAD_S:g} it is {less} tokens."
            )
            findings[f"fig11-{length}"] = Finding([bulk / eight], numbers + note)
        times = {degree: self.seconds(SHOWN[-1], degree) for degree in DEGREES}
        numbers = ", ".join(f"{degree}: {seconds * 1e3:.0f} ms" for degree, seconds in times.items())
        findings["fig11-degree"] = Finding([float(min(times, key=lambda d: times[d]))], f"By streams, {numbers}.")
        return findings

    def figures(self) -> list[Figure]:
        lines = {
            name: [(float(length), [1e3 * self.seconds(length, degree)]) for length in SHOWN]
            for name, degree in (("bulk", 0), *((f"{degree} streams", degree) for degree in DEGREES))
        }
        chart = charts.curves(lines, "prompt tokens", "on the way (ms)", yaxis={"type": "log"})
        shows = "What prefill does not hide. Fitted: bulk and eight streams at 2,048 tokens."
        return [Figure("Figure 11", "KV cache transfer, H800 to H20", shows, chart)]
