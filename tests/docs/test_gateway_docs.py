"""The examples of the pages on the gateway run as they stand, on ports that are free."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

import engines
from headway.control.decisions import Decision
from headway.gateway.telemetry.definitions import DEFINITIONS

pytest.importorskip("httptools")
DOCS = Path(__file__).parents[2] / "docs"
PAGES = ("serve", "operate", "batches", "cascades", "disaggregation", "tenants", "scaling", "observe")
PAGE = "\n".join((DOCS / f"{name}.md").read_text(encoding="utf-8") for name in PAGES)
OWN = (DOCS / "headway.md").read_text(encoding="utf-8")


def _free_ports(num: int) -> list[int]:
    held = [socket.socket() for _ in range(num)]
    for one in held:
        one.bind(("127.0.0.1", 0))
    ports = [one.getsockname()[1] for one in held]
    for one in held:
        one.close()
    return ports


def _block(kind: str, start: str, page: str = PAGE) -> str:
    """The page's block that begins so."""
    found = re.findall(rf"^```{kind}\n({re.escape(start)}.*?)^```$", page, re.DOTALL | re.MULTILINE)
    return str(found[0])


def _section(page: str, heading: str) -> str:
    """The page from this heading on."""
    text = (DOCS / page).read_text(encoding="utf-8")
    return text[text.index(f"# {heading}\n") :]


def _num_words(written: list[str]) -> int:
    """Words of a stream's answer. A busy engine sends several in one event."""
    return len("".join(re.findall(r'"content": ?"([^"]*)"', "".join(written))).split())


