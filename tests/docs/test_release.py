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
from documented import ROOT
from released import make_release

pytestmark = pytest.mark.ci
VERSION = headway.__version__


@pytest.fixture(scope="module")
def dist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_release(tmp_path_factory)


def _wheel(dist: Path) -> Path:
    return dist / f"headway-{VERSION}-py3-none-any.whl"


def test_a_release_has_its_files_and_their_checksums(dist: Path) -> None:
    names = {path.name for path in dist.iterdir()}
    expected = {f"headway-{VERSION}.tar.gz", _wheel(dist).name, f"headway-{VERSION}.cdx.json", "SHA256SUMS"}
    compiled = {name for name in names if re.fullmatch(rf"headway-{VERSION}-cp3\d+-cp3\d+-manylinux_\S+\.whl", name)}
    assert names - compiled == expected | {f"headway-chart-{VERSION}.tgz"}
    assert len(compiled) <= 1
    assert subprocess.run(["sha256sum", "--check", "--strict", "SHA256SUMS"], cwd=dist).returncode == 0
    listed = {line.split("  ")[1] for line in (dist / "SHA256SUMS").read_text().splitlines()}
    assert listed == names - {"SHA256SUMS"}


def test_the_source_distribution_makes_the_same_wheel_again(dist: Path, tmp_path: Path) -> None:
    """With the times of its own files, and another folder: every byte of every file."""
    (sdist,) = dist.glob("*.tar.gz")
    command = [sys.executable, "-m", "pip", "--quiet", "wheel", "--no-deps", "-w", str(tmp_path), str(sdist)]
    subprocess.run(command, check=True, env={**os.environ, "HEADWAY_PURE": "1"})
    assert _contents(tmp_path / _wheel(dist).name) == _contents(_wheel(dist))


def _contents(wheel: Path) -> dict[str, str]:
    with zipfile.ZipFile(wheel) as files:
        return {name: hashlib.sha256(files.read(name)).hexdigest() for name in files.namelist()}


def test_the_wheel_has_every_file_of_the_package_and_no_other(dist: Path) -> None:
    tracked = subprocess.run(["git", "-C", str(ROOT), "ls-files", "src"], capture_output=True, text=True, check=True)
    expected = {line.removeprefix("src/") for line in tracked.stdout.splitlines()}
    found = {name for name in _contents(_wheel(dist)) if not name.startswith(f"headway-{VERSION}.dist-info/")}
    assert found == expected


def test_the_compiled_wheel_runs_compiled(dist: Path, tmp_path: Path) -> None:
    found = [path for path in dist.glob("*.whl") if path != _wheel(dist)]
    if not found:
        pytest.skip("this release has no compiled wheel")
    venv.create(tmp_path, with_pip=False)
    pip = [sys.executable, "-m", "pip", "--python", str(tmp_path / "bin" / "python"), "--quiet", "install"]
    subprocess.run([*pip, "-c", str(ROOT / "constraints.txt"), str(found[0])], check=True)
    shown = subprocess.check_output([str(tmp_path / "bin" / "headway"), "--version"], text=True, env={"PATH": ""})
    assert shown == f"headway {VERSION} (compiled)\n"


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
