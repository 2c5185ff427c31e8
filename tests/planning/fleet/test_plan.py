"""`headway plan fleet`: several models on the GPUs at hand, the answer in three sentences, a file that runs."""

from __future__ import annotations

import json
import re
from pathlib import Path

import msgspec
import numpy as np
import pytest
import yaml

from headway import catalog
from headway.catalog.coefficients import CoefficientFile
from headway.cli import main
from headway.scenario.run import load, run

HEADS = "arrival_s,prompt_tokens,output_tokens,model"
SMALL, LARGE = "qwen3-8b", "qwen3-14b"


def day(folder: Path, rate: float = 30.0, tiers: int = 1, name: str = "day.csv") -> Path:
    """300 requests, two of three for the small model."""
    random = np.random.default_rng(1)
    arrival_s = np.cumsum(random.exponential(1 / rate, 300))
    rows = [
        f"{t:.4f},{p},{o},{SMALL if i % 3 else LARGE},{i % tiers},{(0.3, 6.0)[i % tiers % 2]}"
        for i, (t, p, o) in enumerate(
            zip(arrival_s, random.integers(100, 900, 300), random.integers(10, 90, 300), strict=True)
        )
    ]
    path = folder / name
    heads = f"{HEADS},tier,slo_ttft_s"
    text = [heads, *rows] if tiers > 1 else [HEADS, *(row.rsplit(",", 2)[0] for row in rows)]
    path.write_text("\n".join(text) + "\n")
    return path


def plan(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, str, str]:
    """Exit code, standard output and standard error."""
    code = main(["plan", "fleet", *map(str, arguments), "--no-progress"])
    printed = capsys.readouterr()
    return code, printed.out, printed.err


QUICK = ("--tp", "1", "--seeds", 2, "--routing", "least-loaded,round-robin", "--slo", "ttft=1,tpot=0.04")