def _run(folder: Path, files: dict[str, str], script: str, last: str) -> list[str]:
    """Lines that a script writes, up to one with `last` in it; on ports that are free."""
    for port, free in zip(("8001", "8002", "8080"), _free_ports(3), strict=True):
        files = {name: text.replace(port, str(free)) for name, text in files.items()}
        script = script.replace(port, str(free))
    for name, text in files.items():
        (folder / name).write_text(text)
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    bash = subprocess.Popen(
        ["bash", "-c", script],
        cwd=folder,
        env={**os.environ, "PATH": path},
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    assert bash.stdout is not None
    written = []
    try:
        with bash.stdout:
            for line in bash.stdout:
                written.append(line.decode())
                if last in written[-1]:
                    break
    finally:
        os.killpg(bash.pid, signal.SIGKILL)
        bash.wait()
    return written


def test_the_example_runs(tmp_path: Path) -> None:
    script = _block("bash", "headway emulate")
    written = _run(tmp_path, {"fleet.yaml": _block("yaml", "fleet:")}, script, "[DONE]")
    assert "headway serves fleet on http://127.0.0.1:" in "".join(written)
    assert _num_words(written) >= 10


@pytest.mark.ci
def test_what_the_page_on_discovery_shows_is_found(tmp_path: Path) -> None:
    page = (DOCS / "discover.md").read_text(encoding="utf-8")
    written = _run(tmp_path, {}, _block("bash", "headway emulate", page), "least-loaded")
    assert any("least-loaded" in line for line in written)
    made = re.sub(r"127\.0\.0\.1:\d+", "", (tmp_path / "fleet.yaml").read_text(encoding="utf-8"))
    assert made.strip() == re.sub(r"127\.0\.0\.1:\d+", "", _block("yaml", "# Found", page)).strip()


@pytest.mark.ci
def test_the_load_of_the_page_is_measured(tmp_path: Path) -> None:
    page = _section("discover.md", "Load on a running engine")
    written = _run(tmp_path, {}, _block("bash", "headway emulate", page), "mean absolute error")
    shown = _block("text", "qwen3-8b at", page)
    measured = "".join(written)
    assert all(line.split("  ")[0] in measured for line in shown.splitlines()[1:])
    assert "40 of 40 in " in measured and (tmp_path / "bench.json").stat().st_size and (tmp_path / "ran").is_dir()


@pytest.mark.ci
def test_what_the_page_on_slow_requests_shows_is_found(tmp_path: Path) -> None:
    page = _section("observe.md", "Why was this request slow?")
    files = {"why.yaml": _block("yaml", "# why.yaml", page)}
    written = _run(tmp_path, files, _block("bash", "headway emulate", page), "unknown of round-robin")
    shown = "".join(written)
    assert "its prompt of 30,000 tokens, which takes 1.36 s on an idle engine (chat/" in shown
    assert "request report: qwen3-8b, tier 0, arrived " in shown and "  router: least-loaded\n" in shown
    assert re.search(r"^queue +unknown", shown, re.MULTILINE)  # the column is as wide as its times
    unknown = re.findall(r"^  unknown of .*\n", page, re.MULTILINE)
    assert unknown == [line for line in written if line.startswith("  unknown of")]


@pytest.mark.ci
def test_the_sweep_of_the_page_finds_its_limits(tmp_path: Path) -> None:
    script = _section("discover.md", "To saturation").split("```bash\n")[1].split("```")[0]
    written = "".join(_run(tmp_path, {}, script, "requests/s answered"))
    assert "knee at " in written and "90% within ttft=300ms,tpot=20ms" in written
    assert "TTFT, predicted" in written and (tmp_path / "load.html").stat().st_size


@pytest.mark.ci
def test_the_calibration_of_the_page_is_fitted_and_judged(tmp_path: Path) -> None:
    page = _section("discover.md", "From a running engine to a calibrated twin")
    script = page.split("```bash\n")[1].split("```")[0]
    written = _run(tmp_path, {}, script, "wrote fitted.json")
    shown = _block("text", "mean error of the prediction", page)
    measured = {line.split()[0] for line in written if line.strip()}
    assert all(line.split()[0] in measured for line in shown.splitlines())
    assert json.loads((tmp_path / "fitted.json").read_text())


@pytest.mark.ci
@pytest.mark.skipif(engines.NO_LLAMA, reason="pip install xllamacpp gguf")
def test_the_llama_of_the_page_is_calibrated_and_simulated(tmp_path: Path) -> None:
    page = _section("discover.md", "From a running engine to a calibrated twin")
    script = page.split("```bash\n")[2].split("```")[0].replace("examples/", f"{engines.EXAMPLES}/")
    written = "".join(_run(tmp_path, {}, f"export TMPDIR='{tmp_path}'\n{script}", "least-loaded"))
    assert "wrote llama.json; fleet.yaml " in written
    made, shown = (
        re.sub(r"127\.0\.0\.1:\d+|config: .*/tmp\w+", "", text)
        for text in ((tmp_path / "fleet.yaml").read_text(encoding="utf-8"), page.split("```yaml\n")[1].split("```")[0])
    )
    if "fleet.yaml names it" not in written:  # a busy machine's fit is worse than none
        shown = shown.replace("    coefficients: llama.json\n", "")
    assert shown.strip() in made


@pytest.mark.ci
def test_several_workers_have_one_page_of_metrics(tmp_path: Path) -> None:
    script = PAGE[PAGE.index("## Several workers") :].split("```bash\n")[1].split("```")[0]
    written = _run(tmp_path, {"fleet.yaml": _block("yaml", "fleet:")}, script, "headway_requests_total")
    assert "  2 workers, and a scheduler for all of them\n" in written
    assert written[-1].endswith('outcome="finished"} 8\n')


@pytest.mark.ci
def test_the_batch_runs(tmp_path: Path) -> None:
    pytest.importorskip("openai")
    names = {"batches.yaml": "yaml", "batch.py": "python"}
    files = {name: _block(kind, f"# {name}") for name, kind in names.items()}
    script = PAGE[PAGE.index("# batch.py") :].split("```bash\n")[1].split("```")[0]
    written = _run(tmp_path, files, script, "question-2")
    assert any(line.startswith("completed BatchRequestCounts(completed=3") for line in written)
    assert [line.split()[0] for line in written[-3:]] == ["question-0", "question-1", "question-2"]


@pytest.mark.ci
def test_the_cascade_runs(tmp_path: Path) -> None:
    script = PAGE[PAGE.index("# cascade.yaml") :].split("```bash\n")[1].split("```")[0]
    written = _run(tmp_path, {"cascade.yaml": _block("yaml", "# cascade.yaml")}, script, "[DONE]")
    assert all("llama-3.1-8b" in line for line in written if '"delta"' in line), "0.7 is less than 75"
    assert _num_words(written) >= 10


@pytest.mark.ci
def test_the_combo_runs(tmp_path: Path) -> None:
    script = PAGE[PAGE.index("# pair.yaml") :].split("```bash\n")[1].split("```")[0]
    written = _run(tmp_path, {"pair.yaml": _block("yaml", "# pair.yaml")}, script, "prefills_total{")
    assert any(line.startswith("x-headway-replica: pair-decode/1") for line in written)
    assert _num_words(written) >= 10
    assert written[-1] == 'headway_prefills_total{model="qwen3-8b",outcome="handed over"} 1\n'


@pytest.mark.ci
def test_the_halves_run(tmp_path: Path) -> None:
    script = PAGE[PAGE.index("# halves.yaml") :].split("```bash\n")[1].split("```")[0]
    written = _run(tmp_path, {"halves.yaml": _block("yaml", "# halves.yaml")}, script, "prefills_total{")
    assert any(line.startswith("x-headway-replica: pair-decode/1") for line in written)
    assert _num_words(written) >= 10
    assert written[-1] == 'headway_prefills_total{model="qwen3-8b",outcome="handed over"} 1\n'


FLEETS = {
    **{f"{name}.yaml": PAGE for name in ("batches", "cascade", "pair", "halves", "planned", "watched")},
    "why.yaml": (DOCS / "observe.md").read_text(encoding="utf-8"),
}


@pytest.mark.parametrize("name", FLEETS)
def test_a_fleet_of_the_pages_can_be_served(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from headway import serving

    monkeypatch.setattr(
        "headway.serving.pools.which", lambda program: program
    )  # not all are on the path of every machine
    path = tmp_path / name
    path.write_text(_block("yaml", f"# {name}", FLEETS[name]), encoding="utf-8")
    _, plan = serving.load(path)
    assert plan.pools


def test_the_combos_of_pods_are_served(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("kubernetes")
    from headway import serving
    from headway.gateway.fleet import kubernetes

    monkeypatch.setattr(kubernetes, "check", lambda how: None)  # there is no cluster here
    path = tmp_path / "pods.yaml"
    path.write_text(_block("yaml", "# pods.yaml"))
    _, plan = serving.load(path)
    assert {served.start.name for served in plan.pools} == {"pair-prefill", "pair-decode"}  # type: ignore[union-attr]


@pytest.mark.ci
def test_the_scaled_fleet_runs(tmp_path: Path) -> None:
    script = PAGE[PAGE.index("# scaled.yaml") :].split("```bash\n")[1].split("```")[0]
    written = _run(tmp_path, {"scaled.yaml": _block("yaml", "# scaled.yaml")}, script, '"up":1')
    assert '"up":3' in written[-2]


@pytest.mark.ci
def test_the_planned_fleet_runs(tmp_path: Path) -> None:
    script = PAGE[PAGE.index("# planned.yaml") :].split("```bash\n")[1].split("```")[0]
    written = _run(tmp_path, {"planned.yaml": _block("yaml", "# planned.yaml")}, script, '"up":3')
    assert '"up":3' in written[-1]


def test_the_keys_are_settings(tmp_path: Path) -> None:
    from headway import serving as composition

    keys = _block("yaml", "gateway:", _section("tenants.md", "Keys, limits and tenants"))
    (tmp_path / "fleet.yaml").write_text(_block("yaml", "fleet:") + keys)
    _, plan = composition.load(tmp_path / "fleet.yaml")
    assert len(plan.settings.api_keys) == 2 and len(plan.settings.admin_keys) == 1


@pytest.mark.ci
def test_keys_are_kept_as_described(tmp_path: Path) -> None:
    from headway import serving as composition

    script = _block("bash", "export HEADWAY_KEY_STORE") + "echo over\n"
    written = _run(tmp_path, {"budgets.yaml": _block("yaml", "# budgets.yaml")}, script, "over")
    assert sum(line.startswith("hw-") for line in written) == 3 and any("indexer" in line for line in written)
    _, plan = composition.load(tmp_path / "budgets.yaml")
    assert plan.settings.key_store is not None and plan.pools[0].prices.usd(10**6, 10**6) == 0.75


@pytest.mark.ci
def test_headways_own_policies_serve_and_replay(tmp_path: Path) -> None:
    output = "".join(_run(tmp_path, {}, _block("bash", "headway serve --builtin headway", OWN), "TTFT p50"))
    assert output.count("[DONE]") == 3 and '"reasoning' in output
    models = [name for name in ("qwen-7b", "llama-70b") if f'"model":"deepseek-r1-distill-{name}"' in output]
    assert len(models) == 2, "one answer would do, another would not"
    assert "TTFT p50" in output.splitlines()[-1], "what was served is simulated again"


@pytest.mark.ci
def test_what_is_watched_runs(tmp_path: Path) -> None:
    script = PAGE[PAGE.index("# watched.yaml") :].split("```bash\n")[1].split("```")[0]
    written = _run(tmp_path, {"watched.yaml": _block("yaml", "# watched.yaml")}, script, '"decisions":[')
    names = [line.split(":")[0] for line in written if line.startswith("x-headway-")]
    assert set(names) >= {"x-headway-replica", "x-headway-held-s", "x-headway-attempts"}
    lines = [line for line in written if line.startswith('{"time_s"')]
    assert msgspec.json.decode(lines[0], type=Decision).what == "placed"


def test_the_decision_that_is_shown_is_one() -> None:
    shown = msgspec.json.decode(_block("json", '{"time_s"'), type=Decision, strict=True)
    assert shown.choice in [offered.replica for offered in shown.replicas] and shown.held_s > 0 and shown.why


def test_the_metrics_that_are_listed_are_those_that_there_are(tmp_path: Path) -> None:
    """Those of KV events, several gateways, shadow and autopilot are on the pages of gateways that have these alone."""
    named = set(re.findall(r"`(headway_\w+)`", (DOCS / "observe.md").read_text(encoding="utf-8")))
    assert named <= set(DEFINITIONS)
    files = {"cascade.yaml": _block("yaml", "# cascade.yaml")}
    script = PAGE[PAGE.index("# cascade.yaml") :].split("```bash\n")[1].split("```")[0]
    script += "curl -s http://127.0.0.1:8080/metrics | grep TYPE; echo over\n"
    written = _run(tmp_path, files, script, "over\n")
    parts = ("headway_kv_events_", "headway_peer", "headway_shadow_", "headway_autopilot_")
    of_parts = {name for name in DEFINITIONS if name.startswith(parts)}
    found = {line.split()[2]: line.split()[3] for line in written if line.startswith("# TYPE")}
    assert found == {name: each.kind for name, each in DEFINITIONS.items() if name not in of_parts}
