"""What a quiet tenant notices of one that sends 20 times its requests, by the order in which requests go to engines.

`python bench/fairness.py`: for several models and lengths, each with two replicas, the quiet tenant sends a fifth of
what the fleet serves, alone and beside the flood, simulated. Printed are its p99 TTFT, over that alone, and the tokens
a second of all, over those of `fcfs`. `--prompt-window` and `--window` set those of the policies. `--live 20` lives
through 20 s of each case instead, with a gateway and emulated engines in virtual time, and prints both p99 TTFTs and
the largest difference of a request's from the simulated one. `--preset 5` simulates the preset `tenants` with so many
seeds instead, and prints means over them.
"""

from __future__ import annotations

import sys
import tempfile
from importlib import resources
from pathlib import Path
from typing import Any, NamedTuple

import click
import numpy as np
import yaml
from click import echo

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "support"))

from headway import scenario
from headway.core.record import Outcome, Records
from headway.scenario import presets
from keys import digest
from virtual_time import both

FLOOD = 20
QUIET_SHARE = 0.2
"""Of what the fleet serves, for the quiet tenant."""
FCFS = {"ordering": "fcfs"}


def policies_of(prompt_window: int, window: int | None) -> dict[str, dict[str, Any]]:
    """The policies that are compared, by name."""
    held = {"ordering_at": "gateway", "preempt_every_s": 0.1, "window": window}
    vtc, drr = ({"ordering": {"name": name, "prompt_window": prompt_window}, **held} for name in ("vtc", "drr"))
    return {"fcfs": FCFS, "vtc": vtc, "dlpm": {"routing": "dlpm", **drr}}


class Case(NamedTuple):
    """A fleet of two replicas and what it is asked, in mean tokens."""

    model: str
    gpu: str
    tp: int
    prompt_tokens: int
    output_tokens: int

    def __str__(self) -> str:
        return f"{self.model}, {self.tp} x {self.gpu}, {self.prompt_tokens:,} / {self.output_tokens:,}"


CASES = (
    Case("qwen3-32b", "h100", 1, 300, 800),
    Case("qwen3-32b", "h100", 1, 500, 300),
    Case("llama-3.1-70b", "h100", 2, 300, 800),
    Case("llama-3.1-70b", "h100", 2, 500, 400),
    Case("llama-3.1-8b", "l4", 1, 200, 300),
    Case("qwen3-8b", "h100", 1, 200, 300),
)


def day(case: Case, tenants: dict[str, int], rate: float, seconds: float, policies: dict[str, Any]) -> dict[str, Any]:
    """The scenario of a case."""
    lengths = {
        f"{kind}_tokens": {"kind": "lognormal", "mean": mean, "cv": 0.7}
        for kind, mean in (("prompt", case.prompt_tokens), ("output", case.output_tokens))
    }
    pool = {"name": "pool", "model": case.model, "gpu": case.gpu, "tp": case.tp, "replicas": 2, "engine": "vllm-0.15"}
    return {
        "workload": {"tenants": tenants, "arrivals": rate, "duration_s": seconds, **lengths},
        "fleet": [pool], "policies": {"routing": "least-loaded", **policies},
        "simulation": {"until_s": seconds},
    }  # fmt: skip


def simulated(made: dict[str, Any]) -> Records:
    """The records of a scenario."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "day.yaml"
        path.write_text(yaml.safe_dump(made))
        return scenario.run(scenario.load(path)).records


def simulated_alone(made: dict[str, Any], ran: Records) -> Records:
    """The quiet tenant's requests in these records of a scenario, without the flood, by `fcfs`."""
    columns = ("arrival_s", "prompt_tokens", "output_tokens")
    is_quiet = ran.workload["tenant"] == ran.tenants.index("quiet")
    routing = made["policies"]["routing"]
    with tempfile.TemporaryDirectory() as folder:
        lines = [",".join((*columns, "tenant"))]
        rows = zip(*(ran.workload[name][is_quiet].tolist() for name in columns), strict=True)
        lines += [",".join((*map(repr, row), "quiet")) for row in rows]
        trace = Path(folder) / "quiet.csv"
        trace.write_text("\n".join(lines))
        return simulated({**made, "workload": {"trace": str(trace)}, "policies": {"routing": routing, **FCFS}})


