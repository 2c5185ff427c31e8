# ruff: noqa: T201 (a script prints)
"""Seconds of the planners, and of one long run on several cores.

    python bench/planners.py [--jobs N] [--only NAME] [--week REQUESTS [--days 7]] [--json FILE]

Each planner runs as a command, without a cache. Wall seconds need an idle machine; CPU seconds of all processes do not.
`--week REQUESTS` simulates a week of four models in three regions, on fixed fleets, in one process and in N, compares
the records and prints the peak memory of all processes together; instead of the planners. Memory is what processes hold
themselves, not the pages of files, which the system drops when memory is short. `--days` makes the week shorter.
"""

from __future__ import annotations

import argparse
import compileall
import json
import os
import resource
import shlex
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import yaml

import headway
from headway import scenario
from headway.config.strict_yaml import Places
from headway.scenario.processes import available_cores

sys.path.insert(0, str(Path(__file__).parents[1] / "papers" / "bench"))
from sageserve import digest

CHAT = """
name: chat
workload: {builtin: sharegpt, arrivals: 60}
slo: {ttft_s: 5, tpot_s: 0.03}
fleet:
  - {model: llama-3.1-8b, gpu: h800, engine: vllm-v0}
"""
OF_FLEETS = """
llama-3.2-1b llama-3.2-3b gemma-3-4b-it mistral-7b qwen3-8b llama-3.1-8b gemma-3-12b-it mistral-nemo-12b qwen3-14b phi-4
gpt-oss-20b gemma-3-27b-it qwen3-32b llama-3.1-70b deepseek-r1-distill-qwen-7b olmo-3-7b-instruct granite-4.0-h-tiny
deepseek-v2-lite ernie-4.5-21b-a3b-pt olmo-3-32b-think seed-oss-36b-instruct mixtral-8x7b gpt-oss-120b llama-3.3-70b
""".split()
FLEETS = {"fleet-14.yaml": (14, 200, 2_000), "fleet-24.yaml": (24, 1_000, 20_000)}
"""Models, requests/s and requests. Small models have most of them."""
COMMANDS = {
    "capacity, README": "plan capacity --workload chat --rate 50 --num-requests 500 --model llama-3.1-8b"
    " --gpus a100-80gb,h100-80gb-sxm --tp 1,2 --ttft-p99 2 --tpot-p99 0.03",
    "capacity, 70B on up to 32 GPUs": "plan capacity --workload chat --rate 12 --model llama-3.1-70b"
    " --gpus a100-80gb,h100-80gb-sxm --tp 2,4,8 --max-replicas 16 --ttft-p99 2 --tpot-p99 0.05",
    "cascade, 32 GPUs": "plan cascade --builtin cascadia --quality 85",
    "combos": "plan combos chat.yaml --gpus h800:8,a800-pcie:8,h20:8 --gpus-per-server 2",
    "fleet, 14 models on 1,000 GPUs": "plan fleet fleet-14.yaml --have a100:400,h100:400,l40s:200",
    "fleet, 24 models on 10,000 GPUs": "plan fleet fleet-24.yaml --have a100:4000,h100:4000,l40s:2000",
}
"""The targets on two idle cores: 0.7 s, 3 s, 3 s, 3 s, 1.5 s and 10 s."""
MODELS = ("llama-3.1-8b", "qwen3-8b", "mistral-7b", "llama-3.2-3b")
REGIONS = ("east", "central", "west")
DAY_S = 86_400.0


