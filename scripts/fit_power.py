# ruff: noqa: T201 (a script prints)
"""Fit the power of GPUs to measured loads, and print its error on loads, models and GPUs that the fit has not seen.

    HEADWAY_DATA=... python scripts/fit_power.py [--write]

H100: watts of Llama-3.1-8B in bf16 on vLLM 0.25.1, by phase of load (measured by Headway with nvidia-smi every 250 ms),
with the engine's own iterations of measured/vllm025_h100_steps.csv.gz. Each phase is left out in turn. Phases of
Qwen3-30B-A3B are predicted by simulations of their requests (measured/vllm025_h100_requests.csv.gz).
B200: measured/mlenergy_llm.csv.gz, closed loops with their mean batches, speeds and watts. Each model is left out in
turn. The H100 rows of this file are not fitted: they test the shares of the H100 on other models and GPUs.

Shares of one GPU that are taken for the other give the error for GPUs without measurements. With --write, the shares go
to src/headway/catalog/data/power.json. Needs SciPy.
"""

from __future__ import annotations

import csv
import gzip
import json
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from math import ceil, exp, inf, log
from pathlib import Path

import numpy as np
from msgspec import Struct
from msgspec.structs import replace
from scipy.optimize import least_squares

from headway import catalog
from headway.core.errors import HeadwayError
from headway.core.fleet import Fleet, Parallel, Pool
from headway.core.record import ReplicaPower
from headway.metrics.columns import Floats
from headway.metrics.energy import FleetPower
from headway.perf.power import replica_power
from headway.perf.step import StepModel

OUT = Path(__file__).parent.parent / "src/headway/catalog/data/power.json"
H100, B200, ENGINE = "h100-80gb-sxm", "b200-180gb-sxm", "vllm-0.25"
MODELS = {"l8b": "llama-3.1-8b", "q30b": "qwen3-30b-a3b"}
IDLE_W = 132.0
"""Of an H100 with a model loaded: 125 to 139."""
PHASES = {
    "l8b": {"azure4": (483, 0.709), "azure9": (559, 0.253), "burst128": (620, 0.147), "burst256": (647, 0.131),
            "burst400": (628, 0.136)},
    "q30b": {"azure4": (464, 0.745), "burst192": (603, 0.154)},
}  # fmt: skip
"""Mean watts, and joules per output token, of the phases of vLLM 0.25.1 on an H100."""
DECODES = {1: 421, 8: 456, 23: 518, 45: 545, 400: 688}
"""Watts while so many sequences of Llama-3.1-8B decode; 23 and 45 for 16 to 32 and 32 to 64."""
DECODE_CONTEXT = 560
"""Of requests of 512 + 96 tokens."""
PROMPT_TOKENS = {"gpqa": 250, "lm-arena-chat": 100}
"""Of ML.ENERGY's tasks, which its table does not give: about a tenth, and a third, of an output. Nominal."""
LEVEL = 0.9
BLACKWELL = ("gb200-186gb", "rtx-pro-6000-96gb")
NAMES = ("active", "memory", "compute")
Shares = Sequence[float]


class Load(Struct, frozen=True):
    """Iterations of one load, or its mean iteration, and its measured power. Seconds at peaks are of all GPUs."""

    name: str
    model: str
    watts: float
    """Of one GPU."""
    limit_w: float
    duration_s: Floats
    read_s: Floats
    products_s: Floats
    idle_s: float = 0.0

    def predicted_w(self, idle: float, shares: Shares) -> float:
        """Mean over the load, with idle time."""
        active, memory, compute = shares
        t = self.duration_s
        more = active * t + memory * np.minimum(self.read_s, t) + compute * np.sqrt(np.minimum(self.products_s, t) * t)
        busy = np.minimum(more + idle * t, t)
        return self.limit_w * float(busy.sum() + idle * self.idle_s) / float(t.sum() + self.idle_s)


def fitted(loads: Sequence[Load], idle: float) -> Shares:
    """The shares with the least squares of log ratios, robust to single loads."""

    def errors(x: Floats) -> list[float]:
        return [log(each.predicted_w(idle, x) / each.watts) for each in loads]

    return tuple(least_squares(errors, [0.4, 0.2, 0.8], bounds=(0.0, inf), loss="soft_l1", f_scale=0.1).x.tolist())


