"""What platforms deploy beside the package: the image, the dashboard, the alerts."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from headway.gateway.telemetry.definitions import DEFINITIONS

ROOT = Path(__file__).parents[1]
DEPLOY = ROOT / "deploy"
PROMTOOL = shutil.which("promtool")
BASE_IMAGE = "docker.io/library/python:3.11-slim"


def _dashboard() -> dict[str, Any]:
    made: dict[str, Any] = json.loads((DEPLOY / "grafana.json").read_text())
    return made


def _rules() -> list[dict[str, Any]]:
    alerts = yaml.safe_load((DEPLOY / "alerts.yaml").read_text())
    return [rule for group in alerts["groups"] for rule in group["rules"]]


def _expressions() -> list[str]:
    shown = [target["expr"] for panel in _dashboard()["panels"] for target in panel["targets"]]
    return shown + [rule["expr"] for rule in _rules()]


_SELECTOR = re.compile(r"((?:headway|process)_\w+)\s*(?:{([^}]*)})?")
_GROUPS = re.compile(r"\b(?:by|without|on|ignoring|group_left|group_right)\s*\(([^)]*)\)")
_TARGET_LABELS = {"instance", "job"}
"""What Prometheus adds to each sample."""


def _defined(name: str) -> str:
    """The metric of a series."""
    of_histogram = re.sub(r"_(bucket|sum|count)$", "", name)
    return of_histogram if of_histogram in DEFINITIONS else name


def _faults(expression: str) -> list[str]:
    """Metrics that the gateway does not have, and labels that the metrics of this expression do not have."""
    selectors = [(_defined(name), labels) for name, labels in _SELECTOR.findall(expression)]
    faults = [name for name, _ in selectors if name not in DEFINITIONS]
    known = {label for name, _ in selectors if name in DEFINITIONS for label in DEFINITIONS[name].labels}
    for name, labels in selectors:
        named = re.findall(r"(\w+)\s*[=!]", labels)
        own = set(DEFINITIONS[name].labels) | _TARGET_LABELS if name in DEFINITIONS else set()
        faults += [f"{name}{{{label}}}" for label in named if label not in own]
    grouped = {each.strip() for group in _GROUPS.findall(expression) for each in group.split(",") if each.strip()}
    return faults + sorted(grouped - known - _TARGET_LABELS - {"le"})


def test_expressions_name_metrics_and_labels_that_the_gateway_has() -> None:
    assert len(_expressions()) > 25
    assert {each: faults for each in _expressions() if (faults := _faults(each))} == {}


@pytest.mark.parametrize(
    ("expression", "faults"),
    [
        ("sum by (modell) (headway_replica_up)", ["modell"]),
        ("headway_replica_upp == 0", ["headway_replica_upp"]),
        ('rate(headway_tokens_total{pool="a"}[5m])', ["headway_tokens_total{pool}"]),
        ("histogram_quantile(0.9, sum by (le, pool) (rate(headway_hold_seconds_bucket[5m])))", []),
        ("max by (instance) (process_open_fds)", []),
    ],
)
def test_a_wrong_expression_is_found(expression: str, faults: list[str]) -> None:
    assert _faults(expression) == faults


def test_annotations_name_labels_that_their_alert_has() -> None:
    """An aggregation keeps the labels that it names, others keep their metric's."""
    for rule in _rules():
        selectors = [_defined(name) for name, _ in _SELECTOR.findall(rule["expr"])]
        grouped = _GROUPS.findall(rule["expr"])
        kept = {each.strip() for group in grouped for each in group.split(",")}
        kept = kept or {label for name in selectors for label in DEFINITIONS[name].labels}
        used = set(re.findall(r"\$labels\.(\w+)", str(rule["annotations"])))
        assert used <= kept | _TARGET_LABELS, rule["alert"]


