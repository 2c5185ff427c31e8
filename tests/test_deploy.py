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

ROOT = Path(__file__).parents[1]
DEPLOY = ROOT / "deploy"
PROMTOOL = shutil.which("promtool")
BASE_IMAGE = "docker.io/library/python:3.11-slim"


def _dashboard() -> dict[str, Any]:
    made: dict[str, Any] = json.loads((DEPLOY / "grafana.json").read_text())
    return made


def _expressions() -> list[str]:
    alerts = yaml.safe_load((DEPLOY / "alerts.yaml").read_text())
    shown = [target["expr"] for panel in _dashboard()["panels"] for target in panel["targets"]]
    return shown + [rule["expr"] for group in alerts["groups"] for rule in group["rules"]]


def test_the_gateway_has_every_metric_of_the_dashboard_and_the_alerts() -> None:
    gateway = ROOT / "src/headway/gateway"
    text = "".join(
        (gateway / each).read_text() for each in ("metrics_page.py", "telemetry/metrics.py", "peers/peers.py")
    )
    named = {
        name for each in _expressions() for name in re.findall(r"headway_([a-z_]+?)(?:_bucket)?\b(?=[{)\[ ]|$)", each)
    }
    assert len(named) > 15
    assert {name for name in named if f'"{name}"' not in text} == set()


def test_panels_do_not_overlap_and_have_ids_of_their_own() -> None:
    panels = _dashboard()["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    assert len({(panel["gridPos"]["x"], panel["gridPos"]["y"]) for panel in panels}) == len(panels)


@pytest.mark.skipif(PROMTOOL is None, reason="promtool is not installed")
def test_prometheus_takes_the_alerts_and_the_dashboards_expressions(tmp_path: Path) -> None:
    texts = [each.replace("$__rate_interval", "5m").replace("$model", ".*") for each in _expressions()]
    rules = [{"record": f"shown:{i}", "expr": each} for i, each in enumerate(texts)]
    path = tmp_path / "shown.yaml"
    path.write_text(yaml.safe_dump({"groups": [{"name": "shown", "rules": rules}]}))
    assert PROMTOOL is not None
    for each in (path, DEPLOY / "alerts.yaml"):
        done = subprocess.run([PROMTOOL, "check", "rules", str(each)], capture_output=True, text=True)
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