def held_out(loads: Sequence[Load], idle: float, part: Callable[[Load], str]) -> list[float]:
    """Predicted over measured power of each load, by a fit without its part."""
    found = {}
    for name in dict.fromkeys(map(part, loads)):
        found[name] = fitted([each for each in loads if part(each) != name], idle)
    return [each.predicted_w(idle, found[part(each)]) / each.watts for each in loads]


def work(power: ReplicaPower, decodes: float, context: float, prompt: float) -> tuple[float, float]:
    """Seconds at peak of an iteration's reads and products."""
    one = {"num_decode": [decodes], "iterations": [1.0], "prefill_tokens": [prompt], "context_tokens": [context],
           "advances": [0]}  # fmt: skip
    stretch = {name: np.array(values) for name, values in one.items()}
    # The energy of iterations of a second, on a GPU whose only power is that of one kind of work, a watt.
    second = np.ones(1)
    only = replace(power, limit_w=1e9, idle_w=0.0, active_w=0.0, memory_w=1.0, compute_w=0.0)
    read_s = FleetPower([only]).busy_joules(np.zeros(1, int), stretch, second)[0]
    only = replace(only, memory_w=0.0, compute_w=1.0)
    return float(read_s), float(FleetPower([only]).busy_joules(np.zeros(1, int), stretch, second)[0] ** 2)


def pool_of(key: str) -> Pool:
    return Pool(name=key, model=catalog.model(MODELS[key]), gpu=catalog.gpu(H100), engine=catalog.engine(ENGINE))


def phases(measured: Path) -> list[Load]:
    """The phases of Llama-3.1-8B, and its decoding alone."""
    pool = pool_of("l8b")
    power, limit_w = replica_power(pool), pool.gpu.watts
    assert power is not None
    rows: dict[str, list[dict[str, str]]] = {}
    with gzip.open(measured / "vllm025_h100_steps.csv.gz", "rt") as file:
        for row in csv.DictReader(file):
            if row["model"] == "l8b":
                rows.setdefault(row["phase"], []).append(row)
    tokens = output_tokens(measured)
    found = []
    for phase, (watts, joules) in PHASES["l8b"].items():
        spans = np.array(list(_spans(rows[phase], power)))
        seconds = tokens["l8b", phase] * joules / watts
        duration_s, read_s, products_s = spans.T
        idle_s = max(seconds - float(duration_s.sum()), 0.0)
        found.append(Load(phase, pool.model.name, watts, limit_w, duration_s, read_s, products_s, idle_s))
    step = StepModel(pool.model, pool.gpu, pool.engine, pool.parallel)
    for num, watts in DECODES.items():
        context = num * DECODE_CONTEXT
        one = (step.line(num, context)[0], *work(power, num, context, 0))
        found.append(Load(f"decode of {num}", pool.model.name, watts, limit_w, *(np.array([each]) for each in one)))
    return found


def _spans(rows: Sequence[dict[str, str]], power: ReplicaPower) -> Iterator[tuple[float, float, float]]:
    """Seconds, reads and products between ends that are certain."""
    end_s, span = -inf, (0.0, 0.0, 0.0)
    for row in rows:
        start_s, before_s = max(float(row["scheduled_s"]), end_s), end_s
        end_s = max(float(row["done_s"]), before_s)
        done = work(power, int(row["decodes"]), int(row["decode_context_tokens"]), int(row["prompt_tokens"]))
        span = (span[0] + end_s - start_s, span[1] + done[0], span[2] + done[1])
        if row["is_reliable_end"] == "1":
            yield span
            span = (0.0, 0.0, 0.0)
    if span[0]:
        yield span


def output_tokens(measured: Path) -> dict[tuple[str, str], int]:
    """Output tokens by model and phase."""
    found: dict[tuple[str, str], int] = {}
    for row in requests(measured):
        key = row["model"], row["phase"]
        found[key] = found.get(key, 0) + int(row["output_tokens"])
    return found


def requests(measured: Path) -> list[dict[str, str]]:
    with gzip.open(measured / "vllm025_h100_requests.csv.gz", "rt") as file:
        return list(csv.DictReader(file))


