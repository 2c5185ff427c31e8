"""The command line: what it prints, writes and refuses."""

from __future__ import annotations

import gc
import json
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from importlib.metadata import EntryPoint, EntryPoints
from pathlib import Path
from types import ModuleType
from typing import Any

import click
import pytest
import yaml

from headway import __version__
from headway.__main__ import main as run_process
from headway.cli import COMMANDS, PAPERS, commands, main
from headway.records.parquet import load as load_records
from headway.report.page import library_name

SYNTHETIC = "--rate 5 --num-requests 40 --prompt-tokens 100 --output-tokens 20".split()
FLEET = "--model llama-3.1-8b --gpu a100-80gb --replicas 2".split()


@pytest.fixture
def scenario(tmp_path: Path) -> Path:
    file = tmp_path / "small.yaml"
    workload = {"builtin": "chat", "num_requests": 40}
    fleet = [{"model": "llama-3.1-8b", "gpu": "a100-80gb", "replicas": 2}]
    file.write_text(yaml.safe_dump({"workload": workload, "fleet": fleet}))
    return file


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    file = tmp_path / "trace.csv"
    rows = "".join(f"{i / 4},{100 + i},{10 + i % 7}\n" for i in range(40))
    file.write_text("arrival_s,prompt_tokens,output_tokens\n" + rows)
    return file


