# ruff: noqa: T201 (a script prints)
"""The simulator beside Dynamo's native replay, in turns: wall and CPU seconds for the same number of requests.

    python3 -m venv DYNAMO && DYNAMO/bin/pip install ai-dynamo-runtime
    python bench/dynamo.py DYNAMO/bin/python [--folder FOLDER] [--num-requests N]

1,000 tokens in and 200 out, Poisson arrivals, 8 workers, round robin, no request's record kept by the replay. The rate
is 70% of what 8 replicas of Llama-2-70B on four H100 serve here. Both have their own model of step times, so latencies
differ. `--folder` has the package to measure, such as `build/compiled`.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
from pathlib import Path

REPLAY = """
import json, sys, time
from dynamo._core import run_mocker_synthetic_trace_replay as replay
for line in sys.stdin:
    num, rate = json.loads(line)
    wall_s, cpu_s = time.perf_counter(), time.process_time()
    replay(1000, 200, num, num_workers=8, request_rate=rate)
    print(json.dumps([time.perf_counter() - wall_s, time.process_time() - cpu_s]), flush=True)
"""
SIMULATE = """
import json, sys, time
sys.path.insert(0, sys.argv[1])
from bench import run
for line in sys.stdin:
    num, rate = json.loads(line)
    wall_s, cpu_s = time.perf_counter(), time.process_time()
    run("fixed", num, rate, 8, "round-robin")
    print(json.dumps([time.perf_counter() - wall_s, time.process_time() - cpu_s]), flush=True)
"""


def main() -> None:
    """Run and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("python", help="an interpreter with ai-dynamo-runtime")
    parser.add_argument("--folder", type=Path, default=Path(__file__).parents[1] / "src")
    parser.add_argument("--num-requests", type=int, default=20_000)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--rate", type=float, default=54.0, help="requests per second")
    options = parser.parse_args()
    commands = {
        "replay": ([options.python, "-c", REPLAY], None),
        "headway": ([sys.executable, "-c", SIMULATE, str(Path(__file__).parent)], str(options.folder)),
    }
    seconds: dict[str, list[list[float]]] = {name: [] for name in commands}
    processes = {}
    for name, (command, path) in commands.items():
        env = {**os.environ, "PYTHONPATH": path or ""}
        processes[name] = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=env)
    for turn in range(options.repeats + 1):
        for name in list(processes)[:: 1 if turn % 2 == 0 else -1]:
            stdin, stdout = processes[name].stdin, processes[name].stdout
            assert stdin is not None and stdout is not None
            stdin.write(json.dumps([options.num_requests if turn else 500, options.rate]) + "\n")
            stdin.flush()
            taken = json.loads(stdout.readline())
            if turn:
                seconds[name].append(taken)
    for process in processes.values():
        process.communicate()
    for i, kind in enumerate(("wall", "CPU")):
        of = {name: [taken[i] for taken in seconds[name]] for name in seconds}
        ratio = statistics.median(a / b for a, b in zip(of["replay"], of["headway"], strict=True))
        rates = {name: round(options.num_requests / statistics.median(taken)) for name, taken in of.items()}
        print(f"requests per {kind} second:", *(f"{name} {rate:,}" for name, rate in rates.items()), f"({ratio:.1f}x)")


if __name__ == "__main__":
    main()
