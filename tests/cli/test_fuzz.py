"""No input of a user ends in a traceback: random documents, files, options, own policies and arguments of `hw.*`.

Each case is a seed, and those that fail are named. They run in this process, on a few requests: 500 in `make test`,
10,000 in `make test-long`.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import pytest

import headway as hw
from headway.cli import main
from headway.config import strict_yaml
from headway.scenario.presets import BUILTINS, builtin

JUNK: list[Any] = [
    None, True, -1, 0, 0.5, 3, 1e12, float("nan"), float("inf"), "", "x", "2s", "450 ms", "own_junk:Nothing", [], [1],
    ["x"], [[]], {}, {"name": None}, {"name": "x", "y": 1}, {1: 2}, {"kind": "poisson"}, b"x", object(), int, lambda: 1,
    Path("nowhere"), (1, 2), {"a"}, 10**12, 10**30,
]  # fmt: skip
NUMBERS: list[Any] = [-1, 0, -0.5, float("inf"), -float("inf"), 1e300, 10**12, 10**30]
SMALL: dict[str, Any] = {
    "workload": {"prompt_tokens": 20, "output_tokens": 3, "arrivals": 5.0, "num_requests": 6},
    "fleet": [
        {"model": "llama-3.1-8b", "gpu": "h100", "engine": {"name": "simulated"}, "replicas": 2, "max_replicas": 3}
    ],
    "policies": {"routing": "least-loaded", "ordering": "fcfs"},
    "slo": {"ttft_s": 1.0},
    "simulation": {"until_s": 30.0},
}
PRESETS = [strict_yaml.read(builtin(name))[0] for name in BUILTINS if name != "sageserve"]  # forecasts take seconds
OPTIONS = [
    "--rate", "--num-requests", "--prompt-tokens", "--output-tokens", "--model", "--gpu", "--tp", "--pp", "--replicas",
    "--engine", "--max-num-seqs", "--max-num-batched-tokens", "--routing", "--ordering", "--migration", "--scaling",
    "--ordering-at", "--window", "--seed", "--step", "--until-s", "--warmup-s", "--trace", "--limit", "--rate-scale",
    "--concurrency", "--workload", "--coefficients", "--gpu-file", "--model-config",
]  # fmt: skip
TEXTS = [
    "", "x", "-1", "0", "1", "3", "nan", "inf", "1e9", "2s", "2 s", "own_junk:Nothing", "a:b", ":", "a:", "edf,fcfs",
    ",", "random", "..", ".", "s.yaml", "t.csv", "junk.bin", "llama-3.1-8b", "h100", "vllm", "[", "{}", "é", "chat",
    "1000000000000", "9" * 30,
]  # fmt: skip
HEAD = "arrival_s,prompt_tokens,output_tokens\n"
FILES = {
    "t.csv": ["", HEAD, f"{HEAD}0,1,1\n1,x,1\n", f"{HEAD}0,5,2\n1,5,2\n", "a\n", "\ufeff,,\n", '{"timestamp": 0}\n',
              '{"timestamp": 0, "input_length": 5, "output_length": "x", "hash_ids": []}\n', "time,rate\n0,1\n60,1\n",
              "\x00\n", "[]"],
    "s.yaml": ["", "[]", "a: [", "workload: 3\nfleet: 4\n", "? [a]\n: b\n", "a: &a [*a]\n",
               "workload: {trace: t.csv}\nfleet: [{}]\n"],
    "junk.bin": ["PAR1\x00\x00", "\x1f\x8b\x08", "SQLite"],
}  # fmt: skip


def junk_policy(rng: Random) -> dict[str, Any]:
    """A policy of one's own whose methods return, or raise, anything."""

    def answer(*_: Any, **__: Any) -> Any:
        value = rng.choice([*JUNK, RuntimeError("no"), KeyError("k"), StopIteration()])
        if isinstance(value, Exception):
            raise value
        return value

    kind, verbs = rng.choice(
        [
            ("routing", ("route",)),
            ("ordering", ("rank",)),
            ("migration", ("moves", "at_phase")),
            ("admission", ("holds", "release")),
            ("scaling", ("scale",)),
        ]
    )
    attributes: dict[str, Any] = {verb: lambda self, *a, **k: answer(*a, **k) for verb in verbs}
    if kind in ("routing", "migration"):
        attributes = {name: lambda self, request, view: answer() for name in attributes}
    if "moves" in verbs:
        attributes["moves"] = lambda self, view: answer()
    for verb, arguments in (("rank", "request, now"), ("release", "view"), ("holds", "request"), ("scale", "view")):
        if verb in verbs:
            attributes[verb] = eval(f"lambda self, {arguments}: answer()", {"answer": answer})
    attributes |= {"interval_s": 0.5, "quantum": None, "preemptive": False}
    if rng.random() < 0.2:
        attributes[rng.choice(["interval_s", "quantum", "preemptive", "next_change", "learn"])] = rng.choice(JUNK)
    return {kind: type("Junk", (), attributes)}


def mutated(rng: Random, value: Any) -> Any:
    """A document with one value, at any depth, in place of another, removed or added."""
    changed = copy.deepcopy(value)
    at = changed
    while True:
        keys = list(at) if isinstance(at, dict) else list(range(len(at)))
        if not keys:
            return changed
        key = rng.choice(keys)
        if isinstance(at[key], dict | list) and at[key] and rng.random() < 0.8:
            at = at[key]
            continue
        how = rng.random()
        if how < 0.15:
            del at[key]
        elif how < 0.3 and isinstance(at, dict):
            at[rng.choice(["x", "kind", "name", f"{key}_", "routing"])] = rng.choice(JUNK)
        else:
            at[key] = rng.choice(JUNK)
        return changed


