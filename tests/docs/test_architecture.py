"""docs/architecture.md: its tree lists the packages, and its steps are those of real calls."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from headway import cli
from headway.config.scenario import assemble
from headway.config.strict_yaml import Places, parse
from headway.core.fleet import Parallel
from headway.planning.capacity.plan import CapacityOptions, plan
from headway.planning.capacity.problem import CapacityCandidate, Situation, Targets
from headway.planning.rehearsals import Resources, Source
from headway.scenario.run import Simulator, run
from scripted import DONE, OK, chunk, event
from traced_calls import Call, missing_step, traced

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
MOST_POSITIONAL, MOST_METHODS = 8, 40
SCENARIO = """
workload: {num_requests: 1, arrivals: 1, prompt_tokens: 500, output_tokens: 20}
fleet: [{model: llama-3.1-8b, gpu: h100, replicas: 2, engine: simulated-0.15}]
"""


def steps(name: str) -> list[Call]:
    """The listed steps: file and function."""
    block = re.search(rf"^```text hops {name}\n(.*?)^```$", PAGE, re.DOTALL | re.MULTILINE)
    assert block is not None, name
    return [(line.split()[0], line.split()[1]) for line in block[1].splitlines()]


def test_the_tree_lists_every_package() -> None:
    block = re.search(r"^```text tree\nsrc/headway/\n(.*?)^papers/", PAGE, re.DOTALL | re.MULTILINE)
    assert block is not None
    package = ROOT / "src" / "headway"
    listed = set(re.findall(r"^  (\w+)/ ", block[1], re.MULTILINE))
    assert listed == {path.name for path in package.iterdir() if path.is_dir() and any(path.glob("*.py"))}
    gateway = block[1][block[1].index("  gateway/") : block[1].index("  calibration/")]
    listed = set(re.findall(r"^    (\w+)/ ", gateway, re.MULTILINE))
    assert listed == {path.name for path in (package / "gateway").iterdir() if path.is_dir() and any(path.glob("*.py"))}


def test_the_table_of_states_is_the_one_that_requests_keep_to() -> None:
    pytest.importorskip("httptools")
    from headway.gateway.scheduling.in_flight import TRANSITIONS

    rows = re.findall(r"^\| (`[A-Z_]+`(?:, `[A-Z_]+`)*) \|[^|]*\|([^|]*)\|$", PAGE, re.MULTILINE)
    listed = {name: set(re.findall(r"\w+", after)) for names, after in rows for name in re.findall(r"\w+", names)}
    assert listed == {state.name: {each.name for each in after} for state, after in TRANSITIONS.items()}


def test_calls_name_their_arguments_if_there_are_many_and_no_class_has_too_many_methods() -> None:
    many, large = list[str](), list[str]()
    for path in sorted((ROOT / "src" / "headway").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            arguments = node.args if isinstance(node, ast.Call) else []
            if sum(not isinstance(each, ast.Starred) for each in arguments) > MOST_POSITIONAL:
                many.append(f"{path}:{node.lineno}")
            functions = ast.FunctionDef | ast.AsyncFunctionDef
            if isinstance(node, ast.ClassDef) and sum(isinstance(each, functions) for each in node.body) > MOST_METHODS:
                large.append(f"{path}: {node.name}")
    assert not many and not large


def test_a_simulated_request_takes_the_listed_steps() -> None:
    scenario = assemble(*parse(SCENARIO, "one.yaml"), Path())
    with traced() as calls:
        run(scenario)
    assert missing_step(steps("simulated"), calls) is None


def most(name: str) -> tuple[int, int]:
    """The calls and files that a way takes at most, as listed."""
    block = re.search(r"^```text hops totals\n(.*?)^```$", PAGE, re.DOTALL | re.MULTILINE)
    assert block is not None
    found = re.search(rf"^{name}\s+at most\s+([\d,]+) calls in\s+(\d+) files$", block[1], re.MULTILINE)
    assert found is not None, name
    return int(found[1].replace(",", "")), int(found[2])


def taken(calls: list[Call]) -> tuple[int, int]:
    return len(calls), len({file for file, _ in calls})


def is_within(calls: list[Call], name: str) -> bool:
    return all(num <= limit for num, limit in zip(taken(calls), most(name), strict=True))


def test_a_scenario_takes_the_listed_number_of_calls_to_its_run_and_resolves_its_policies_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (file := tmp_path / "one.yaml").write_text(SCENARIO)
    for _ in range(2):  # the first time reads the catalog
        with traced() as calls:
            assert cli.main(["simulate", str(file), "--no-progress"]) == 0
    assert "least-loaded" in capsys.readouterr().out
    run_at = calls.index(("sim/kernel.py", "Kernel.run"))
    assert is_within(calls[:run_at], "a scenario file to its first event"), taken(calls[:run_at])
    kinds = [name for file, name in calls if file == "policies/resolve.py" and name in ("router", "ordering")]
    assert sorted(kinds) == ["ordering", "router"]


def test_a_capacity_candidate_takes_the_listed_number_of_calls(tmp_path: Path) -> None:
    workload = {"num_requests": 40, "arrivals": 2.0, "prompt_tokens": 500, "output_tokens": 20}
    document = {"workload": workload, "fleet": [{"model": "llama-3.1-8b", "gpu": "h100"}]}
    options = CapacityOptions(gpus=("h100",), tps=(1,), targets=Targets(ttft_p99_s=0.5))
    _, rehearsal = plan(Source(document, Places(), Path()), options, Resources(Simulator(), tmp_path))
    for routing in ("round-robin", "least-loaded"):  # the first one is new to the process
        with traced() as calls:
            rehearsal(CapacityCandidate("l40s", Parallel(), routing, 1.0, "fcfs"), 4, Situation())
    starts, measures = (
        calls.index(each) for each in (("sim/kernel.py", "Kernel.run"), ("metrics/latency.py", "sample"))
    )
    beside = calls[:starts] + calls[measures:]
    assert is_within(beside, "a candidate of a capacity plan"), taken(beside)
    assert ("config/scenario.py", "written") not in calls


def test_a_streamed_request_and_its_tokens_take_the_listed_steps(tmp_path: Path) -> None:
    pytest.importorskip("httptools")
    from traced_requests import traced_answer

    reply = [OK + event(chunk("so")), event(chunk(" it")), DONE]
    received, calls = traced_answer(tmp_path, reply, stream=True, end=b"[DONE]", key="k")
    assert b" it" in received
    assert missing_step(steps("request"), calls) is None
    sent = calls.index(steps("request")[-1])
    assert missing_step(steps("token"), calls[sent:]) is None


def test_a_streamed_chat_takes_the_listed_number_of_calls(tmp_path: Path) -> None:
    pytest.importorskip("httptools")
    from traced_requests import traced_answer

    reply = [OK + event(chunk("so")) + DONE]
    traces = []
    for trial in range(3):  # an answer that comes in two reads takes more calls: the least of three counts
        (folder := tmp_path / str(trial)).mkdir()
        received, calls = traced_answer(folder, reply, stream=True, end=b"[DONE]", num=8)
        assert received.startswith(b"HTTP/1.1 200")
        traces.append(calls)
    least = min(traces, key=len)
    assert is_within(least, "a streamed chat of one event"), taken(least)
