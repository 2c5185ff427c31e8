# ruff: noqa: T201 (a script prints)
"""Speed of the simulator: requests simulated per second of CPU time, records included.

    python bench/bench.py [--quick] [--against FOLDER] [--json FILE]
    python bench/bench.py --scale [REQUESTS]
    python bench/bench.py --replicas [--quick] [--against FOLDER]

Llama-2-70B on H100-80 SXM, TP 4, 1,000 tokens in and 200 out, at 70% of the throughput that a saturated replica
reaches (measured first). Builds are measured in turns, each in a process of its own: the sources as Python, those that
`make compiled` has compiled, and `--against`, a folder with another version of the package. Figures are medians, with
the ratio to the first build in the same turns. The last row is the wall time of a whole `headway compare`.
`--replicas`: 20,000 requests on 8 to 4,096 replicas, and the CPU time and peak memory of `headway simulate` for them.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
PROMPT_TOKENS, OUTPUT_TOKENS = 1000, 200
LOAD = 0.7
CASES = (
    ("fixed", 8, "round-robin", 40_000),
    ("fixed", 8, "least-kv", 40_000),
    ("fixed", 8, "least-loaded", 40_000),
    ("lognormal", 8, "round-robin", 40_000),
    ("lognormal", 8, "least-kv", 40_000),
    ("fixed", 64, "least-loaded", 40_000),
    ("fixed", 64, "least-kv", 40_000),
    ("fixed", 512, "least-loaded", 40_000),
    ("fixed", 512, "headway", 40_000),
)
"""(lengths, replicas, routing, requests)."""
FLEETS = (8, 64, 512, 4096)
"""Numbers of replicas of `--replicas`."""
FLEET_ROUTERS = ("round-robin", "least-kv", "headway")
FLEET_REQUESTS = 20_000
SIMULATE = "simulate --model llama-2-70b --gpu h100-80gb-sxm --engine vllm-0.15 --tp 4 --no-progress"
COMPARE = "compare --model llama-3.1-8b --gpu h100-80gb-sxm --replicas 4 --workload chat --rate 30 --num-requests 2000"


def lengths(kind: str, mean: int) -> Any:
    """A length as the workload's specification takes it."""
    return mean if kind == "fixed" else {"kind": "lognormal", "mean": mean, "cv": 0.5, "max": 3 * mean}


def run(kind: str, num_requests: int, rate: float, replicas: int, routing: str) -> tuple[float, Any]:
    """CPU seconds that the simulation took in this process, and its records."""
    import msgspec

    from headway import catalog
    from headway.control.policies import Policies
    from headway.core.fleet import Fleet, Parallel, Pool
    from headway.policies.resolve import ordering, router
    from headway.sim.cluster import simulate
    from headway.workload.spec import WorkloadSpec

    try:
        from headway.workload.generate import build
    except ImportError:  # an older version
        from headway.workload.spec import build  # type: ignore[attr-defined,no-redef]

    spec = {
        "num_requests": num_requests,
        "arrivals": {"kind": "poisson", "rate": rate},
        "prompt_tokens": lengths(kind, PROMPT_TOKENS),
        "output_tokens": lengths(kind, OUTPUT_TOKENS),
    }
    source = build(msgspec.convert(spec, WorkloadSpec), 0, Path())
    pool = Pool(
        name="bench", model=catalog.model("llama-2-70b"), gpu=catalog.gpu("h100-80gb-sxm"),
        engine=catalog.engine("vllm-0.15"), parallel=Parallel(tp=4), replicas=replicas,
    )  # fmt: skip
    policies = Policies(router(routing), ordering("fcfs"))
    start_s = time.process_time()
    records = simulate(Fleet((pool,)), source, policies, seed=0)
    return time.process_time() - start_s, records