@pytest.mark.ci
def test_two_models_share_the_gpus_at_hand(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out, page, cache = tmp_path / "plans" / "fleet.yaml", tmp_path / "fleet.html", tmp_path / "cache"
    out.parent.mkdir()
    asked = [day(tmp_path), "--have", "a100:6:1.2,h100:4:3", *QUICK, "--cache", cache]
    code, text, err = plan(capsys, *asked, "--json", "-o", out, "--html", page)
    assert code == 0, err
    answer = json.loads(text)
    assert answer["status"] == "met" and len(answer["sentences"]) == 3 and answer["models"] == {SMALL: 200, LARGE: 100}
    assert all(answer["gpus"].get(name, 0) <= most for name, most in (("a100-80gb", 6), ("h100-80gb-sxm", 4)))
    assert {part["model"] for part in answer["parts"]} == {SMALL, LARGE}
    cost = sum(part["count"] * part["unit"]["usd_per_hour"] for part in answer["parts"])
    assert answer["usd_per_hour"] == pytest.approx(cost)
    assert all(isinstance(part["calibrated"], bool) for part in answer["parts"])
    first = answer["points"][0]
    assert first["kind"] == "plan" and len(first["runs"]) == 2 and first["interval"] is not None
    assert {each["kind"] for each in answer["points"]} >= {"plan", "router"}
    planned = first["runs"][0]
    assert set(planned["longest"]) == {"ttft", "tpot", "e2e"} and min(planned["longest"].values()) > 1
    assert all(planned["by_model_if_longest"][name] <= planned["by_model"][name] for name in (SMALL, LARGE))
    assert any("if all were so much longer" in note for note in answer["notes"])
    # The file runs from another folder, with what the plan says.
    document = yaml.safe_load(out.read_text())
    assert Path(document["workload"]["trace"]["path"]).is_absolute()
    done = run(load(out)).summary
    assert done.slo_attainment == pytest.approx(first["runs"][0]["attainment"])
    assert min(first["runs"][0]["by_model"].values()) >= 0.99
    # The same again simulates nothing.
    again, text, err = plan(capsys, *asked)
    assert again == 0 and "rehearsals: 0 simulated" in err
    assert text.rstrip().splitlines()[-1].startswith("Tiers of service are not needed")


@pytest.mark.ci
def test_with_processes_the_plan_is_the_same(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    asked = [day(tmp_path), "--have", "h100:4", *QUICK, "--no-split", "--no-cache", "--json"]
    one, two = plan(capsys, *asked), plan(capsys, *asked, "--jobs", 2)
    assert one[0] == two[0] == 0
    assert {**json.loads(one[1]), "num_found": 0} == {**json.loads(two[1]), "num_found": 0}


def test_one_unit_less_of_any_model_misses(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """At this load each model needs several replicas; the plan has none to spare."""
    asked = [day(tmp_path, rate=150), "--have", "a100:16", *QUICK, "--no-split", "--no-cache", "--json"]
    code, text, err = plan(capsys, *asked)
    assert code == 0, err
    less = [each for each in json.loads(text)["points"] if each["kind"] == "one less"]
    assert less and not any(each["is_met"] for each in less)


def test_too_few_gpus_are_reported(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "fleet.yaml"
    code, text, _ = plan(
        capsys,
        day(tmp_path, rate=400),
        "--have",
        "l4:1",
        *QUICK,
        "--no-split",
        "--no-cache",
        "-o",
        out,
        "--html",
        tmp_path / "fleet.html",
    )
    assert code == 3 and "The GPUs at hand do not keep 99% of each model's requests in time" in text
    assert not out.exists() and "The GPUs at hand are not enough" in (tmp_path / "fleet.html").read_text()


def test_tiers_are_compared_where_requests_have_some(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    asked = [day(tmp_path, rate=60, tiers=2), "--have", "h100:4", *QUICK, "--no-split", "--no-cache"]
    out = tmp_path / "fleet.yaml"
    code, text, err = plan(capsys, *asked, "--json", "-o", out)
    assert code == 0, err
    answer = json.loads(text)
    assert answer["tiers"]["num_classes"] == 2 and answer["tiers"]["status"] in ("worth it", "not worth it")
    assert re.match(r"(Serve|Do not serve) the 2 tiers of the requests differently", answer["sentences"][2])
    assert any(each["kind"] == "tiers" for each in answer["points"]) or answer["tiers"]["status"] == "worth it"
    assert run(load(out)).summary.slo_attainment is not None


def test_measured_step_times_are_planned_with(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A file of `headway calibrate`, here of an engine that takes 10 ms more for each iteration."""
    file, out = tmp_path / "measured.json", tmp_path / "fleet.yaml"
    known = catalog.coefficients("h100-80gb-sxm", "vllm-0.25")
    slow = msgspec.structs.replace(known.overhead, step_s=known.overhead.step_s + 0.01)
    file.write_bytes(msgspec.json.encode(CoefficientFile(("h100-80gb-sxm",), known.kernels, {"vllm-0.25": slow})))
    options = ["--have", "h100:8", "--engine", "vllm-0.25", *QUICK, "--no-split", "--no-cache", "--json", "-o", out]
    costs = {}
    for times in ([], ["--coefficients", file]):
        code, text, err = plan(capsys, day(tmp_path, rate=200), *options, *times)
        assert code == 0, err
        costs[len(times)] = json.loads(text)["usd_per_hour"]
    assert costs[2] > costs[0]
    assert {each["coefficients"] for each in yaml.safe_load(out.read_text())["fleet"]} == {str(file)}
    code, _, err = plan(capsys, day(tmp_path), "--have", "l40s:8", *QUICK, "--coefficients", file)
    assert code == 2 and "coefficients of h100-80gb-sxm; expected l40s" in err


def test_a_scenario_with_a_gpu_of_its_own(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file, gpus, out = tmp_path / "mine.yaml", tmp_path / "gpu.yaml", tmp_path / "fleet.yaml"
    day(tmp_path)
    trace = {"path": "day.csv", "models": {SMALL: SMALL, LARGE: LARGE}}
    fleet = [{"model": SMALL, "gpu": "h100", "replicas": 3}, {"model": LARGE, "gpu": "l4", "quantization": "fp8"}]
    file.write_text(yaml.safe_dump({"workload": {"trace": trace}, "slo": {"ttft_s": 1}, "fleet": fleet}))
    gpus.write_text(yaml.safe_dump({"name": "mine", "like": "h100", "usd_per_hour": 1.0}))
    asked = [
        file,
        "--have",
        "mine:8,h100:2",
        "--gpu-file",
        gpus,
        "--tp",
        "1",
        "--seeds",
        2,
        "--routing",
        "least-loaded",
    ]
    code, text, err = plan(capsys, *asked, "--no-cache", "--json", "-o", out)
    assert code == 0, err
    answer = json.loads(text)
    assert set(answer["gpus"]) == {"mine"} and not any(part["calibrated"] for part in answer["parts"])
    assert any("not calibrated" in note for note in answer["notes"])
    written = yaml.safe_load(out.read_text())["fleet"]
    assert {pool["model"]: pool.get("quantization") for pool in written} == {SMALL: None, LARGE: "fp8"}
    assert run(load(out)).summary.num_completed == 300