def document_case(rng: Random) -> None:
    document = mutated(rng, rng.choice([SMALL, SMALL, SMALL, *PRESETS]))
    if rng.random() < 0.4:
        document = mutated(rng, document)
    made = hw.load(document)
    if document.get("fleet") and len(document["fleet"]) == 1 and made.spec.workload.num_requests in range(20):
        pool = made.fleet.pools[0] if made.fleet.pools else None
        if pool is not None and pool.replicas < 9:
            hw.simulate(made)


def policy_case(rng: Random) -> None:
    policies = junk_policy(rng)
    hw.simulate({**SMALL, "policies": {**policies, "ordering_at": rng.choice(["replica", "gateway"])}})


def argument_case(rng: Random) -> None:
    junk, other = rng.choice(JUNK), rng.choice(JUNK)
    calls: list[Callable[[], Any]] = [
        lambda: hw.load(junk),
        lambda: hw.load(SMALL, junk),
        lambda: hw.load(SMALL, {"slo.ttft_s": junk}),
        lambda: hw.load(SMALL, {rng.choice(["fleet", "fleet.0", "fleet.9.gpu", "x.y", "slo", "", "."]): junk}),
        lambda: hw.load(builtin=junk),
        lambda: hw.simulate(SMALL, routing=junk),
        lambda: hw.simulate(SMALL, junk),
        lambda: hw.simulate(SMALL, **{rng.choice(["ordering", "migration", "admission", "scaling", "x"]): junk}),
        lambda: hw.compare(SMALL, seeds=junk),
        lambda: hw.compare(SMALL, jobs=junk),
        lambda: hw.sweep(SMALL, junk),
        lambda: hw.sweep(SMALL, {"workload.arrivals": junk}),
        lambda: hw.sweep(SMALL, {str(junk): [1]}),
        lambda: hw.plan_capacity(SMALL, gpus=junk, ttft_p99_s=1.0, max_replicas=1),
        lambda: hw.plan_capacity(SMALL, gpus=["h100"], tps=[1], ttft_p99_s=junk, attainment=other, max_replicas=1),
        lambda: hw.plan_fleet(SMALL, junk),
        lambda: hw.plan_fleet(junk, ["h100:1"]),
        lambda: hw.plan_combos(SMALL, junk),
        lambda: hw.plan_cascade(SMALL, quality=junk, latency_s=other),
        lambda: hw.plan_tiers(SMALL, num_tiers=junk, decays=other, seeds=1),
        lambda: hw.plan_cascade(SMALL, quality=rng.choice(NUMBERS), latency_s=5.0, gpus=rng.choice(NUMBERS)),
        lambda: hw.plan_capacity(SMALL, ttft_p99_s=1.0, demand=junk, jobs=rng.choice([*NUMBERS, 1])),
        lambda: hw.plan_combos(SMALL, ["h100:1"], rps=rng.choice(NUMBERS), routings=[]),
        lambda: hw.plan_tiers(SMALL, tolerance=rng.choice(NUMBERS), seeds=rng.choice([-1, 0])),
        lambda: hw.compare(SMALL, seeds=1).estimate(rng.choice([0, junk]), rng.choice(["ttft_s.p9", other])),
        lambda: hw.simulate(SMALL).plot(junk),
    ]
    rng.choice(calls)()


def command_case(rng: Random) -> None:
    for name, texts in FILES.items():
        Path(name).write_text(rng.choice(texts), encoding="latin-1", errors="replace")
    commands = [
        ["simulate", "--until-s", "5", "--model", "llama-3.1-8b", "--gpu", "h100", "--rate", "3", "--num-requests", "5",
         "--prompt-tokens", "9", "--output-tokens", "2"],
        ["simulate", "s.yaml"], ["workload", "describe", "t.csv"], ["workload", "convert", "t.csv", "out.csv"],
        ["workload", "describe", "junk.bin"], ["catalog", "gpus"], ["catalog", "models"], ["catalog", "memory"],
        ["forecast", "evaluate", "t.csv"], ["plan", "tiers", "s.yaml"], ["plan", "capacity", "s.yaml", "--no-cache"],
        ["plan", "fleet", "t.csv", "--have", rng.choice(TEXTS), "--slo", rng.choice(TEXTS), "--no-cache"],
        ["plan", "scaling", "s.yaml", "--no-cache", "--demand", rng.choice(["t.csv", ".", "junk.bin"])],
        ["validate", "t.csv"], ["calibrate", "t.csv", "--gpu", "h100"],
    ]  # fmt: skip
    command = list(rng.choice(commands))
    for _ in range(rng.randrange(3)):
        command += [rng.choice(OPTIONS), rng.choice(TEXTS)]
    if rng.random() < 0.2:
        command[rng.randrange(len(command))] = rng.choice(TEXTS)
    assert main(command) in (0, 1, 2, 3)


CASES = (document_case, document_case, policy_case, policy_case, argument_case, command_case)


def failure(seed: int) -> str:
    """What a case raised that is no HeadwayError; "": nothing."""
    rng = Random(seed)
    case = CASES[seed % len(CASES)]
    try:
        case(rng)
    except hw.HeadwayError:
        return ""
    except Exception as error:
        return f"seed {seed} ({case.__name__}): {type(error).__name__}: {str(error)[:200]}"
    return ""


@pytest.fixture
def _folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (tmp_path / "own_junk.py").write_text("class Nothing:\n    def route(self, request, view): ...\n")


@pytest.mark.usefixtures("_folder")
@pytest.mark.parametrize("seeds", [range(500), pytest.param(range(500, 10_000), marks=pytest.mark.long)], ids=str)
def test_nothing_ends_in_a_traceback(seeds: range) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        failed = [text for seed in seeds if (text := failure(seed))]
    assert not failed, "\n".join(failed)