def simulated(measured: Path, key: str, phase: str, shares: Shares, idle: float) -> tuple[float, float]:
    """Mean watts and joules per output token that a simulation of the phase's requests predicts."""
    from headway.control.policies import Policies
    from headway.metrics.usage import usage
    from headway.policies.resolve import ordering, router
    from headway.sim.cluster import simulate
    from headway.workload.sources import TraceSource
    from headway.workload.table import Workload

    rows = [row for row in requests(measured) if row["model"] == key and row["phase"] == phase]
    columns = {
        "arrival_s": np.array([float(row["sent_s"]) for row in rows]),
        "prompt_tokens": np.array([int(row["prompt_tokens"]) for row in rows]),
        "output_tokens": np.array([int(row["output_tokens"]) for row in rows]),
    }
    order = np.argsort(columns["arrival_s"], kind="stable")
    table = Workload({name: column[order] for name, column in columns.items()})
    policies = Policies(router("least-loaded"), ordering("fcfs"))
    records = simulate(Fleet((pool_of(key),)), TraceSource(table), policies, seed=0)
    power = records.replicas[0].power
    assert power is not None
    limit_w = power.limit_w
    watts = {f"{name}_w": share * limit_w for name, share in zip(NAMES, shares, strict=True)}
    power = replace(power, idle_w=idle * limit_w, **watts)
    records.replicas = (replace(records.replicas[0], power=power),)
    joules = float(usage(records, 0.0).joules[0])
    return joules / records.end_s, joules / float(columns["output_tokens"].sum())


