"""A hundred kinds of bad input: one line that says what was expected, no traceback, and no file written by halves."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import yaml

from headway.cli import main
from serving import PATIENCE_S, until
from worker_fleet import children

POOL = {"model": "llama-3.1-8b", "gpu": "h100", "engine": "vllm-0.15", "replicas": 2}
WORKLOAD = {"arrivals": 20, "num_requests": 30, "prompt_tokens": 200, "output_tokens": 20}
CONFIG = {
    "num_hidden_layers": 2,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_attention_heads": 4,
    "vocab_size": 1000,
    "max_position_embeddings": 4096,
}
POLICIES = """
from headway.core.decision import Placement

class Raises:
    def __init__(self, at=5): self.num, self.at = 0, at
    def route(self, request, view):
        self.num += 1
        if self.num > self.at: raise KeyError("no such replica")
        return Placement(view.replicas[0].id)

class Nothing:
    def route(self, request, view): return None

class Elsewhere:
    def route(self, request, view): return Placement(999)

class Text:
    def route(self, request, view): return "0"

class Broken:
    def __init__(self): raise ValueError("not today")

class NoMethod:
    pass

class NoRank:
    def rank(self, request, now): return None

class BadRank:
    def rank(self, request, now): return [] if request.id % 2 else "a"

class Divides:
    def route(self, request, view): return Placement(1 // 0)
"""


def _scenario(**changes: Any) -> str:
    return yaml.safe_dump({"workload": WORKLOAD, "fleet": [POOL], **changes})


def _pool(**changes: Any) -> str:
    return _scenario(fleet=[{**POOL, **changes}])


def _workload(**changes: Any) -> str:
    return _scenario(workload={**WORKLOAD, **changes})


def _routing(name: object) -> str:
    return _scenario(policies={"routing": name})


def _trace(text: str) -> dict[str, str]:
    return {"s.yaml": _scenario(workload={"trace": "t.csv"}), "t.csv": text}


def _config(**changes: Any) -> dict[str, str]:
    return {"s.yaml": _pool(model={"config": "c.json"}), "c.json": json.dumps({**CONFIG, **changes})}


HEAD = "arrival_s,prompt_tokens,output_tokens\n"
RUN = "simulate s.yaml"
SYNTHETIC = "--rate 9 --num-requests 20 --prompt-tokens 99 --output-tokens 9"
Case = tuple[str, dict[str, str] | str, str, str]
"""(kind, files or the text of s.yaml, command, words of the error)."""
SCENARIOS: list[Case] = [
    ("no file", {}, RUN, "s.yaml: no such file"),
    ("folder for a file", {"s.yaml/x": ""}, RUN, "s.yaml: is a folder; expected a file"),
    ("negative seed", _scenario(seed=-1), RUN, "seed: expected integer >= 0"),
    ("empty file", "", RUN, "s.yaml: expected keys and values, found nothing"),
    ("not YAML", "a: [1", RUN, "s.yaml:1: not valid YAML"),
    ("tabs", "a:\n\tb: 1", RUN, "s.yaml:2: not valid YAML"),
    ("a list", "- 1", RUN, "expected keys and values, found a list"),
    ("a text", "hello", RUN, "expected keys and values, found a string"),
    ("two documents", "a: 1\n---\nb: 1", RUN, "not valid YAML"),
    ("key twice", "fleet: []\nfleet: []", RUN, "s.yaml:2: fleet is here a second time"),
    ("a key that is no word", "? [a]\n: 1", RUN, "a key must be a word"),
    ("refers to itself", "&a [*a]", RUN, "refers to itself"),
    ("infinite number", _scenario() + "seed: .inf", RUN, "seed: expected a finite number"),
    ("misspelt key", _scenario(flet=[]), RUN, "unknown key 'flet'; did you mean 'fleet'?"),
    ("misspelt inner key", _pool(replica=2), RUN, "unknown key 'replica'; did you mean 'replicas'?"),
    ("no workload", yaml.safe_dump({"fleet": [POOL]}), RUN, "'workload' is missing; expected it there, or requests by"),
    ("no fleet", yaml.safe_dump({"workload": WORKLOAD}), RUN, "no replicas"),
    ("text for a number", _pool(replicas="two"), RUN, "fleet[0].replicas: expected integer, got string"),
    ("zero replicas", _pool(replicas=0), RUN, "fleet[0].replicas: expected integer >= 1"),
    ("fraction for a count", _pool(tp=1.5), RUN, "fleet[0].tp: expected integer"),
    ("null", _pool(gpu=None), RUN, "fleet[0].gpu: expected string, got null"),
    ("unknown GPU", _pool(gpu="h1000"), RUN, "unknown GPU 'h1000'"),
    ("unknown model", _pool(model="llama-9"), RUN, "unknown model 'llama-9'"),
    ("unknown engine", _pool(engine="vlm"), RUN, "unknown engine 'vlm'"),
    ("unknown engine setting", _pool(engine={"name": "vllm-0.15", "seqs": 1}), RUN, "unknown key 'seqs'"),
    ("setting out of range", _pool(engine={"gpu_memory_utilization": 2}), RUN, "expected 1 at most"),
    ("fewer tokens than sequences", _pool(engine={"max_num_batched_tokens": 3}), RUN, "at least max_num_seqs"),
    ("model too large", _pool(model="llama-3.1-405b"), RUN, "no tp up to 8 fits"),
    ("tp that divides no heads", _pool(tp=3), RUN, "tp 3 does not divide"),
    ("two pools of one name", _scenario(fleet=[{**POOL, "name": "a"}] * 2), RUN, "the name of another pool"),
    ("more replicas than the most", _pool(max_replicas=1), RUN, "replicas: 2; expected 1 to 1"),
    ("no coefficients", _pool(coefficients="no.json"), RUN, "no.json: No such file"),
    ("coefficients that are none", {"s.yaml": _pool(coefficients="c"), "c": "{}"}, RUN, "not a file of coefficients"),
    ("fallback that is no pool", _pool(fallback=["spare"]), RUN, "fleet[0].fallback[0]: unknown pool 'spare'"),
    ("fallback of itself", _pool(name="a", fallback=["a"]), RUN, "fallback[0]: a is the pool itself"),
    ("hosted pool on GPUs", _pool(hosted={}), RUN, "fleet[0].gpu: is not a hosted pool's"),
    ("fallback for no reason", _scenario(policies={"fallback": {"when": ["no"]}}), RUN, "unknown value 'no'"),
    ("half a combo", _scenario(combos=[{"name": "a", "prefill": POOL}]), RUN, "`prefill` and `decode`"),
    ("negative price", _pool(usd_per_gpu_hour=-1), RUN, "usd_per_gpu_hour: expected number >= 0"),
    ("SLO of nothing", _scenario(slo={"ttft_s": 0}), RUN, "slo.ttft_s: 0"),
    ("fault of no replica", _scenario(faults=[{"at_s": 1, "replica": 9}]), RUN, "expected 0 to 1"),
    ("fault in the past", _scenario(faults=[{"at_s": -1, "replica": 0}]), RUN, "expected at_s of 0 or more"),
    ("role of a lone replica", _scenario(roles=[{"at_s": 1, "replica": 0, "role": "decode"}]), RUN, "is alone"),
    ("unknown role", _scenario(roles=[{"at_s": 1, "replica": 0, "role": "decoder"}]), RUN, "unknown value 'decoder'"),
    ("no policies", _scenario(policies={"routing": []}), RUN, "expected at least one routing"),
    ("several for simulate", _routing(["random", "jsq-tokens"]), RUN, "several are for headway compare"),
    ("cascade of a model not served", _scenario(cascade={"models": ["a", "b"]}), RUN, "unknown model 'a'"),
    ("cascade of one", _scenario(cascade={"models": ["a"]}), RUN, "cascade.models"),
    ("endless simulation", _scenario(simulation={"until_s": 0}), RUN, "simulation.until_s: expected number > 0"),
    ("negative warm-up", _scenario(simulation={"warmup_s": -1}), RUN, "simulation.warmup_s: expected number >= 0"),
]
WORKLOADS: list[Case] = [
    ("nothing to do", _scenario(workload={}), RUN, "expected trace, builtin, mix, or prompt_tokens"),
    ("no arrivals", _workload(arrivals=None), RUN, "arrivals: missing"),
    ("no rate", _workload(arrivals=0), RUN, "rate: 0.0; expected a number above 0"),
    ("negative count", _workload(num_requests=-1), RUN, "num_requests: -1; expected a number above 0"),
    ("unknown lengths", _workload(prompt_tokens="azure"), RUN, "prompt_tokens"),
    ("thousands as k", _workload(prompt_tokens="4k"), RUN, "prompt_tokens: '4k'; expected a number of tokens, or one"),
    ("negative lengths", _workload(output_tokens=-5), RUN, "output_tokens"),
    ("unknown built-in", _scenario(workload={"builtin": "chats"}), RUN, "did you mean 'chat'?"),
    ("two sources", _scenario(workload={"builtin": "chat", "trace": "t"}), RUN, "trace and builtin: expected one"),
    ("correlation beyond 1", _workload(correlation=2), RUN, "correlation: 2"),
    ("shares of nothing", _workload(models={"a": 0}), RUN, "models"),
    ("no trace", _scenario(workload={"trace": "t.csv"}), RUN, "t.csv: no such file"),
    ("trace is a folder", {"s.yaml": _scenario(workload={"trace": "t"}), "t/x": ""}, RUN, "is a folder"),
    ("empty trace", _trace(""), RUN, "the file is empty"),
    ("trace of a header", _trace(HEAD), RUN, "no requests in the file"),
    ("unknown format", _trace("a,b\n1,2\n"), RUN, "no known trace format"),
    ("semicolons", _trace(HEAD.replace(",", ";") + "1;2;3\n"), RUN, "columns are separated by ';'; expected commas"),
    ("misspelt column", _trace(HEAD.replace("arrival", "arival") + "1,2,3\n"), RUN, "unknown column 'arival_s'"),
    ("text for tokens", _trace(HEAD + "0,many,1\n"), RUN, "line 2: column prompt_tokens: 'many'"),
    ("negative tokens", _trace(HEAD + "0,-1,1\n"), RUN, "line 2: column prompt_tokens: '-1'"),
    ("too many tokens", _trace(HEAD + "0,99999999,1\n"), RUN, "0 to 10,000,000"),
    ("a missing cell", _trace(HEAD + "0,1\n"), RUN, "line 2: 2 columns; expected 3"),
    ("out of order", _trace(HEAD + "5,1,1\n1,1,1\n"), RUN, "line 3: column arrival_s: arrives before"),
    ("not a number", _trace(HEAD + "nan,1,1\n"), RUN, "line 2: column arrival_s: 'nan'"),
    ("half a time", _trace(HEAD + "2025-13-45T00:00:00Z,1,1\n"), RUN, "line 2: column arrival_s"),
    ("milliseconds as seconds", _trace(HEAD + "".join(f"{i * 90000},9,9\n" for i in range(99))), RUN, "in seconds"),
    ("a binary file", _trace("PAR1\0\0"), RUN, "not readable as Parquet"),
    ("cut gzip", {**_trace(""), "t.csv": "\x1f\x8b\x08"}, RUN, "t.csv: "),
    (
        "an empty window",
        {**_trace(HEAD + "0,1,1\n"), "s.yaml": _scenario(workload={"trace": {"path": "t.csv", "from_s": 9}})},
        RUN,
        "no request arrives from 9",
    ),
    (
        "no requests of the model",
        {**_trace(HEAD.strip() + ",model\n0,1,1,a\n"), "s.yaml": _scenario(workload={"trace": "t.csv", "models": "b"})},
        RUN,
        "unknown model 'b'",
    ),
    ("models that nothing serves", _trace(HEAD.strip() + ",model\n0,1,1,a\n"), RUN, "model 'a'"),
    ("describe nothing", {}, "workload describe t.csv", "t.csv: no such file"),
    ("write an unknown format", {"t.csv": HEAD + "0,1,1\n"}, "workload convert t.csv out.xls", "expected .parquet"),
]
MODELS: list[Case] = [
    ("no config", _pool(model={"config": "c.json"}), RUN, "c.json: No such file"),
    ("config that is no JSON", {**_config(), "c.json": "{"}, RUN, "c.json: not JSON"),
    ("config without layers", _config(num_hidden_layers=None), RUN, "'num_hidden_layers' is missing"),
    ("heads that do not divide", _config(num_attention_heads=3), RUN, "not a multiple of 3 heads"),
    ("an encoder", _config(model_type="bert"), RUN, "an encoder, which generates no tokens"),
    ("a state-space model", _config(model_type="rwkv"), RUN, "layers Headway does not model"),
    ("a key that may matter", _config(mamba_d_state=16), RUN, "not understood: mamba_d_state (16)"),
    ("unknown quantisation", _config(quantization_config={"quant_method": "x"}), RUN, "method 'x' is not supported"),
]
OWN: list[Case] = [
    ("a policy of a path", {"s.yaml": _routing("./own.py:Raises"), "own.py": POLICIES}, RUN, "as in own:Raises"),
    ("a policy raises", {"s.yaml": _routing("own:Raises"), "own.py": POLICIES}, RUN, "own:Raises"),
    ("a policy returns None", {"s.yaml": _routing("own:Nothing"), "own.py": POLICIES}, RUN, "`route` returned None"),
    ("a policy names no replica", {"s.yaml": _routing("own:Elsewhere"), "own.py": POLICIES}, RUN, "999"),
    ("a policy returns a text", {"s.yaml": _routing("own:Text"), "own.py": POLICIES}, RUN, "`route` returned '"),
    ("a policy divides by zero", {"s.yaml": _routing("own:Divides"), "own.py": POLICIES}, RUN, "own:Divides"),
    ("a constructor raises", {"s.yaml": _routing("own:Broken"), "own.py": POLICIES}, RUN, "not today"),
    ("a class without a method", {"s.yaml": _routing("own:NoMethod"), "own.py": POLICIES}, RUN, "own:NoMethod"),
    ("no such class", {"s.yaml": _routing("own:Missing"), "own.py": POLICIES}, RUN, "unknown class 'Missing'"),
    ("no such module", {"s.yaml": _routing("nowhere:Class")}, RUN, "nowhere"),
    ("a module that does not parse", {"s.yaml": _routing("own:A"), "own.py": "def"}, RUN, "own"),
    ("unknown policy", _routing("jsq"), RUN, "unknown"),
    ("unknown argument", _routing({"name": "jsq-tokens", "x": 1}), RUN, "'x'"),
    ("ordering returns None", {"s.yaml": _scenario(policies={"ordering": "own:NoRank"}), "own.py": POLICIES},
     RUN, "own:NoRank"),
    ("ranks that do not compare", {"s.yaml": _scenario(workload={**WORKLOAD, "arrivals": 5000, "num_requests": 600},
     policies={"ordering": "own:BadRank"}, fleet=[{**POOL, "engine": {"max_num_seqs": 4}}]), "own.py": POLICIES},
     RUN, "own:BadRank"),
    ("a policy raises with --jobs", {"s.yaml": _routing(["own:Raises", "random"]), "own.py": POLICIES},
     "compare s.yaml --jobs 2 --seeds 1", "own:Raises"),
]  # fmt: skip
COMMANDS: list[Case] = [
    ("unknown command", {}, "simulat", "unknown command 'simulat'; did you mean 'simulate'?"),
    ("unknown option", {}, "simulate --gpus h100", "No such option"),
    ("option without a value", {}, "simulate --gpu", "requires an argument"),
    ("file and preset", _scenario(), "simulate s.yaml --builtin chat", "expected one of them"),
    ("unknown preset", {}, "compare --builtin chats", "chats"),
    ("no model", {}, f"compare {SYNTHETIC} --gpu h100", "--model or --model-config is missing"),
    ("no GPU", {}, f"compare {SYNTHETIC} --model llama-3.1-8b", "--gpu is missing"),
    ("a seed below 0", _scenario(), "compare s.yaml --seed -1", "'--seed'"),
    ("a plan's seed below 0", _scenario(), "plan capacity s.yaml --seed -1", "'--seed'"),
    ("seeds of nothing", _scenario(), "compare s.yaml --seeds 0", "'--seeds'"),
    ("jobs of nothing", _scenario(), "compare s.yaml --jobs 0", "'--jobs'"),
    ("out over a file", {"s.yaml": _scenario(), "out": ""}, f"{RUN} --out out", "out"),
    ("page in no folder", {"s.yaml": _scenario(), "f": ""}, f"{RUN} --html f/r.html", "f"),
    ("no target to plan for", {}, f"plan capacity {SYNTHETIC} --model qwen3-8b --gpus h100 --no-cache", "no SLO"),
    ("unknown GPU to plan with", {}, f"plan capacity {SYNTHETIC} --model qwen3-8b --gpus x --ttft-p99 1", "--gpus"),
    ("what-if of a word", {}, f"plan capacity {SYNTHETIC} --model qwen3-8b --gpus h100 --ttft-p99 1 --what-if a",
     "expected load=N"),
    ("combos without GPUs", _scenario(slo={"ttft_s": 1}), "plan combos s.yaml --gpus h100:x", "expected type:count"),
    ("combos without SLO", _scenario(), "plan combos s.yaml --gpus h100:2 --no-cache", "slo: expected ttft_s"),
    ("a fleet for nothing", {}, "plan fleet nowhere.csv --have h100:1 --slo ttft=1", "nowhere.csv"),
    ("a fleet of unknown GPUs", _scenario(), "plan fleet s.yaml --have h1000:1 --slo ttft=1", "--have: unknown GPU"),
    ("a fleet of many GPUs", _scenario(), "plan fleet s.yaml --have h100:x --slo ttft=1", "--have: 'h100:x'"),
    ("a fleet for another SLO", _scenario(), "plan fleet s.yaml --have h100:1 --slo tft=1", "did you mean 'ttft'?"),
    ("a fleet for no SLO", _scenario(), "plan fleet s.yaml --have h100:1 --no-cache", "no SLO: give --slo"),
    ("a fleet for a scenario and a model", _scenario(), "plan fleet s.yaml --have h100:1 --model qwen3-8b", "--model"),
    ("a fleet of a type twice", _scenario(), "plan fleet s.yaml --have h100:1,h100:2 --slo ttft=1 --no-cache", "twice"),
    ("a fleet for an unknown model", {"t.csv": "arrival_s,prompt_tokens,output_tokens,model\n0,9,9,bert\n"},
     "plan fleet t.csv --have h100:1 --slo ttft=1", "--model bert=MODEL says"),
    ("a fleet for no model", {"t.csv": "arrival_s,prompt_tokens,output_tokens\n0,9,9\n"},
     "plan fleet t.csv --have h100:1 --slo ttft=1", "requests name no model"),
    ("scaling of nothing", {}, "plan scaling", "expected a SCENARIO"),
    ("scaling without SLO", _scenario(fleet=[{**POOL, "max_replicas": 2}]),
     "plan scaling s.yaml --no-cache --scalers hpa --no-clairvoyant --jobs 1", "no request has an SLO"),
    ("scaling by an unknown scaler", _scenario(slo={"ttft_s": 1}), "plan scaling s.yaml --no-cache --scalers hap",
     "did you mean 'hpa'?"),
    ("scaling in no time", _scenario(), "plan scaling s.yaml --startup-s soon", "--startup-s: 'soon'"),
    ("scaling for too many", _scenario(), "plan scaling s.yaml --max-late 120%", "--max-late: '120%'"),
    ("scaling for no rates", {"s.yaml": _scenario(), "r.csv": "at,rate\n0,1\n"}, "plan scaling s.yaml --demand r.csv",
     "r.csv:1: expected a column `time`"),
    ("scaling for bad rates", {"s.yaml": _scenario(), "r.csv": "time,rate\n0,1\n60,x\n"},
     "plan scaling s.yaml --demand r.csv", "r.csv:3: rate: 'x'"),
    ("scaling for no demand", _scenario(), "plan scaling s.yaml --demand nowhere.csv", "nowhere.csv"),
    ("serve nothing", {}, "serve", "FLEET is missing"),
    ("serve without endpoints", _scenario(), "serve s.yaml --port 0", "endpoints: missing"),
    ("serve a bad address", _pool(endpoints=["host"], replicas=1), "serve s.yaml --port 0", "expected http://host"),
    ("export llama.cpp", _pool(engine="llama.cpp"), "export kubernetes s.yaml -o out", "vLLM and SGLang only"),
    ("export a name of capitals", _pool(name="Chat"), "export kubernetes s.yaml -o out", "small letters"),
    ("new over a file", _scenario(), "new s.yaml", "s.yaml"),
    ("catalog of nothing", {}, "catalog gpus h1000", "unknown GPU"),
    ("memory of two models", {}, "catalog memory --gpu h100", "expected one of them"),
    ("a throttle without a factor", {}, "emulate --model llama-3.1-8b --gpu h100 --throttle 60",
     "expected seconds and a factor, as in 60:2"),
    ("emulate on a used name", {}, "emulate --model nope --gpu h100", "unknown model 'nope'"),
    ("validate nothing", {}, "validate nowhere.csv", "nowhere.csv"),
]  # fmt: skip
CASES = [*SCENARIOS, *WORKLOADS, *MODELS, *OWN, *COMMANDS]


def _written(folder: Path, files: dict[str, str] | str) -> None:
    for name, text in ({"s.yaml": files} if isinstance(files, str) else files).items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="latin-1")


def _tree(folder: Path) -> dict[str, bytes]:
    paths = sorted(path for path in folder.rglob("*") if path.is_file() and "__pycache__" not in str(path))
    return {str(path): path.read_bytes() for path in paths}


def test_there_are_a_hundred_kinds() -> None:
    assert len({kind for kind, *_ in CASES}) == len(CASES) >= 100


@pytest.mark.parametrize(("kind", "files", "command", "words"), CASES, ids=[case[0] for case in CASES])
def test_bad_input_is_one_line(
    kind: str,
    files: dict[str, str] | str,
    command: str,
    words: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    _written(tmp_path, files)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path.parent / "cache"))
    before = _tree(tmp_path)
    code = main(command.split())
    captured = capsys.readouterr()
    lines = captured.err.splitlines()
    assert code == 2 and len(lines) == 1 and lines[0].startswith("error: "), captured.err
    assert words in lines[0] and "Traceback" not in captured.err and not captured.out, captured.err
    assert _tree(tmp_path) == before


PLANNERS = [
    "plan tiers s.yaml",
    "plan capacity s.yaml",
    "plan fleet s.yaml --have h100:2 --slo ttft=1s",
    "plan scaling s.yaml --slo ttft=1s",
    "plan scaling s.yaml --demand r.csv",
    "plan combos s.yaml --gpus h100:8:2.8",
    "plan cascade s.yaml --quality 50",
    RUN,
    "serve s.yaml",
    "compare s.yaml",
]


@pytest.mark.parametrize("section", ["workload", "fleet", "policies", "slo", "cascade", "simulation", "gpus"])
def test_a_section_of_another_shape_is_named_with_its_line(
    section: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Planners change a document before it is read as a whole: they once took the shapes of sections for granted."""
    monkeypatch.chdir(tmp_path)
    document = {**yaml.safe_load(_scenario()), section: 3}
    text = yaml.safe_dump(document, sort_keys=False)
    line = next(i for i, each in enumerate(text.splitlines(), 1) if each == f"{section}: 3")
    expected = "list" if section in ("fleet", "gpus") else "mapping"
    _written(tmp_path, {"s.yaml": text, "r.csv": "time,rate\n0,1\n60,1\n"})
    for command in PLANNERS:
        assert main(command.split()) == 2
        assert capsys.readouterr().err == f"error: s.yaml:{line}: {section}: expected {expected}, got integer\n", (
            command
        )


def _cpu_s(pid: int) -> float:
    """CPU seconds of a process and its children."""
    used_s = 0.0
    for each in (pid, *children(pid)):
        with suppress(FileNotFoundError):  # it has ended
            fields = Path(f"/proc/{each}/stat").read_text().rpartition(")")[2].split()
            used_s += (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    return used_s


def _interrupted(folder: Path, *arguments: str) -> tuple[int, str]:
    """Exit code and standard error of a command that gets Ctrl-C, as its children do, after its start."""
    command = [sys.executable, "-m", "headway", *arguments]
    process = subprocess.Popen(
        command, cwd=folder, stderr=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True
    )
    until(lambda: _cpu_s(process.pid) > 3.0)  # its modules are loaded: what loads them can swallow a signal
    os.killpg(process.pid, signal.SIGINT)
    _, error = process.communicate(timeout=PATIENCE_S)
    return process.returncode, error.decode()


@pytest.mark.slow
@pytest.mark.parametrize("jobs", [pytest.param("1", marks=pytest.mark.ci), "2"])
def test_ctrl_c_ends_quietly_and_leaves_nothing(jobs: str, tmp_path: Path) -> None:
    long = {**WORKLOAD, "num_requests": 300_000, "arrivals": 200}
    _written(tmp_path, _scenario(workload=long, policies={"routing": ["random", "round-robin", "jsq-tokens"]}))
    code, error = _interrupted(tmp_path, "compare", "s.yaml", "--jobs", jobs, "--out", "out", "--html", "r.html")
    assert (code, error.strip()) == (130, "interrupted")
    assert [path.name for path in tmp_path.iterdir()] == ["s.yaml"]