def error_of(capsys: pytest.CaptureFixture[str], *args: object) -> str:
    assert main([str(arg) for arg in args]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("error: ") and err.count("\n") == 1
    return err.removeprefix("error: ").strip()


def json_of(capsys: pytest.CaptureFixture[str], *args: object) -> Any:
    assert main([str(arg) for arg in args]) == 0
    return json.loads(capsys.readouterr().out)


def listed(capsys: pytest.CaptureFixture[str]) -> list[str]:
    """The commands that the help lists."""
    assert main(["--help"]) == 0
    return re.findall(r"^  ([a-z]+)  ", capsys.readouterr().out.partition("Commands:")[2], re.MULTILINE)


def entry_points_of(*names: str) -> Callable[..., EntryPoints]:
    """Installed packages whose commands these are, each one in a module `broken`."""
    return lambda **_: EntryPoints(EntryPoint(name, f"broken.{name}:command", "headway.commands") for name in names)


def test_help_names_every_command_that_is_installed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("importlib.metadata.entry_points", entry_points_of(*PAPERS))
    assert listed(capsys) == list(COMMANDS)
    monkeypatch.setattr("importlib.metadata.entry_points", entry_points_of("arena", "simulate", "other"))
    assert listed(capsys) == [name for name in COMMANDS if name != "reproduce"]
    monkeypatch.setattr("importlib.metadata.entry_points", entry_points_of())
    assert listed(capsys) == [name for name in COMMANDS if name not in PAPERS]


@pytest.mark.parametrize("line", ["reproduce cauchy", "reproduce --help", "arena --builtin quick"])
def test_a_command_of_a_package_that_is_not_installed_names_it(
    line: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("importlib.metadata.entry_points", entry_points_of())
    assert main(line.split()) == 2
    (told,) = capsys.readouterr().err.splitlines()
    assert f"headway {line.split()[0]} is in another package" in told and "pip install headway-papers" in told


def test_help_imports_no_command_and_nothing_heavy() -> None:
    code = (
        "import sys; from headway.cli import main; main(['--help']);"
        "print(sorted(name for name in sys.modules if name.startswith(('headway.', 'headway_papers')) or name in"
        " {'numpy', 'pyarrow', 'plotly', 'rich', 'yaml', 'msgspec'}))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    imported = ["headway.cli", "headway.cli.stdout", "headway.core", "headway.core.errors"]
    assert done.stdout.splitlines()[-1] == str(imported)


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == 0
    assert capsys.readouterr().out in (f"headway {__version__} (pure Python)\n", f"headway {__version__} (compiled)\n")


def test_simulate_prints_a_table(scenario: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["simulate", str(scenario)]) == 0
    out, err = capsys.readouterr()
    assert "least-loaded" in out and "TTFT p99" in out
    assert err == ""


def test_json_has_its_stable_keys(scenario: Path, capsys: pytest.CaptureFixture[str]) -> None:
    printed = json_of(capsys, "simulate", scenario, "--json", "--seed", 3)
    assert list(printed) == ["version", "name", "seed", "scenario", "results"]
    assert (printed["version"], printed["name"], printed["seed"]) == (__version__, "small", 3)
    (result,) = printed["results"]
    assert list(result) == [
        "policies",
        "num_requests",
        "num_completed",
        "simulate_s",
        "total_s",
        "calibrated",
        "pools",
        "notes",
        "metrics",
        "bands",
    ]
    assert result["num_requests"] == result["num_completed"] == 40
    assert [set(pool) for pool in result["pools"]] == [
        {"name", "gpu", "engine", "calibrated", "uncalibrated", "version"}
    ]
    assert result["calibrated"] == all(pool["calibrated"] for pool in result["pools"])
    for key in ("ttft_s.p50", "ttft_s.p99", "tpot_s.mean", "e2e_s.mean", "usd"):
        assert result["metrics"][key] > 0
    assert result["metrics"]["answer_s.p50"] is None
    assert yaml.safe_load(printed["scenario"])["seed"] == 3


def test_compare_without_a_file(trace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    policies = ["--routing", "random,round-robin", "--ordering", "fcfs,edf"]
    printed = json_of(capsys, "compare", "--trace", trace, *FLEET, "--tp", 1, *policies, "--json")
    assert [tuple(result["policies"].values()) for result in printed["results"]] == [
        ("random", "fcfs"),
        ("random", "edf"),
        ("round-robin", "fcfs"),
        ("round-robin", "edf"),
    ]
    assert {result["num_completed"] for result in printed["results"]} == {40}
    faster = json_of(capsys, "compare", "--trace", trace, *FLEET, "--rate-scale", 2, "--json")
    slow, fast = (p["results"][0]["metrics"]["throughput_rps"] for p in (printed, faster))
    assert fast > 1.5 * slow


def test_compare_with_synthetic_requests(capsys: pytest.CaptureFixture[str]) -> None:
    engine = ["--engine", "vllm-0.15", "--max-num-seqs", 3, "--max-num-batched-tokens", 64]
    printed = json_of(capsys, "compare", *SYNTHETIC, *FLEET, *engine, "--step", "exact", "--json")
    (pool,) = yaml.safe_load(printed["scenario"])["fleet"]
    assert pool["engine"] == {"name": "vllm-0.15", "max_num_seqs": 3, "max_num_batched_tokens": 64}
    assert printed["results"][0]["metrics"]["output_tokens"] == 40 * 20


def test_compare_with_a_closed_loop(capsys: pytest.CaptureFixture[str]) -> None:
    flags = "--num-requests 30 --prompt-tokens azure-conv --output-tokens 20 --concurrency 3".split()
    printed = json_of(capsys, "compare", *flags, *FLEET, "--json")
    assert printed["results"][0]["num_completed"] == 30


def test_a_model_from_its_config(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = {
        "model_type": "llama",
        "num_hidden_layers": 16,
        "hidden_size": 2048,
        "intermediate_size": 8192,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "vocab_size": 128256,
        "max_position_embeddings": 8192,
        "torch_dtype": "bfloat16",
        "architectures": ["LlamaForCausalLM"],
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    flags = ["--model-config", tmp_path / "config.json", "--gpu", "l4"]
    assert json_of(capsys, "compare", *SYNTHETIC, *flags, "--json")["results"][0]["num_completed"] == 40
    assert json_of(capsys, "catalog", "memory", *flags, "--json")["kv_capacity_tokens"] > 0


def test_flags_override_the_file(scenario: Path, trace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--gpu", "l40s", "--max-num-seqs", 5, "--trace", trace, "--limit", 10, "--json"]
    printed = json_of(capsys, "compare", scenario, *flags)
    made_by = yaml.safe_load(printed["scenario"])
    assert made_by["fleet"][0]["gpu"] == "l40s"
    assert made_by["fleet"][0]["engine"] == {"max_num_seqs": 5}
    assert printed["results"][0]["num_requests"] == 10


def test_out_holds_results_and_records(scenario: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "deep" / "out"
    assert main(["compare", str(scenario), "--routing", "random,round-robin", "--out", str(out)]) == 0
    assert sorted(path.name for path in out.iterdir()) == [
        "random--fcfs",
        "results.json",
        "round-robin--fcfs",
    ]
    records, made_by = load_records(out / "random--fcfs")
    assert len(records.requests["request"]) == 40
    again = tmp_path / "again.yaml"
    again.write_text(made_by["scenario_yaml"])
    capsys.readouterr()
    repeated = json_of(capsys, "simulate", again, "--json")["results"][0]["metrics"]
    assert repeated == json.loads((out / "results.json").read_text())["results"][0]["metrics"]


def test_a_report_and_a_trace(scenario: Path, tmp_path: Path) -> None:
    html, trace = tmp_path / "out" / "report.html", tmp_path / "out" / "trace.json"
    assert main(["simulate", str(scenario), "--html", str(html), "--trace-out", str(trace)]) == 0
    assert html.read_text().startswith("<!doctype html>")
    assert (html.parent / library_name()).exists()
    assert json.loads(trace.read_text())["traceEvents"]


def test_a_new_scenario_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "mine.yaml"
    assert main(["new", str(file)]) == 0
    assert f"headway compare {file}" in capsys.readouterr().out
    assert "exists already" in error_of(capsys, "new", file)
    assert main(["new", str(file), "--force"]) == 0
    capsys.readouterr()
    few = ("--num-requests", 50, "--warmup-s", 0, "--seeds", 1)
    assert len(json_of(capsys, "compare", file, *few, "--json")["results"]) == 10


def test_workload_takes_a_file_as_trace_does(trace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    fleet = ("--model", "llama-3.1-8b", "--gpu", "a100-80gb", "--json")
    found = [json_of(capsys, "simulate", flag, trace, *fleet) for flag in ("--trace", "--workload")]
    assert found[0]["results"][0]["metrics"] == found[1]["results"][0]["metrics"]
    assert main(["simulate", "--workload", "nowhere.parquet", *fleet]) == 2
    assert "nowhere.parquet" in capsys.readouterr().err


def test_workload_commands(trace: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert json_of(capsys, "workload", "describe", trace, "--json")["num_requests"] == 40
    assert main(["workload", "convert", str(trace), str(tmp_path / "t.parquet"), "--limit", "7"]) == 0
    assert capsys.readouterr().out == ""
    assert main(["workload", "describe", str(tmp_path / "t.parquet")]) == 0
    assert "num_requests" in capsys.readouterr().out
    assert main(["workload", "generate", str(tmp_path / "g.csv.gz"), *SYNTHETIC]) == 0
    capsys.readouterr()
    described = json_of(capsys, "workload", "describe", tmp_path / "g.csv.gz", "--json")
    assert described["num_requests"] == 40 and described["prompt_tokens"]["max"] == 100
    spec = tmp_path / "w.yaml"
    spec.write_text("builtin: chat\nnum_requests: 12\n")
    assert main(["workload", "generate", str(tmp_path / "g.csv"), "--spec", str(spec)]) == 0
    assert len((tmp_path / "g.csv").read_text().splitlines()) == 13


def test_help_lists_commands_with_their_whole_first_sentence(capsys: pytest.CaptureFixture[str]) -> None:
    for group in ("plan", "workload", "catalog", "keys", "export", "forecast"):
        assert main([group, "--help"]) == 0
        listed = capsys.readouterr().out.partition("Commands:")[2]
        assert listed.strip() and "..." not in listed, group


def test_a_run_that_ends_within_its_warm_up_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    small = ["simulate", "--workload", "chat", "--model", "llama-3.1-8b", "--gpu", "h100", "--num-requests", "20"]
    assert main([*small, "--rate", "20", "--warmup-s", "30"]) == 0
    output = " ".join(capsys.readouterr().out.split())
    assert "nothing is measured: all requests arrived in the first" in output and "the warm-up of 30 s" in output
    assert main([*small, "--rate", "20", "--warmup-s", "0.01"]) == 0
    assert "nothing is measured" not in capsys.readouterr().out


OWN = """
from headway.core.decision import Placement

class Peeks:
    def route(self, request, view):
        return Placement(min(view.replicas, key=lambda r: r.num_in_flight * request.output_tokens).id)

class Knows(Peeks):
    oracle = True

class MovesUnannounced:
    quantum, preemptive = None, False
    def rank(self, request, now):
        return request.prompt_tokens - now
"""


def test_spaces_after_commas_are_no_part_of_a_name(capsys: pytest.CaptureFixture[str]) -> None:
    options = "--model llama-3.1-8b --gpu h100 --rate 9 --num-requests 9 --prompt-tokens 9 --output-tokens 9".split()
    assert main(["compare", *options, "--routing", "round-robin, least-loaded", "--seeds", "1", "--json"]) == 0
    results = json.loads(capsys.readouterr().out)["results"]
    assert [each["policies"]["routing"] for each in results] == ["round-robin", "least-loaded"]


def test_own_policies_that_break_a_rule_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "own_for_test.py").write_text(OWN)
    monkeypatch.chdir(tmp_path)
    small = ["compare", "--workload", "chat", "--model", "llama-3.1-8b", "--gpu", "h100", "--num-requests", "20"]
    small += ["--rate", "20", "--seeds", "1", "--routing", "own_for_test:Peeks,own_for_test:Knows,least-kv"]
    assert main([*small, "--ordering", "own_for_test:MovesUnannounced"]) == 0
    router, ordering = capsys.readouterr().err.strip().splitlines()
    assert router == (
        "note: routing own_for_test:Peeks: read request.output_tokens, which only a policy with `oracle = True` may"
        " (headway.testing.check_router)"
    )
    assert ordering.startswith("note: ordering own_for_test:MovesUnannounced: the rank moved")


LONG_TERM = """
fleet:
  - {model: llama-2-70b, gpu: a100-80gb, tp: 4, max_replicas: 2}
workload: {builtin: sageserve-july-2025, models: {llama-2-70b: 1}, start_hour: 58, duration_s: 60, scale: 0.01}
policies:
  scaling:
    name: %s
    plan: {step_s: 900, period_s: 900, tps: {llama-2-70b: 120}}
    forecaster: {name: seasonal-naive, past_hours: 48}
"""
OWN_LONG_TERM = """
from headway.policies.scaling.long_term import LongTermImmediateScaler

class Own(LongTermImmediateScaler):
    pass
"""


@pytest.mark.parametrize("name", ["lt-i", "own_long_term:Own"])
def test_scalers_with_what_only_a_scenario_makes_are_run_and_left_out_of_the_check(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "own_long_term.py").write_text(OWN_LONG_TERM)
    (tmp_path / "long_term.yaml").write_text(LONG_TERM % name)
    monkeypatch.chdir(tmp_path)
    assert main(["simulate", "long_term.yaml", "--json", "--no-progress"]) == 0
    assert "error" not in capsys.readouterr().err


def test_catalog_commands(capsys: pytest.CaptureFixture[str]) -> None:
    assert json_of(capsys, "catalog", "gpus", "a100", "--json")["name"] == "a100-80gb"
    names = [engine["name"] for engine in json_of(capsys, "catalog", "engines", "--json")]
    assert "vllm-0.15" in names
    assert set(json_of(capsys, "catalog", "--json")) == {"gpus", "models", "engines"}
    assert main(["catalog"]) == 0
    assert "llama-3.1-8b" in capsys.readouterr().out
    assert main(["catalog", "models", "llama-3.1-8b"]) == 0
    assert "num_kv_heads" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ("smulate", "unknown command 'smulate'; did you mean 'simulate'?"),
        ("simulate", "no workload: give a SCENARIO, --trace, --workload"),
        ("simulate no.yaml", "no.yaml: no such file"),
        ("simulate x.yaml --builtin chat", "SCENARIO and --builtin: expected one of them"),
        (
            "simulate --builtin chat",
            "policies.routing: several are for headway compare; expected one, as with --routing round-robin",
        ),
        ("compare --gpu a100", "no workload: give a SCENARIO, --trace, --workload"),
        ("compare --workload chat --gpu a100", "--model or --model-config is missing"),
        ("compare --workload chat --model llama-3.1-8b", "--gpu is missing"),
        ("compare --workload chat --model llama-3.1-8b --gpu a10000", "--gpu: unknown GPU 'a10000'"),
        (
            "compare --workload chat --model llama-3 --gpu a100",
            "--model: unknown model 'llama-3'; did you mean",
        ),
        (
            "compare --workload chat --model llama-3.1-8b --gpu a100 --routing rr",
            "--routing: unknown router 'rr'",
        ),
        (
            "compare --workload chat --model llama-3.1-8b --gpu a100 --rate-scale 2",
            "--rate-scale: goes with --trace",
        ),
        (
            "compare --model llama-3.1-8b --gpu a100 --workload chat --trace x.csv",
            "--trace and --workload: expected one of them",
        ),
        ("compare --replicas 0", "Invalid value for '--replicas': 0 is not in the range x>=1"),
        ("compare --nonsense", "No such option"),
        ("workload describe no.csv", "no.csv: no such file"),
        ("workload generate x.txt", "x.txt: the suffix selects the format"),
        ("catalog gpus h10", "unknown GPU 'h10'; did you mean 'a10'?"),
        ("catalog memory --gpu l4", "--model, --model-config: expected one of them"),
    ],
)
def test_mistakes_are_one_line(
    args: str,
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    assert message in error_of(capsys, *args.split())
    assert list(tmp_path.iterdir()) == []


def test_a_failing_run_leaves_no_output(scenario: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "bad.csv").write_text("arrival_s,prompt_tokens,output_tokens\n0,10,5\n1,ten,5\n")
    flags = ["--trace", tmp_path / "bad.csv", "--out", tmp_path / "out", "--html", tmp_path / "r.html"]
    assert "bad.csv: line 3" in error_of(capsys, "compare", scenario, *flags)
    assert not (tmp_path / "out").exists() and not (tmp_path / "r.html").exists()


def test_interrupted(scenario: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    import headway.cli.simulate as module

    def interrupt(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(module, "run", interrupt)
    assert main(["simulate", str(scenario)]) == 130
    assert capsys.readouterr().err.strip().endswith("interrupted")


def test_a_reader_that_goes_away() -> None:
    code = "import sys; from headway.cli import main; sys.exit(main(['catalog']))"
    command = f'"{sys.executable}" -c "{code}" | true; echo "${{PIPESTATUS[0]}}"'
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=True)
    assert "Traceback" not in done.stderr
    assert done.stdout.strip() in ("0", "1")


def test_the_catalog_says_where_step_times_come_from(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["catalog", "coefficients", "--gpu", "h100", "--json"]) == 0
    own = json.loads(capsys.readouterr().out)
    assert own["calibrated"] and own["version"] == own["measured_version"] == "0.25.1" and not own["estimated"]
    assert main(["catalog", "coefficients", "--gpu", "h100", "--engine", "sglang", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["estimated"] == ["generic overhead of sglang"]
    assert main(["catalog", "coefficients", "--gpu", "h100", "--version", "0.32"]) == 0
    assert "overhead of vllm 0.25.1, not 0.32" in capsys.readouterr().out
    assert main(["catalog", "coefficients", "--gpu", "h100", "--version", "0.15.1", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["measured_version"] == "0.15.1"


NOT_FOR_A_COMPARISON = (
    "pyarrow", "scipy", "highspy", "plotly", "ssl", "asyncio", "multiprocessing", "concurrent", "logging", "numpy.fft",
    "rich.progress", "headway.planning", "headway.forecast", "headway.calibration", "headway.serving",
    "headway_papers", "headway.report.html", "headway.report.trace", "headway.metrics.series",
    "headway.scenario.ray_cluster",
)  # fmt: skip
"""Modules that a comparison in one process does not need, with all below them."""


def test_a_comparison_imports_only_what_it_needs_and_a_simulation_and_a_plan_no_pyarrow() -> None:
    """Imports are half of the time of a short run."""
    run = "--model llama-3.1-8b --gpu h100 --num-requests 5 --routing round-robin".split()
    code = f"""import sys; from headway.cli import main
main(["compare", *{run}, "--seeds", "1", "--jobs", "1"]); compared = list(sys.modules)
main(["simulate", *{run}]); import headway.cli.plan
print(); print("pyarrow" in sys.modules, "headway.serving" in sys.modules); print(*compared)"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    found, modules = done.stdout.splitlines()[-2:]
    imported = modules.split()
    assert found == "False False"
    assert "headway.scenario.run" in imported
    assert [
        name for name in imported if f"{name}.".startswith(tuple(f"{each}." for each in NOT_FOR_A_COMPARISON))
    ] == []


def options(group: click.Group, before: str = "") -> Iterator[tuple[str, click.Option]]:
    """Each option of each command below a group, with the command's name."""
    for name in group.list_commands(click.Context(group)):
        command = group.get_command(click.Context(group), name)
        if isinstance(command, click.Group):
            yield from options(command, f"{before}{name} ")
        elif command is not None:
            yield from ((f"{before}{name}", each) for each in command.params if isinstance(each, click.Option))


def test_options_between_commas_are_listed_and_may_be_repeated() -> None:
    """A second `--routing` once replaced the first one without a word."""
    found = {}
    for command, option in options(commands):
        if "separated by commas" in (option.help or "").lower() or "," in str(option.default):
            found[f"{command} {option.opts[0]}"] = option.multiple
    assert {"compare --routing", "plan capacity --gpus", "plan tiers --tiers"} <= set(found)
    assert [name for name, is_multiple in found.items() if not is_multiple] == []


def test_routers_of_several_options_are_compared(capsys: pytest.CaptureFixture[str]) -> None:
    def routers(*given: str) -> list[str]:
        flags = [part for each in given for part in ("--routing", each)]
        results = json_of(capsys, "compare", *FLEET, *SYNTHETIC, "--seeds", "1", "--json", *flags)["results"]
        return [each["policies"]["routing"] for each in results]

    assert routers("random", "least-loaded") == routers("random,least-loaded") == ["random", "least-loaded"]


def test_ctrl_c_during_imports_ends_quietly(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    class Interrupted(ModuleType):
        def __getattr__(self, name: str) -> Any:
            raise KeyboardInterrupt

    monkeypatch.setitem(sys.modules, "headway.cli", Interrupted("headway.cli"))
    assert run_process() == 130
    assert capsys.readouterr() == ("", "interrupted\n")


def test_new_says_what_it_writes_and_keeps_what_is_there(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    first, second, schema = tmp_path / "a.yaml", tmp_path / "b.yaml", tmp_path / "headway.schema.json"
    assert main(["new", str(first)]) == 0
    assert f"wrote {first} and {schema}" in capsys.readouterr().out and schema.exists()
    assert main(["new", str(second)]) == 0
    printed = capsys.readouterr()
    assert f"wrote {second};" in printed.out and not printed.err, "the schema is there already"
    schema.write_text("{}")
    assert main(["new", str(tmp_path / "c.yaml")]) == 0
    assert schema.read_text() == "{}" and f"{schema} is not that of this version" in capsys.readouterr().err
    assert main(["new", str(first), "--force"]) == 0
    assert f"and {schema}" in capsys.readouterr().out and schema.read_text() != "{}"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("simulate", "a.yaml", "--limit", "5"), "--limit: goes with a trace; expected --trace, or a scenario that"),
        (("compare", "a.yaml", "--rate-scale", "2"), "--rate-scale: goes with a trace; expected --trace, or a"),
        (("plan", "tiers", "a.yaml", "--tiers", "0"), "--tiers: '0'; expected numbers from 1, separated by commas"),
        (("plan", "fleet", "a.yaml", "--have", "h100:x"), "'h100:x'; expected type:count:price:interruptions\n"),
    ],
)
def test_options_are_named_with_what_they_need(
    options: tuple[str, ...],
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("a.yaml").write_text("workload: {builtin: chat}\nfleet: [{model: llama-3.1-8b, gpu: h100}]\n")
    assert main(list(options)) == 2
    assert message in capsys.readouterr().err


def test_a_plan_that_cannot_be_written_is_printed_all_the_same(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    scenario = {
        "workload": {"prompt_tokens": 300, "output_tokens": 60, "arrivals": 5, "num_requests": 50},
        "fleet": [{"model": "llama-3.1-8b", "gpu": "h100", "engine": "vllm-0.15", "max_replicas": 2}],
        "slo": {"ttft_s": 2},
    }
    path, taken = tmp_path / "s.yaml", tmp_path / "taken.yaml"
    path.write_text(yaml.safe_dump(scenario))
    taken.touch()
    words = f"plan scaling {path} --startup-s 30,60 --scalers hpa --no-clairvoyant --no-cache --jobs 1 --out {taken}"
    assert main(words.split()) == 2
    printed = capsys.readouterr()
    assert "starts of 30 s" in printed.out and "KV use 0.55; 0.7; 0.85" in printed.out
    assert printed.err.splitlines()[-1] == f"error: --out {taken}: is a file; this plan has several, and needs a folder"
    assert not taken.read_text()


def test_a_plan_within_a_process_leaves_its_garbage_collection(capsys: pytest.CaptureFixture[str]) -> None:
    """Only the process of a plan's own command collects rarely."""
    before = gc.get_threshold()
    words = "plan capacity --gpus h100 --tp 1 --no-cache --jobs 1 --tpot-p99 1s".split()
    assert main([*words, "--model", "llama-3.1-8b", *SYNTHETIC]) == 0
    assert gc.get_threshold() == before