def ttft_p99_s(ran: Records, warmup_s: float) -> float:
    return ttft_s(ran, warmup_s, 0.99)


def ttft_s(ran: Records, warmup_s: float, quantile: float) -> float:
    """Of the quiet tenant, whose requests without a first token are infinitely late."""
    rows, arrival_s = ran.requests, ran.workload["arrival_s"]
    waits = np.full(len(arrival_s), np.inf)
    known_s = rows["first_token_s"] - arrival_s[rows["request"]]
    waits[rows["request"]] = np.where(np.isnan(known_s), np.inf, known_s)
    is_quiet = ran.workload["tenant"] == ran.tenants.index("quiet")
    seconds = float(arrival_s.max())
    is_counted = is_quiet & (arrival_s > warmup_s) & (arrival_s < 0.98 * seconds)
    return float(np.quantile(waits[is_counted], quantile, method="higher"))


def tokens_per_s(ran: Records, seconds: float) -> float:
    """Generated tokens of all tenants, those of unfinished answers included."""
    return float(ran.requests["generated_tokens"].sum()) / seconds


def capacity_rps(case: Case, seconds: float) -> float:
    """Requests a second that the fleet answers when it has too many."""
    guess, rate = 0.0, 2.0
    while guess > 0.7 * rate or not guess:
        rate *= 4
        ran = simulated(day(case, {"quiet": 1}, rate, seconds, FCFS))
        rows = ran.requests
        late = (rows["end_s"] > seconds / 2) & (rows["outcome"] == Outcome.FINISHED)
        guess = float(late.sum()) / (seconds / 2)
    return guess


def simulated_cells(case: Case, rps: float, seconds: float, policies: dict[str, dict[str, Any]]) -> list[str]:
    """Alone; then for each policy the quiet tenant's p99 TTFT, and the tokens a second to the first policy's."""
    cells: list[str] = []
    alone_s, first = 0.0, 0.0
    for each in policies.values():
        made = day(case, {"quiet": 1, "flood": FLOOD}, (1 + FLOOD) * rps, seconds, each)
        ran = simulated(made)
        alone_s = alone_s or ttft_p99_s(simulated_alone(made, ran), 30.0)
        p99_s, rate = ttft_p99_s(ran, 30.0), tokens_per_s(ran, seconds)
        first = first or rate
        waits = written(p99_s)
        if p99_s < 10:
            waits += f" ({p99_s / alone_s - 1:+.0%})"
        cells.append(f"{waits}; {rate:,.0f}/s" if each is policies["fcfs"] else f"{waits}; {rate / first - 1:+.0%}")
    return [f"{1000 * alone_s:,.0f} ms", *cells]


def written(seconds: float) -> str:
    if seconds == np.inf:
        return "not served"
    return f"{seconds:,.0f} s" if seconds > 10 else f"{1000 * seconds:,.0f} ms"


def echo_preset(num_seeds: int) -> None:
    """The table of the preset: means over seeds, and the smallest and largest p99 over that alone."""
    made = yaml.safe_load(resources.files(presets).joinpath("tenants.yaml").read_text())
    variants = {each.pop("name"): each for each in made.pop("variants")}
    seconds, warmup_s = made["workload"]["duration_s"], made["simulation"]["warmup_s"]
    found: dict[str, list[list[float]]] = {"alone": [], **{name: [] for name in variants}}
    for seed in range(num_seeds):
        alone_s = 0.0
        for name, policies in variants.items():
            each = {**made, "seed": seed, "policies": {**made["policies"], **policies}}
            ran = simulated(each)
            if not alone_s:
                alone = simulated_alone(each, ran)
                alone_s = ttft_p99_s(alone, warmup_s)
                found["alone"].append(preset_values(alone, warmup_s, seconds, alone_s))
            found[name].append(preset_values(ran, warmup_s, seconds, alone_s))
    echo("| | TTFT p50, quiet | TTFT p99, quiet | over that alone | answered | tokens/s, all | preempted |")
    echo(7 * "|---" + "|")
    for name, rows in found.items():
        values = np.array(rows)
        p50_s, p99_s, ratio, answered, rate, num_preempted = values.mean(axis=0)
        over = ""
        if name != "alone" and ratio < np.inf:
            over = f"{ratio - 1:+.0%} ({values[:, 2].min() - 1:+.0%} to {values[:, 2].max() - 1:+.0%})"
        echo(
            f"| `{name}` | {written(p50_s)} | {written(p99_s)} | {over} | {answered:.0%} | {rate:,.0f} |"
            f" {num_preempted:,.0f} |"
        )