def fleet_of(num_models: int, rate: float, num_requests: int) -> dict[str, Any]:
    """A scenario of chats with several models."""
    models = OF_FLEETS[:num_models]
    shares = {model: round(1 / (i % num_models // 2 + 1), 3) for i, model in enumerate(models)}
    workload = {"builtin": "chat", "arrivals": rate, "num_requests": num_requests, "models": shares}
    fleet = [{"model": model, "gpu": "h100", "engine": "vllm"} for model in models]
    return {"name": "fleet", "workload": workload, "slo": {"ttft_s": 2, "tpot_s": 0.05}, "fleet": fleet}


def timed(command: str, jobs: int) -> dict[str, float]:
    """Wall seconds, and CPU seconds of the command and its processes."""
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "chat.yaml").write_text(CHAT)
        for name, asked_for in FLEETS.items():
            (Path(folder) / name).write_text(yaml.safe_dump(fleet_of(*asked_for), sort_keys=False))
        before, began_s = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
        asked = shlex.split(command) + ([] if "cascade" in command else ["--jobs", str(jobs)])
        arguments = [sys.executable, "-m", "headway", *asked, "--no-cache"]
        subprocess.run(arguments, cwd=folder, check=True, capture_output=True)
        wall_s, after = time.perf_counter() - began_s, resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu_s = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return {"wall_s": round(wall_s, 2), "cpu_s": round(cpu_s, 2)}


def week(num_requests: int, days: float) -> dict[str, Any]:
    """A week's scenario: as many replicas as the mean rate needs at half load, more or less."""
    rate = num_requests / (days * DAY_S)
    fleet = [
        {"name": f"{region}-{model}", "model": model, "gpu": "h100", "region": region,
         "replicas": max(1, round(rate / len(MODELS) / len(REGIONS) / 5))}
        for model in MODELS for region in REGIONS
    ]  # fmt: skip
    workload = {
        "num_requests": num_requests, "arrivals": {"kind": "poisson", "rate": rate},
        "prompt_tokens": {"kind": "lognormal", "mean": 1000, "cv": 0.5, "max": 3000},
        "output_tokens": {"kind": "lognormal", "mean": 200, "cv": 0.5, "max": 600},
        "models": dict.fromkeys(MODELS, 1), "regions": dict.fromkeys(REGIONS, 1),
    }  # fmt: skip
    return {"workload": workload, "fleet": fleet, "policies": {"routing": "least-loaded"}}


def weekly(num_requests: int, days: float, jobs: int) -> dict[str, Any]:
    """One run, in this process and its workers."""
    chosen = scenario.assemble(week(num_requests, days), Places(), Path())
    began_s = time.perf_counter()
    run = scenario.run(chosen, jobs=jobs)
    wall_s, used = time.perf_counter() - began_s, os.times()
    return {
        "jobs": jobs, "num_requests": num_requests, "wall_s": round(wall_s, 1), "simulate_s": round(run.simulate_s, 1),
        "cpu_s": round(used.user + used.system + used.children_user + used.children_system, 1),
        "digest": digest(run.records),
    }  # fmt: skip


def watched(command: list[str]) -> dict[str, Any]:
    """What the command prints as JSON, with the peak of the anonymous memory of its processes."""
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    peak_kib = 0
    while process.poll() is None:
        peak_kib = max(peak_kib, anonymous_kib(process.pid))
        time.sleep(0.2)
    assert process.stdout is not None
    if process.returncode:
        sys.exit(process.returncode)
    return {**json.loads(process.stdout.read()), "peak_gib": round(peak_kib / 2**20, 2)}


def anonymous_kib(process: int) -> int:
    """Of a process and its children; what they share counts once."""
    try:
        lines = Path(f"/proc/{process}/smaps_rollup").read_text().splitlines()
        children = Path(f"/proc/{process}/task/{process}/children").read_text().split()
    except OSError:  # it has ended
        return 0
    own = sum(int(line.split()[1]) for line in lines if line.startswith("Pss_Anon:"))
    return own + sum(anonymous_kib(int(each)) for each in children)


def main() -> None:
    """Run and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--jobs", type=int, default=available_cores())
    parser.add_argument("--only", help="planners whose name has this in it")
    parser.add_argument("--week", type=int, help="requests of the week, instead of the planners")
    parser.add_argument("--days", type=float, default=7.0, help="of the week")
    parser.add_argument("--in-this-process", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--json", metavar="FILE", help="write the rows here as well")
    options = parser.parse_args()
    rows: list[dict[str, Any]] = []
    if options.in_this_process:
        print(json.dumps(weekly(options.week, options.days, options.jobs)))
        return
    if options.week:
        for jobs in dict.fromkeys((1, options.jobs)):
            asked = ["--week", str(options.week), "--days", str(options.days), "--jobs", str(jobs)]
            own = [sys.executable, __file__, *asked, "--in-this-process"]
            rows.append(watched(own))
            print(yaml.safe_dump(rows[-1], sort_keys=False, default_flow_style=True, width=200).strip(), flush=True)
        if len({row["digest"] for row in rows}) > 1:
            sys.exit("the records differ")
    else:
        # As in an installation. Where PYTHONDONTWRITEBYTECODE is set, each command would compile 250 modules first.
        compileall.compile_dir(Path(headway.__file__).parent, quiet=2)
        for name, command in COMMANDS.items():
            if options.only is None or options.only in name:
                rows.append({"planner": name, "jobs": options.jobs, **timed(command, options.jobs)})
                print("  ".join(f"{key} {value}" for key, value in rows[-1].items()), flush=True)
    if options.json:
        Path(options.json).write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
