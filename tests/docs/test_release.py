"""What `make release` makes, used as by those who download it. `HEADWAY_DIST` names a folder with a whole release;
without it, one without a compiled wheel is made."""

from __future__ import annotations

import hashlib
import json
import os
import re
import subprocess
import sys
import tarfile
import venv
import zipfile
from pathlib import Path

import pytest
import yaml

import headway
from document_commands import ROOT
from released import make_release

pytestmark = pytest.mark.ci
VERSION = headway.__version__
PACKAGES = {"headway": "src", "headway_papers": "papers/src"}
"""The folder of each one's sources."""


@pytest.fixture(scope="module")
def dist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_release(tmp_path_factory)


def _wheel(dist: Path, package: str = "headway") -> Path:
    return dist / f"{package}-{VERSION}-py3-none-any.whl"


def test_a_release_has_its_files_and_their_checksums(dist: Path) -> None:
    names = {path.name for path in dist.iterdir()}
    expected = {f"{name}-{VERSION}{end}" for name in PACKAGES for end in (".tar.gz", "-py3-none-any.whl")}
    expected |= {f"headway-{VERSION}.cdx.json", "SHA256SUMS"}
    compiled = {name for name in names if re.fullmatch(rf"headway-{VERSION}-cp3\d+-cp3\d+-manylinux\S+\.whl", name)}
    assert names - compiled == expected | {f"headway-chart-{VERSION}.tgz"}
    assert len(compiled) <= 1
    assert subprocess.run(["sha256sum", "--check", "--strict", "SHA256SUMS"], cwd=dist).returncode == 0
    listed = {line.split("  ")[1] for line in (dist / "SHA256SUMS").read_text().splitlines()}
    assert listed == names - {"SHA256SUMS"}


@pytest.mark.parametrize("package", PACKAGES)
def test_the_source_distribution_makes_the_same_wheel_again(package: str, dist: Path, tmp_path: Path) -> None:
    """With the times of its own files, and another folder: every byte of every file."""
    sdist = dist / f"{package}-{VERSION}.tar.gz"
    command = [sys.executable, "-m", "pip", "--quiet", "wheel", "--no-deps", "-w", str(tmp_path), str(sdist)]
    subprocess.run(command, check=True, env={**os.environ, "HEADWAY_PURE": "1"})
    wheel = _wheel(dist, package)
    assert _contents(tmp_path / wheel.name) == _contents(wheel)


def _contents(wheel: Path) -> dict[str, str]:
    with zipfile.ZipFile(wheel) as files:
        return {name: hashlib.sha256(files.read(name)).hexdigest() for name in files.namelist()}


@pytest.mark.parametrize("package", PACKAGES)
def test_the_wheel_has_every_file_of_the_package_and_no_other(package: str, dist: Path) -> None:
    folder = PACKAGES[package]
    tracked = subprocess.run(["git", "-C", str(ROOT), "ls-files", folder], capture_output=True, text=True, check=True)
    expected = {line.removeprefix(f"{folder}/") for line in tracked.stdout.splitlines()}
    files = _contents(_wheel(dist, package))
    assert {name for name in files if not name.startswith(f"{package}-{VERSION}.dist-info/")} == expected
    assert any(name.endswith("/LICENSE") for name in files)


def _program(folder: Path, *packages: object) -> Path:
    """The command in a new environment with these packages."""
    venv.create(folder, with_pip=False)
    pip = [sys.executable, "-m", "pip", "--python", str(folder / "bin" / "python"), "--quiet", "install"]
    subprocess.run([*pip, "-c", str(ROOT / "constraints.txt"), *map(str, packages)], check=True)
    return folder / "bin" / "headway"


def _ran(program: Path, line: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([program, *line.split()], capture_output=True, text=True, env={"PATH": ""})


def test_the_papers_are_a_package_of_their_own(dist: Path, tmp_path: Path) -> None:
    program = _program(tmp_path, _wheel(dist))
    without = _ran(program, "reproduce ktier --list")
    assert without.returncode == 2 and without.stderr.count("\n") == 1 and "headway-papers" in without.stderr
    assert "  reproduce  " not in _ran(program, "--help").stdout
    assert _program(tmp_path, _wheel(dist), _wheel(dist, "headway_papers")) == program
    assert "  reproduce  " in _ran(program, "--help").stdout
    assert "TTFT" in _ran(program, "reproduce ktier --list").stdout


def test_the_compiled_wheel_runs_compiled(dist: Path, tmp_path: Path) -> None:
    found = list(dist.glob(f"headway-{VERSION}-cp*.whl"))
    if not found:
        pytest.skip("this release has no compiled wheel")
    assert _ran(_program(tmp_path, found[0]), "--version").stdout == f"headway {VERSION} (compiled)\n"


def test_the_bill_of_materials_lists_what_the_image_installs(dist: Path) -> None:
    made = json.loads((dist / f"headway-{VERSION}.cdx.json").read_text())
    described = made["metadata"]["component"]
    assert (made["bomFormat"], described["name"], described["version"]) == ("CycloneDX", "headway", VERSION)
    found = {each["name"].lower().replace("_", "-"): each["version"] for each in made["components"]}
    lines = (ROOT / "constraints.txt").read_text().lower().splitlines()
    pinned = dict(line.split("==") for line in lines if "==" in line)
    for name in ("numpy", "pyarrow", "starlette", "grpcio", "kubernetes", "asyncpg"):
        assert found[name] == pinned[name]
    assert "pytest" not in found


def test_the_chart_is_the_one_of_the_repository(dist: Path) -> None:
    with tarfile.open(dist / f"headway-chart-{VERSION}.tgz") as files:
        packed = {each.name.partition("/")[2]: files.extractfile(each) for each in files.getmembers() if each.isfile()}
        texts = {name: file.read().decode() for name, file in packed.items() if file is not None}
    folder = ROOT / "deploy" / "helm"
    assert texts.keys() == {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}
    assert yaml.safe_load(texts["Chart.yaml"]) == yaml.safe_load((folder / "Chart.yaml").read_text())
    assert all(text == (folder / name).read_text() for name, text in texts.items() if name.startswith("templates"))