def saturated_rate(kind: str) -> float:
    """Requests/s of one replica with a queue that never empties: the middle half of a run, by ends."""
    _, records = run(kind, 2000, 1000.0, 1, "round-robin")
    ends = records.requests["end_s"]
    low, high = ends[len(ends) // 4], ends[3 * len(ends) // 4]
    return float((len(ends) // 2) / (high - low))


class Build:
    """One build of the package, in a process that runs a case for each line that it is sent."""

    def __init__(self, name: str, folder: Path) -> None:
        self.name = name
        self.env = {**os.environ, "PYTHONPATH": str(folder)}
        self._process = subprocess.Popen(
            [sys.executable, __file__, "--worker"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
            env=self.env,
        )  # fmt: skip

    def cpu_s(self, *case: Any) -> float:
        """CPU seconds of one run."""
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(json.dumps(case) + "\n")
        self._process.stdin.flush()
        return float(self._process.stdout.readline())

    def compare_s(self) -> float:
        """Wall seconds of a whole `headway compare` of two routers."""
        start_s = time.perf_counter()
        command = [*COMPARE.split(), "--routing", "least-loaded,round-robin", "--no-progress"]
        subprocess.run([sys.executable, "-m", "headway", *command], env=self.env, check=True, capture_output=True)
        return time.perf_counter() - start_s

    def simulate(self, num_requests: int, rate: float, replicas: int, routing: str, option: str) -> tuple[float, float]:
        """CPU seconds and peak MiB of a whole `headway simulate` with an option."""
        command = [*SIMULATE.split(), "--replicas", replicas, "--routing", routing, "--num-requests", num_requests]
        command += ["--rate", rate, "--prompt-tokens", PROMPT_TOKENS, "--output-tokens", OUTPUT_TOKENS]
        arguments = [sys.executable, "-m", "headway", *map(str, command), *option.split()]
        process = subprocess.Popen(arguments, env=self.env, stdout=subprocess.DEVNULL)
        _, status, usage = os.wait4(process.pid, 0)
        assert not status, status
        return usage.ru_utime + usage.ru_stime, usage.ru_maxrss / 1024

    def close(self) -> None:
        """End the process."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()


def work() -> None:
    """Run a case for each line of the standard input, and print its CPU seconds."""
    for line in sys.stdin:
        print(run(*json.loads(line))[0], flush=True)


def in_turns(builds: list[Build], repeats: int, measure: Callable[[Build], float]) -> list[list[float]]:
    """Seconds by build, in turns whose order alternates."""
    seconds: list[list[float]] = [[] for _ in builds]
    for turn in range(repeats):
        for i in range(len(builds))[:: 1 if turn % 2 == 0 else -1]:
            seconds[i].append(measure(builds[i]))
    return seconds


def row(name: str, builds: list[Build], seconds: list[list[float]], num_requests: int | None) -> dict[str, Any]:
    """One line of the table, printed: requests per second, or seconds without a number of requests."""
    found: dict[str, Any] = {"case": name}
    shown = []
    for build, taken in zip(builds, seconds, strict=True):
        median_s = statistics.median(taken)
        ratio = statistics.median(first / own for first, own in zip(seconds[0], taken, strict=True))
        figure = round(median_s, 3) if num_requests is None else round(num_requests / median_s)
        found[build.name] = {"median": figure, "ratio": round(ratio, 2), "seconds": taken}
        shown.append(f"{build.name} {figure:>9,} ({ratio:.2f}x)")
    print(f"{name:42}", *shown, sep="  ", flush=True)
    return found


def table(builds: list[Build], quick: bool) -> list[dict[str, Any]]:
    """All rows."""
    repeats = 3 if quick else 5
    rates = {kind: LOAD * saturated_rate(kind) for kind in ("fixed", "lognormal")}
    rows = []
    for kind, replicas, routing, requests in CASES:
        num_requests = requests // (10 if quick else 1)
        case = (kind, num_requests, rates[kind] * replicas, replicas, routing)
        for build in builds:
            build.cpu_s(kind, num_requests // 10, *case[2:])
        seconds = in_turns(builds, repeats, lambda build, case=case: build.cpu_s(*case))  # type: ignore[misc]
        rows.append(row(f"{replicas} replicas, {routing}, {kind}", builds, seconds, num_requests))
    rows.append(row("headway compare, wall s", builds, in_turns(builds, repeats, Build.compare_s), None))
    return rows


def scaling(largest: int) -> list[dict[str, Any]]:
    """CPU time and peak memory of whole `headway simulate` commands by the number of requests."""
    rate = LOAD * saturated_rate("lognormal") * 8
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        scenario = Path(folder) / "scenario.yaml"
        for num_requests in (10**power for power in range(4, len(str(largest)))):
            fleet = [{"model": "llama-2-70b", "gpu": "h100-80gb-sxm", "engine": "vllm-0.15", "tp": 4, "replicas": 8}]
            workload = {
                "num_requests": num_requests, "arrivals": rate, "prompt_tokens": lengths("lognormal", PROMPT_TOKENS),
                "output_tokens": lengths("lognormal", OUTPUT_TOKENS),
            }  # fmt: skip
            policies = {"routing": "round-robin"}
            scenario.write_text(json.dumps({"workload": workload, "fleet": fleet, "policies": policies}))
            command = [sys.executable, "-m", "headway", "simulate", str(scenario), "--seed", "0", "--json"]
            cpu_s, peak_kib = watched([*command, "--no-progress"], {**os.environ, "PYTHONPATH": str(fastest())})
            found = {"num_requests": num_requests, "cpu_s": round(cpu_s, 1), "peak_gib": round(peak_kib / 2**20, 2)}
            found["us_per_request"] = round(1e6 * cpu_s / num_requests, 1)
            rows.append(found)
            print("  ".join(f"{key} {value}" for key, value in found.items()), flush=True)
    return rows


def fastest() -> Path:
    """The folder of the compiled build if there is one, or of the sources."""
    compiled = ROOT / "build" / "compiled"
    return compiled if compiled.is_dir() else ROOT / "src"


def watched(command: list[str], env: dict[str, str]) -> tuple[float, int]:
    """CPU seconds of a command, and the peak in KiB of the memory that it holds itself: not the pages of files, which
    the system drops when memory is short."""
    process = subprocess.Popen(command, env=env, stdout=subprocess.DEVNULL)
    peak_kib = 0
    while True:
        pid, status, usage = os.wait4(process.pid, os.WNOHANG)
        if pid:
            assert not status, status
            return usage.ru_utime + usage.ru_stime, peak_kib
        lines = Path(f"/proc/{process.pid}/status").read_text().splitlines()
        peak_kib = max([peak_kib, *(int(line.split()[1]) for line in lines if line.startswith("RssAnon:"))])
        time.sleep(0.05)


def fleets(builds: list[Build], quick: bool) -> list[dict[str, Any]]:
    """The loop and the whole command by the number of replicas."""
    rate = LOAD * saturated_rate("fixed")
    repeats = 1 if quick else 5
    rows = []
    for replicas in FLEETS:
        for routing in FLEET_ROUTERS:
            name, case = f"{replicas} replicas, {routing}", (FLEET_REQUESTS, rate * replicas, replicas, routing)
            loops = in_turns(builds, repeats, lambda build, case=case: build.cpu_s("fixed", *case))  # type: ignore[misc]
            rows.append(row(name, builds, loops, FLEET_REQUESTS))
            for option in ("", "--json"):
                used: list[list[tuple[float, float]]] = [[] for _ in builds]
                for _ in range(repeats):
                    for build, found in zip(builds, used, strict=True):
                        found.append(build.simulate(*case, option))
                what = f"{name}, command {option}".rstrip()
                rows.append(row(f"{what}, CPU s", builds, [[s for s, _ in found] for found in used], None))
                rows.append(row(f"{what}, MiB", builds, [[mib for _, mib in found] for found in used], None))
    return rows


def main() -> None:
    """Run and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a tenth of the requests, three repeats")
    parser.add_argument(
        "--scale", metavar="REQUESTS", type=int, nargs="?", const=10**7,
        help="10,000 to so many requests (10 million) instead of the table",
    )  # fmt: skip
    parser.add_argument("--replicas", action="store_true", help="8 to 4,096 replicas instead of the table")
    parser.add_argument("--against", metavar="FOLDER", type=Path, help="another version: the folder with `headway`")
    parser.add_argument("--json", metavar="FILE", help="write the rows here as well")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        work()
        return
    if options.scale:
        rows = scaling(options.scale)
    else:
        folders = {"against": options.against, "pure": ROOT / "src", "compiled": ROOT / "build" / "compiled"}
        found = {name: folder for name, folder in folders.items() if folder is not None and folder.is_dir()}
        builds = [Build(name, folder) for name, folder in found.items()]
        rows = fleets(builds, options.quick) if options.replicas else table(builds, options.quick)
        for build in builds:
            build.close()
    if options.json:
        Path(options.json).write_text(json.dumps({"python": sys.version, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
