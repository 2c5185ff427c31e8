"""Public clients before the gateway, unchanged: LiteLLM, LangChain and the load generator AIPerf.

They are in an environment of their own (`make clients`), whose folder `HEADWAY_CLIENTS` names.
"""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import client_programs
import serving
from engines import LLAMA, NO_LLAMA
from headway.calibration.runs.read import read as read_runs
from serving import MODEL

CLIENTS = Path(os.environ.get("HEADWAY_CLIENTS", ""))
pytestmark = pytest.mark.skipif("HEADWAY_CLIENTS" not in os.environ, reason="HEADWAY_CLIENTS names no environment")


@pytest.fixture(scope="module", params=["emulated", "llama.cpp"])
def front(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[serving.Process]:
    """A gateway before two engines."""
    is_real = request.param == "llama.cpp"
    if is_real and NO_LLAMA:
        pytest.skip("pip install xllamacpp gguf")
    engines = [LLAMA.start() if is_real else serving.emulator("--speed", "3") for _ in range(2)]
    pool = {"engine": "llama.cpp"} if is_real else {}
    path = serving.fleet_file(tmp_path_factory.mktemp("fleet"), [engine.url for engine in engines], pool=pool)
    with serving.up(serving.gateway(path), 2, *engines) as gateway:
        yield gateway


def run(*command: str, cwd: Path) -> str:
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-2000:] + done.stdout[-2000:]
    return done.stdout


def program(name: str, url: str, cwd: Path) -> dict[str, Any]:
    output = run(str(CLIENTS / "bin" / "python"), client_programs.__file__, name, url, MODEL, cwd=cwd)
    result: dict[str, Any] = json.loads(output.splitlines()[-1])
    return result


@pytest.mark.parametrize("client", ["litellm", "langchain"])
def test_a_client_library_gets_answers_and_streams(client: str, front: serving.Process, tmp_path: Path) -> None:
    result = program(client, front.url, tmp_path)
    assert result["num"] == client_programs.TOKENS
    assert result["text"] == result["streamed"] != ""


def test_a_load_generator_measures_the_gateway(front: serving.Process, tmp_path: Path) -> None:
    program("tokenizer", str(tmp_path / "tokenizer"), tmp_path)
    options = {
        "--model": MODEL,
        "--tokenizer": str(tmp_path / "tokenizer"),
        "--url": front.url,
        "--endpoint-type": "chat",
        "--request-count": "40",
        "--concurrency": "4",
        "--synthetic-input-tokens-mean": "100",
        "--output-tokens-mean": "20",
        "--ui-type": "none",
        "--artifact-dir": str(tmp_path / "out"),
    }
    words = [word for pair in options.items() for word in pair]
    run(
        str(CLIENTS / "bin" / "aiperf"),
        "profile",
        *words,
        "--streaming",
        "--use-server-token-count",
        "--no-gpu-telemetry",
        cwd=tmp_path,
    )
    (file,) = (tmp_path / "out").rglob("profile_export_aiperf.json")
    measured = json.loads(file.read_text(encoding="utf-8"))
    assert measured["request_count"]["avg"] == 40 and measured.get("error_request_count", {}).get("avg", 0) == 0
    assert measured["output_sequence_length"]["avg"] == pytest.approx(20, abs=1)
    assert 0 < measured["time_to_first_token"]["avg"] < measured["request_latency"]["avg"]
    for name in ("profile_export_aiperf.json", "profile_export_aiperf.csv", "profile_export.jsonl"):
        (export,) = (tmp_path / "out").rglob(name)
        (load,), left = read_runs(export)
        assert not left and (load.model, load.num_requests, load.concurrency) == (MODEL, 40, 4)
        assert load.latencies_s["e2e_mean"] == pytest.approx(measured["request_latency"]["avg"] / 1e3, rel=1e-3)