def closed_loops(measured: Path, gpu_name: str) -> tuple[list[Load], list[str]]:
    """ML.ENERGY's loads on one type of GPU, and the models that cannot be read."""
    found, left_out, gpu = [], set(), catalog.gpu(gpu_name)
    with gzip.open(measured / "mlenergy_llm.csv.gz", "rt") as file:
        rows = [row for row in csv.DictReader(file) if catalog.gpu(row["gpu_model"]).name == gpu.name]
    for row in rows:
        if (prompt := PROMPT_TOKENS.get(row["task"])) is None:
            continue  # images and videos, and code whose prompts are of unknown length
        num_gpus, dp = int(row["num_gpus"]), int(row["data_parallel"])
        try:
            model = catalog.model(row["model_id"])
        except HeadwayError:
            left_out.add(row["model_id"])
            continue
        parallel = Parallel(num_gpus // dp, dp=dp, ep=dp > 1)
        power = replica_power(Pool(name="", model=model, gpu=gpu, engine=catalog.engine(ENGINE), parallel=parallel))
        assert power is not None
        num, length = float(row["avg_batch_size"]), float(row["avg_output_len"])
        seconds = num / float(row["output_throughput_tokens_per_sec"])
        done = work(power, num, num * (prompt + length / 2), num * prompt / length)
        name = f"{row['nickname']} x{num_gpus} {row['task']} {num:.0f}"
        watts = float(row["avg_power_watts"]) / num_gpus
        found.append(Load(name, model.name, watts, gpu.watts, *(np.array([each]) for each in (seconds, *done))))
    return found, sorted(left_out)


def band(ratios: Sequence[float]) -> float:
    """The error that a new load keeps with a chance of `LEVEL` (as in `catalog.errors`), as a share of the energy."""
    errors = sorted(abs(log(each)) for each in ratios)
    return exp(errors[min(ceil(LEVEL * (len(errors) + 1)), len(errors)) - 1]) - 1


def print_errors(title: str, ratios: Sequence[float]) -> None:
    errors = np.abs(np.array(ratios) - 1)
    print(f"{title}: {len(ratios)} loads, bias {np.mean(ratios) - 1:+.1%}, median error {np.median(errors):.1%}, "
          f"mean {errors.mean():.1%}, 9 of 10 within {band(ratios):.0%}")  # fmt: skip


def main() -> None:
    if "HEADWAY_DATA" not in os.environ:
        sys.exit("skipped: HEADWAY_DATA is not set; expected the folder with measured/vllm025_h100_steps.csv.gz")
    measured = Path(os.environ["HEADWAY_DATA"]) / "measured"
    idle = IDLE_W / catalog.gpu(H100).watts
    own = phases(measured)
    ours = fitted(own, idle)
    print("H100, in shares of 700 W:", _shown(idle, ours))
    print("phase of Llama-3.1-8B, bf16    W   from its iterations   J/token   simulated   (fitted without the phase)")
    ratios = held_out(own, idle, lambda each: each.name)
    print_phases(own, ratios, measured, idle)
    print_errors("left out in turn", ratios)
    print("phase of Qwen3-30B-A3B, bf16   W   simulated             J/token   simulated   (fitted without the model)")
    for phase, (watts, joules) in PHASES["q30b"].items():
        mean_w, each = simulated(measured, "q30b", phase, ours, idle)
        print(f"{phase:26} {_beside(watts, mean_w, 0)} {'':8} {_beside(joules, each, 3)}")
    hopper, left_out = closed_loops(measured, H100)
    blackwell, more = closed_loops(measured, B200)
    print("ML.ENERGY without models that the catalog does not have:", ", ".join(sorted({*left_out, *more})))
    of_hopper = [each.predicted_w(idle, ours) / each.watts for each in hopper]
    print_errors("ML.ENERGY's H100, by the phases above alone", of_hopper)
    theirs = fitted(blackwell, idle)
    print("B200, in shares of 1,000 W, idle as the H100:", _shown(idle, theirs))
    of_blackwell = held_out(blackwell, idle, lambda each: each.model)
    print_errors("ML.ENERGY's B200, each model left out in turn", of_blackwell)
    from_hopper = [each.predicted_w(idle, ours) / each.watts for each in blackwell]
    print_errors("ML.ENERGY's B200, by the shares of the H100", from_hopper)
    from_blackwell = [each.predicted_w(idle, theirs) / each.watts for each in hopper]
    print_errors("ML.ENERGY's H100, by the shares of the B200", from_blackwell)
    rated = [each.limit_w / each.watts for each in (*own, *hopper, *blackwell)]
    print_errors("rated watts for comparison, all loads", rated)
    if "--write" in sys.argv:
        _write(idle, (ours, of_hopper, from_hopper, hopper), (theirs, of_blackwell, from_blackwell, blackwell))


def print_phases(own: Sequence[Load], ratios: Sequence[float], measured: Path, idle: float) -> None:
    for each, ratio in zip(own, ratios, strict=True):
        line = f"{each.name:26} {_beside(each.watts, ratio * each.watts, 0)}"
        if each.name in PHASES["l8b"]:
            without = fitted([other for other in own if other is not each], idle)
            _, joules = simulated(measured, "l8b", each.name, without, idle)
            line += f" {'':8} {_beside(PHASES['l8b'][each.name][1], joules, 3)}"
        print(line)


def _beside(measured: float, predicted: float, digits: int) -> str:
    return f"{measured:6.{digits}f} {predicted:8.{digits}f} {predicted / measured - 1:+7.1%}"


def _shown(idle: float, shares: Shares) -> str:
    return f"idle {idle:.3f}, " + ", ".join(f"{name} {share:.3f}" for name, share in zip(NAMES, shares, strict=True))


def _write(idle: float, *found: tuple[Shares, Sequence[float], Sequence[float], Sequence[Load]]) -> None:
    sources = (
        "scripts/fit_power.py on phases of Llama-3.1-8B in bf16 with vLLM 0.25.1 on an H100 (measured by Headway, "
        "November 2026); errors: ML.ENERGY's H100 (ml-energy/leaderboard)",
        "scripts/fit_power.py on ML.ENERGY's B200 (ml-energy/leaderboard), idle as an H100; errors: models left out",
    )
    blackwell = [each.name for each in catalog.gpus() if each.name.startswith(("gb200", "b300", "rtx-pro"))]
    names = (([H100], []), ([B200], blackwell))
    lines = []
    for (shares, ratios, as_other, loads), (gpus, like), source in zip(found, names, sources, strict=True):
        entry = {"gpus": gpus, "like": like, "idle": round(idle, 3)}
        entry |= {name: round(share, 3) for name, share in zip(NAMES, shares, strict=True)}
        entry |= {"error": round(band(ratios), 2), "error_if_like": round(max(band(as_other), band(ratios)), 2)}
        entry |= {"num_loads": len(loads), "num_models": len({each.model for each in loads}), "source": source}
        lines.append("  " + json.dumps(entry))
    OUT.write_text("[\n" + ",\n".join(lines) + "\n]\n")


if __name__ == "__main__":
    main()
