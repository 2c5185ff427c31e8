"""Every file that a command writes is read by all commands that read its kind, and refused in a line by the others."""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from types import SimpleNamespace

import msgspec
import numpy as np
import pytest

pytest.importorskip("scipy")

from headway import catalog, records
from headway.calibration.measure import plan, sweep
from headway.cli import main
from headway.core.fleet import Parallel
from headway.core.record import ReplicaRecord
from headway.core.request import Request
from headway.perf.step import StepModel
from headway.serving.discover import fleet_file
from headway.serving.discover.pools import pools
from headway.serving.discover.probe import FoundEngine
from headway.serving.load_generator import saved
from headway.serving.load_generator.answer import Answer
from headway.serving.load_generator.drive import Sent
from headway.vllm.steps import StepLog
from headway.workload.table import Workload
from kernel_clock import ON, Clock

MODEL = "llama-3.1-8b"
ON_H100 = ("--model", MODEL, "--gpu", "h100", "--engine", "vllm-0.25")
ENGINE = FoundEngine("http://127.0.0.1:8000", "vllm", "vLLM", "0.25.1", MODEL, MODEL, settings={"max_num_seqs": 64})
RATES = (1.0, 2.0, 4.0, 6.0, 8.0)
"""Of the loads, requests a second. A fit takes four."""


class _Scheduler:
    """vLLM's, as its log sees it: iterations of known lengths that take what the catalog says."""

    def __init__(self) -> None:
        engine = catalog.engine("vllm-0.25")
        self._model = StepModel(catalog.model(MODEL), catalog.gpu("h100"), engine, Parallel(1, 1, 1))
        self.now_s = 0.0
        self.running, self.waiting = [1], []
        self.requests: dict[str, SimpleNamespace] = {}

    def run(self, log: StepLog, decodes: int, prompt: int) -> None:
        self.requests = {
            f"{i}": SimpleNamespace(num_computed_tokens=500, num_prompt_tokens=400) for i in range(decodes)
        }
        tokens = dict.fromkeys(self.requests, 1)
        if prompt:
            self.requests["new"] = SimpleNamespace(num_computed_tokens=prompt, num_prompt_tokens=prompt)
            tokens["new"] = prompt
        output = SimpleNamespace(num_scheduled_tokens=tokens, total_num_scheduled_tokens=sum(tokens.values()))
        log.scheduled(self, output)
        self.now_s += self._model.line(decodes, 500 * decodes, ((prompt, 0),) if prompt else ())[0]
        log.done(output)
        self.now_s += 1e-6


def _steps(folder: Path) -> None:
    """`HEADWAY_STEP_LOG`."""
    scheduler = _Scheduler()
    about = {"engine": "vllm", "version": "0.25.1", "model": MODEL, "device": "NVIDIA H100 80GB HBM3", "tp": 1}
    log = StepLog(folder, about, lambda: scheduler.now_s)
    for i in range(300):
        scheduler.run(log, 1 + i % 40, 700 + 20 * (i % 50) if i % 9 == 0 else 0)
    log.flush()


def _sent(rate_rps: float) -> tuple[list[Sent], Workload]:
    """Requests of one length, and answers that take a second."""
    at_s = np.arange(20) / rate_rps
    columns = {"arrival_s": at_s, "prompt_tokens": np.full(20, 300), "output_tokens": np.full(20, 100)}
    sent = []
    for i, start_s in enumerate(at_s.tolist()):
        chunks_s = (start_s + np.linspace(0.05, 0.75 + 0.01 * rate_rps, 100)).tolist()
        answer = Answer(start_s, chunks_s, [1] * 100, chunks_s[-1], 300, 0, 100)
        sent.append(Sent(Request(i, start_s, 300, 100), answer))
    return sent, Workload(columns)


def _load_records(folder: Path) -> None:
    """`headway load --records`."""
    sent, table = _sent(3.0)
    (pool,) = pools([ENGINE], "h100")
    replica = ReplicaRecord(
        id=0,
        pool=pool.entry["name"],
        model=MODEL,
        gpu="h100",
        region="",
        num_gpus=1,
        usd_per_hour=0.0,
        watts=0.0,
        kv_capacity_tokens=0,
        max_num_seqs=64,
        up=(),
    )
    about = {"fleet": fleet_file.text([pool], "fleet.yaml"), "load": {"temperature": 0.0}}
    records.save(saved.records(sent, table, replica), folder, about)