def test_panels_do_not_overlap_and_have_ids_of_their_own() -> None:
    panels = _dashboard()["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    assert len({(panel["gridPos"]["x"], panel["gridPos"]["y"]) for panel in panels}) == len(panels)


@pytest.mark.skipif(PROMTOOL is None, reason="promtool is not installed")
def test_prometheus_takes_the_alerts_and_the_dashboards_expressions(tmp_path: Path) -> None:
    texts = [re.sub(r"\$(model|job)", ".*", each.replace("$__rate_interval", "5m")) for each in _expressions()]
    rules = [{"record": f"shown:{i}", "expr": each} for i, each in enumerate(texts)]
    path = tmp_path / "shown.yaml"
    path.write_text(yaml.safe_dump({"groups": [{"name": "shown", "rules": rules}]}))
    assert PROMTOOL is not None
    for each in (path, DEPLOY / "alerts.yaml"):
        done = subprocess.run([PROMTOOL, "check", "rules", str(each)], capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr


_FIRES = {
    "HeadwaySlosMissed": [
        ('headway_slo_requests_total{model="m",result="met"}', "0+90x60", "0+100x60"),
        ('headway_slo_requests_total{model="m",result="missed"}', "0+10x60", "0x60"),
    ],
    "HeadwayServerErrors": [
        ('headway_responses_total{path="/v1/chat/completions",status="200"}', "0+90x60", "0+90x60"),
        ('headway_responses_total{path="/v1/chat/completions",status="503"}', "0+10x60", "0x60"),
    ],
    "HeadwayEnginesFail": [('headway_failovers_total{model="m",pool="p"}', "0+60x60", "0+1x60")],
    "HeadwayReplicaEjected": [('headway_replica_ejected{pool="p",replica="0",name="p/0"}', "1x60", "0x60")],
    "HeadwayKvCacheFull": [('headway_replica_kv_share{pool="p",replica="0",name="p/0"}', "0.97x60", "0.97x50 0.5x10")],
    "HeadwayReplicaDown": [
        ('headway_replica_up{pool="p",replica="0",name="p/0"}', "0x60", "0x60"),
        ('headway_replica_ejected{pool="p",replica="0",name="p/0"}', "0x60", "1x60"),
    ],
}
"""Alert -> its series, with values by minute for which it fires, and for which it does not."""


@pytest.mark.skipif(PROMTOOL is None, reason="promtool is not installed")
def test_alerts_fire_for_what_they_are_about(tmp_path: Path) -> None:
    rules = {rule["alert"]: rule for rule in _rules()}
    tests = []
    for alert, series in _FIRES.items():
        for is_firing in (True, False):
            inputs = [{"series": each[0], "values": each[1] if is_firing else each[2]} for each in series]
            labels = {**dict(re.findall(r'(\w+)="([^"]*)"', series[0][0])), **rules[alert]["labels"]}
            grouped = [each.strip() for group in _GROUPS.findall(rules[alert]["expr"]) for each in group.split(",")]
            names = (*grouped, "severity") if grouped else tuple(labels)
            kept = {name: value for name, value in labels.items() if name in names}
            summary = str(rules[alert]["annotations"]["summary"])
            for name, value in kept.items():
                summary = summary.replace(f"{{{{ $labels.{name} }}}}", value)
            expected = [{"exp_labels": kept, "exp_annotations": {"summary": summary}}] if is_firing else []
            check = {"eval_time": "55m", "alertname": alert, "exp_alerts": expected}
            tests.append({"interval": "1m", "input_series": inputs, "alert_rule_test": [check]})
    path = tmp_path / "tests.yaml"
    path.write_text(yaml.safe_dump({"rule_files": [str(DEPLOY / "alerts.yaml")], "tests": tests}))
    assert PROMTOOL is not None
    done = subprocess.run([PROMTOOL, "test", "rules", str(path)], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_image_is_built_from_what_the_package_needs() -> None:
    """Sources and constraints reach the builder; the image runs without root and names extras that exist."""
    kept = {line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")}
    assert kept == {"LICENSE", "README.md", "constraints.txt", "pyproject.toml", "setup.py", "src"}
    text = (ROOT / "Dockerfile").read_text()
    assert re.search(r"^USER 65532", text, re.MULTILINE)
    extras = re.findall(r"/src\[([\w,]+)\]", text)[0].split(",")
    declared = (ROOT / "pyproject.toml").read_text()
    assert [each for each in extras if not re.search(rf"^{each} = \[", declared, re.MULTILINE)] == []


def _builder() -> str | None:
    """A command that builds and runs images here: docker or podman, if it gets the base image and runs it."""
    able = (shutil.which(name) for name in ("docker", "podman"))
    tries = ((each, [each, "run", "--rm", BASE_IMAGE, "true"]) for each in able if each)
    return next((name for name, tried in tries if subprocess.run(tried, capture_output=True).returncode == 0), None)


@pytest.mark.slow
def test_the_image_runs_without_root_and_writes_nothing() -> None:
    builder = _builder()
    if builder is None:
        pytest.skip(f"neither docker nor podman runs {BASE_IMAGE} here")
    subprocess.run([builder, "build", "-q", "-t", "headway-test", str(ROOT)], check=True, timeout=1200)
    run = [builder, "run", "--rm", "--read-only", "headway-test"]
    shown = subprocess.run([*run, "--version"], check=True, capture_output=True, text=True, timeout=60).stdout
    assert shown.strip().endswith("(compiled)")
    who = [*run[:-1], "--entrypoint", "id", "headway-test", "-u"]
    assert subprocess.run(who, check=True, capture_output=True, text=True, timeout=60).stdout.strip() == "65532"