def preset_values(ran: Records, warmup_s: float, seconds: float, alone_s: float) -> list[float]:
    """P50 and p99 of the quiet tenant, the latter over that alone, its answered share; tokens a second, preemptions."""
    is_quiet = ran.workload["tenant"] == ran.tenants.index("quiet")
    is_answered = is_quiet[ran.requests["request"]] & (ran.requests["outcome"] == Outcome.FINISHED)
    p99_s = ttft_p99_s(ran, warmup_s)
    return [
        ttft_s(ran, warmup_s, 0.5), p99_s, p99_s / alone_s, is_answered.sum() / is_quiet.sum(),
        tokens_per_s(ran, seconds), float(ran.requests["preemptions"].sum()),
    ]  # fmt: skip


def live_cells(case: Case, rps: float, seconds: float, policies: dict[str, dict[str, Any]]) -> list[str]:
    """For each policy the quiet tenant's p99 TTFT at a gateway, simulated, and the largest difference of a request."""
    cells = []
    for each in policies.values():
        made = day(case, {"quiet": 1, "flood": FLOOD}, (1 + FLOOD) * rps, seconds, each)
        pool = {key: value for key, value in made.pop("fleet")[0].items() if key != "replicas"}
        urls = [f"http://127.0.0.1:{10_001 + i}" for i in range(2)]
        keys = [{"sha256": digest(tenant), "name": tenant} for tenant in ("quiet", "flood")]
        made |= {
            "fleet": [{**pool, "endpoints": urls}], "observe": {"period_s": 0.2}, "simulation": {},
            "gateway": {"api_keys": keys, "scrape_period_s": 0.2, "timeout_s": 36_000.0},
        }  # fmt: skip
        with tempfile.TemporaryDirectory() as folder:
            ran, _, foreseen, _ = both(made, Path(folder))
        waits, foreseen_waits = (
            each.requests["first_token_s"][each.requests["request"].argsort()] - each.workload["arrival_s"]
            for each in (ran, foreseen)
        )
        is_quiet = ran.workload["tenant"] == ran.tenants.index("quiet")
        most_s = float(np.abs(waits - foreseen_waits)[is_quiet].max())
        p99s = [1000 * ttft_p99_s(day, 0.0) for day in (ran, foreseen)]
        cells.append(f"{p99s[0]:,.1f} ms; {p99s[1]:,.1f} ms; {1000 * most_s:.1f} ms")
    return cells


@click.command()
@click.option("--seconds", default=600.0, show_default=True, help="Of a simulated day, or 600 quiet requests.")
@click.option("--case", "only", default="", help="Only cases with this text.")
@click.option("--prompt-window", default=512, show_default=True)
@click.option("--window", type=int, help="Most requests at a replica. Without it: as many as its engine runs.")
@click.option("--live", "live_s", type=float, help="Seconds to live through at a gateway, in place of the simulation.")
@click.option("--preset", "num_seeds", type=int, help="The preset `tenants` with so many seeds instead.")
def main(
    seconds: float, only: str, prompt_window: int, window: int | None, live_s: float | None, num_seeds: int | None
) -> None:
    """Compare what a flood costs a quiet tenant, by policy."""
    if num_seeds is not None:
        echo_preset(num_seeds)
        return
    policies = policies_of(prompt_window, window)
    columns = (
        ["alone", *policies] if live_s is None else [f"{name}: served; simulated; furthest apart" for name in policies]
    )
    echo(f"| model, GPUs of each replica, mean prompt / answer | quiet, requests/s | {' | '.join(columns)} |")
    echo((2 + len(columns)) * "|---" + "|")
    for case in (each for each in CASES if only in str(each)):
        rps = round(QUIET_SHARE * capacity_rps(case, 200.0), 2)
        cells = (
            simulated_cells(case, rps, max(seconds, 600 / rps), policies)
            if live_s is None else live_cells(case, rps, live_s, policies)
        )  # fmt: skip
        echo(f"| {case} | {rps:g} | {' | '.join(cells)} |")


if __name__ == "__main__":
    main()