def _bench(path: Path, rate_rps: float) -> None:
    """`headway load --save-detailed`."""
    sent, _ = _sent(rate_rps)
    result = saved.vllm_bench(
        sent,
        MODEL,
        datetime(2026, 5, 4, tzinfo=UTC),
        rate_rps=rate_rps,
        burstiness=1.0,
        concurrency=None,
        temperature=0.0,
        endpoint="chat",
    )
    path.write_bytes(msgspec.json.encode(result))


def _measured(path: Path) -> None:
    """`headway measure`."""
    clock = Clock()
    operations, _ = plan.sweep(catalog.model(MODEL), ON)
    sweep.run(operations, clock.device(), clock, path, "h100-80gb-sxm", "fakes")


BENCHES = tuple(f"bench-{rate_rps:g}.json" for rate_rps in RATES)


@pytest.fixture(scope="module")
def outputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a file or folder of each kind that a command writes."""
    folder = tmp_path_factory.mktemp("outputs")
    _steps(folder / "steps")
    _load_records(folder / "loaded")
    _measured(folder / "measured.csv")
    for name, rate_rps in zip(BENCHES, RATES, strict=True):
        _bench(folder / name, rate_rps)
    (folder / "fleet.yaml").write_text(fleet_file.text(pools([ENGINE], "h100"), "fleet.yaml"))
    load = ("--workload", "chat", "--rate", "2", "--num-requests", "40")
    commands = [
        ["simulate", *ON_H100, *load, "--out", "simulated"],
        ["workload", "generate", *load, "trace.parquet"],
        ["calibrate", "measured.csv", *ON_H100, "--source", "a test", "--out", "own.json"],
    ]
    with pytest.MonkeyPatch.context() as patched:
        patched.chdir(folder)
        for command in commands:
            assert main(command) == 0
    return folder


OUTPUTS = ("simulated", "loaded", BENCHES[0], "steps", "measured.csv", "own.json", "trace.parquet", "fleet.yaml")
RECORDS = ("simulated", "loaded")
READERS: dict[str, tuple[Callable[[str], list[str]], tuple[str, ...]]] = {
    "validate": (lambda it: ["validate", it, *ON_H100], (*RECORDS, BENCHES[0], "steps")),
    "calibrate": (
        lambda it: ["calibrate", it, *BENCHES[1:], *ON_H100],
        (*RECORDS, BENCHES[0], "steps", "measured.csv"),
    ),
    "simulate --trace": (lambda it: ["simulate", *ON_H100, "--trace", it], (*RECORDS, "trace.parquet")),
    "plan capacity --trace": (
        lambda it: ["plan", "capacity", *ON_H100[:2], "--gpus", "h100", "--tp", "1", "--trace", it, "--tpot-p99", "1s"],
        (*RECORDS, "trace.parquet"),
    ),
    "workload describe": (lambda it: ["workload", "describe", it], (*RECORDS, "trace.parquet")),
    "forecast demand": (lambda it: ["forecast", "demand", it], (*RECORDS, "trace.parquet")),
    "why": (lambda it: ["why", "--records", it, "--slowest", "2"], RECORDS),
    "simulate": (lambda it: ["simulate", it], ("fleet.yaml",)),
    "--fleet": (lambda it: ["validate", BENCHES[0], "--fleet", it], ("fleet.yaml",)),
    "--coefficients": (lambda it: ["validate", BENCHES[0], *ON_H100, "--coefficients", it], ("own.json",)),
}
"""The words of each command, and the outputs that it takes."""


@pytest.mark.parametrize("output", OUTPUTS)
@pytest.mark.parametrize("reader", READERS)
def test_an_output_is_read_or_refused_in_a_line(
    reader: str, output: str, outputs: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(outputs)
    words, taken = READERS[reader]
    code = main(words(output))
    printed = capsys.readouterr()
    if output in taken:
        assert code == 0, printed.err
        return
    (line,) = printed.err.strip().splitlines()
    assert code == 2 and line.startswith("error: ") and output in line, line
