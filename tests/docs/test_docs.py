"""The documentation: its commands run, its generated pages are current, its links lead somewhere."""

from __future__ import annotations

import importlib.util
import re
import tomllib
from hashlib import sha256
from itertools import chain, takewhile
from pathlib import Path
from types import ModuleType

import pytest

import headway
from headway.config.scenario import variants
from headway.metrics.summary import flatten
from headway.report.table import COLUMNS
from headway.scenario.presets import builtin
from headway.scenario.run import load
from papers_installed import needs_papers

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")
PAGES = [ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md")] + sorted(ROOT.glob("docs/*.md"))


@pytest.fixture(scope="module")
def generate() -> ModuleType:
    spec = importlib.util.spec_from_file_location("generate", ROOT / "docs" / "generate.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_readme_shows_what_the_demo_runs() -> None:
    table = re.search(r"<!-- demo: .*?```text\n(.*?)```", README, re.DOTALL)
    assert table is not None
    lines = table[1].splitlines()
    titles = {column.title for column in COLUMNS}
    assert {title for title in re.split(r"\s{2,}", lines[0].strip())} <= titles | {"routing", "ordering"}
    rows = takewhile(lambda line: not line.startswith(("SLO met:", "Step times")), lines[2:])
    shown = [line.split()[:2] for line in rows]
    policies = [variant.spec.policies for variant in variants(load(builtin("chat")))]
    assert shown == [[each.routing, each.ordering] for each in policies]


@pytest.mark.parametrize(
    "page", ["scenario.md", pytest.param("cli.md", marks=needs_papers), "api.md", "gateway-metrics.md"]
)
def test_generated_pages_are_current(page: str, generate: ModuleType) -> None:
    written = (ROOT / "docs" / page).read_text(encoding="utf-8")
    assert written == generate.PAGES[ROOT / "docs" / page](), "run: make docs"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_to_files(page: Path) -> None:
    for target in re.findall(r"\]\((?!https?:)([^)#]+)", page.read_text(encoding="utf-8")):
        assert (page.parent / target).exists(), target


def test_every_dependency_has_its_reason() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    names = {re.split(r"[\[<>=]", each)[0].lower() for each in chain(project["dependencies"], *extras.values())}
    design = (ROOT / "docs" / "design.md").read_text().lower()
    pinned = {line.split("==")[0].lower() for line in (ROOT / "constraints.txt").read_text().splitlines()}
    for name in names - {"headway"}:
        assert re.search(rf"\b{name}\b", design), name
        assert name in pinned or name == "torch", name  # the GPU decides which build


UPLOT = {
    "LICENSE": "8f989229699b4fe2f1a0432d0e9edc338a8a911e250e2d1b01ecd770a5f5b1bd",
    "uPlot.iife.min.js": "19c8d4c6ad88929a79f4ae49d6f7161566dfd0ba3d15cc495e974f787eb78f1f",
    "uPlot.min.css": "df630c6a8d6f8eeaff264b50f73ce5b114f646ffd9a0bb74f049b0a00135fa04",
}
"""SHA-256 sums of the files of the release 1.6.32, as its npm package has them."""


def test_the_package_holds_no_code_of_others_but_the_charts_of_the_dashboard() -> None:
    """Libraries come from the package manager; only source, its types, and data in plain text are files of Headway. No
    package of Python's has uPlot: its files are those of the release, its licence beside them and in the wheel."""
    folder = ROOT / "src" / "headway" / "gateway" / "server" / "uplot"
    assert {path.name: sha256(path.read_bytes()).hexdigest() for path in folder.iterdir()} == UPLOT
    declared = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
    assert str((folder / "LICENSE").relative_to(ROOT)) in declared["license-files"]
    assert "uPlot 1.6.32" in (ROOT / "docs" / "design.md").read_text()
    files = (path for path in (ROOT / "src" / "headway").rglob("*") if path.is_file())
    found = {path.suffix for path in files if path.parent != folder}
    assert found - {".pyc"} <= {".py", ".pyi", ".proto", ".typed", ".yaml", ".json", ".csv", ".html"}


def test_the_changelog_begins_with_this_version() -> None:
    (latest, *_) = re.findall(r"^## (\S+)", (ROOT / "CHANGELOG.md").read_text(encoding="utf-8"), re.MULTILINE)
    assert latest in (headway.__version__, "Unreleased")


def test_the_readme_installs_this_version() -> None:
    files = re.findall(r"headway-(?:chart-)?(\d[\d.]*)(?:-py3|\.tgz)", README)
    assert len(files) == 2 and set(files) == {headway.__version__}


def test_the_makefile_says_what_contributors_are_told() -> None:
    documented = set(re.findall(r"^(?:`)?make (\w+)", (ROOT / "CONTRIBUTING.md").read_text() + README, re.MULTILINE))
    targets = set(re.findall(r"^(\w+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    assert documented <= targets


def test_metrics_named_in_the_cli_page_exist(generate: ModuleType) -> None:
    from headway.scenario.run import run

    chosen = variants(load(builtin("chat"), {("workload", "num_requests"): ("", 800)}))[0]
    known = set(flatten(run(chosen).summary))
    for key in re.findall(r"`((?:tier\.0\.)?\w+_s\.\w+)`", generate.CLI):
        assert key in known, key
