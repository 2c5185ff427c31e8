"""Run cases through the command line, and compute one digest for each output file.

`python tests/fixed/digests.py` compares all cases with `digests.json`; `--update` writes `digests.json` again. Case
names as arguments limit either to these cases, and `--keep DIR` keeps the output files, to compare them with `diff`.
A processor with AVX-512 computes as one without it, of which the digests are, with
`NPY_DISABLE_CPU_FEATURES="X86_V4 AVX512_ICL AVX512_SPR"` and `OPENBLAS_CORETYPE=Haswell`; otherwise their tests are
skipped there.

A case runs in an empty folder of its own. Its outputs are the standard output and error of each command and every file
that is in the folder afterwards, except the inputs.

The digest of a Parquet file covers, for each column in order, its name, type, validity and values, and the file's
own metadata. It does not cover the file's bytes: they hold the version of the Parquet library, and encoding and
compression change with that library while the values stay the same.

The digest of any other file covers its text. JSON and JSON lines are parsed, and keys whose values change from run to
run (`VOLATILE`) are left out. The folder's path is replaced by `DIR` everywhere.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import io
import json
import math
import os
import platform
import shlex
import sys
import tempfile
import time
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import yaml
from pyarrow import parquet

from headway.cli import main

HERE = Path(__file__).parent
EXPECTED = HERE / "digests.json"
VOLATILE = {"version", "simulate_s", "total_s", "forecast_s"}
"""Headway's version, and wall-clock seconds."""
LIBRARIES = ("numpy", "scipy", "statsforecast")
"""Libraries whose versions may change the last bits of a result."""
Outputs = dict[str, dict[str, str]]


def run(case: Any, folder: Path) -> Outputs:
    """The outputs of a case that runs in `folder`: file name -> digest and summary."""
    folder = folder.resolve()
    for name, content in case.files.items():
        text = content if isinstance(content, str) else yaml.safe_dump(content, sort_keys=False)
        (folder / name).write_text(text, encoding="utf-8")
    found: Outputs = {}
    with contextlib.chdir(folder), _own_imports():
        for i, command in enumerate(case.commands):
            code, out, err = _called(shlex.split(command))
            if code != case.codes.get(i, 0):
                raise AssertionError(f"{case.name}: `headway {command}` returned {code}: {err[-2000:]}")
            found[f"{i}.stdout"] = _text(out, folder)
            found[f"{i}.stderr"] = _text(err, folder)
    for path in sorted(folder.rglob("*")):
        name = path.relative_to(folder).as_posix()
        if path.is_file() and name not in case.files and "__pycache__" not in name:
            is_table = path.suffix == ".parquet"
            found[name] = _table(path, folder) if is_table else _text(path.read_text(encoding="utf-8"), folder)
    return found


def _called(arguments: list[str]) -> tuple[int, str, str]:
    """Exit code, standard output and standard error of a command."""
    out, err = (io.TextIOWrapper(io.BytesIO(), encoding="utf-8", write_through=True) for _ in range(2))
    argv, sys.argv = sys.argv, ["headway", *arguments]
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            code = main(arguments)
    finally:
        sys.argv = argv
    return code, *(stream.buffer.getvalue().decode() for stream in (out, err))


@contextlib.contextmanager
def _own_imports() -> Any:
    """Modules of the case's folder are imported from it, and forgotten afterwards."""
    path, modules = list(sys.path), set(sys.modules)
    try:
        yield
    finally:
        sys.path[:] = path
        for name in {"own_policies"} & (set(sys.modules) - modules):
            del sys.modules[name]


def differences(expected: Outputs, found: Outputs) -> list[str]:
    """A line for each file that is missing, additional, or has another digest."""
    lines = [f"{name}: missing" for name in expected if name not in found]
    lines += [f"{name}: not expected" for name in found if name not in expected]
    for name in expected.keys() & found.keys():
        if expected[name]["sha256"] != found[name]["sha256"]:
            lines.append(f"{name}: changed; was {expected[name]['summary']}, is {found[name]['summary']}")
    return sorted(lines)


def environment() -> dict[str, str]:
    """What else decides the last bits of a result: libraries, and how this processor computes elementary functions."""
    x = np.random.default_rng(0).random(4096) * 50 + 1e-3
    square, tall = x.reshape(64, 64), x.reshape(512, 8)
    probes = [np.exp(-x), np.log(x), np.sqrt(x), np.power(x, 0.37), np.sin(x), np.cumsum(x), square @ square.T]
    probes += [np.dot(x, x), np.linalg.lstsq(tall, x[:512], rcond=None)[0]]
    scalars = [f(v) for v in x[:512].tolist() for f in (math.exp, math.log, math.sin, math.gamma)]
    digest = hashlib.sha256(b"".join(each.tobytes() for each in probes) + np.array(scalars).tobytes()).hexdigest()
    versions = {name: metadata.version(name) for name in LIBRARIES}
    python = ".".join(platform.python_version_tuple()[:2])
    return {"python": python, "machine": platform.machine(), "arithmetic": digest[:16], **versions}


def _text(text: str, folder: Path) -> dict[str, str]:
    text = text.replace(str(folder), "DIR")
    numbers: list[float] = []
    try:
        parsed = [json.loads(text)]
    except ValueError:
        try:
            parsed = [json.loads(line) for line in text.splitlines()]
        except ValueError:
            return _digest(text.encode(), f"{len(text.splitlines())} lines")
    kept = "\n".join(json.dumps(_without_volatile(each, numbers), ensure_ascii=False) for each in parsed)
    return _digest(kept.encode(), f"{len(parsed)} JSON, {len(numbers)} numbers, sum {math.fsum(numbers)!r}")


def _without_volatile(value: Any, numbers: list[float]) -> Any:
    """The value without volatile keys. Its numbers are appended to `numbers`."""
    if isinstance(value, dict):
        return {key: _without_volatile(inner, numbers) for key, inner in value.items() if key not in VOLATILE}
    if isinstance(value, list):
        return [_without_volatile(inner, numbers) for inner in value]
    if isinstance(value, int | float) and not isinstance(value, bool):
        numbers.append(value)
    return value


def _table(path: Path, folder: Path) -> dict[str, str]:
    table = parquet.read_table(path)
    parts: list[bytes] = []
    for key, value in sorted((table.schema.metadata or {}).items()):
        text = value.decode().replace(str(folder), "DIR")
        with contextlib.suppress(ValueError):
            text = json.dumps(_without_volatile(json.loads(text), []))
        parts += [key, text.encode()]
    for name in table.column_names:
        column = table[name]
        parts += [name.encode(), str(column.type).encode(), *_values(column)]
    about = f"{table.num_rows} rows"
    if "end_s" in table.column_names:
        about += f", sum of end_s {math.fsum(v for v in table['end_s'].to_pylist() if v is not None)!r}"
    return _digest(b"\0".join(parts), about)


def _values(column: pa.ChunkedArray) -> tuple[bytes, bytes]:
    """Validity and values of a column. Nulls count as 0; strings and lists are written as JSON, floats exactly."""
    valid = np.asarray(column.is_valid().combine_chunks().to_numpy(zero_copy_only=False))
    if pa.types.is_integer(column.type) or pa.types.is_floating(column.type):
        filled = column.fill_null(0) if column.null_count else column
        return valid.tobytes(), np.ascontiguousarray(filled.to_numpy()).tobytes()
    return valid.tobytes(), json.dumps(column.to_pylist()).encode()


def _digest(data: bytes, summary: str) -> dict[str, str]:
    return {"sha256": hashlib.sha256(data).hexdigest(), "summary": summary}


def command_line() -> int:
    """Compare with `digests.json`, or write it."""
    from cases import CASES

    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("names", nargs="*", metavar="CASE", help="Only these cases.")
    parser.add_argument("--update", action="store_true", help="Write digests.json.")
    parser.add_argument("--keep", type=Path, metavar="DIR", help="Keep output files in DIR/CASE.")
    asked = parser.parse_args()
    unknown = set(asked.names) - CASES.keys()
    if unknown:
        parser.error(f"unknown cases: {', '.join(sorted(unknown))}")
    stored = json.loads(EXPECTED.read_text()) if EXPECTED.is_file() else {"cases": {}}
    cases, num_changed = stored["cases"], 0
    for name in asked.names or CASES:
        began = time.perf_counter()
        with tempfile.TemporaryDirectory() as temporary:
            folder = Path(temporary) if asked.keep is None else asked.keep / name
            folder.mkdir(parents=True, exist_ok=asked.keep is None)
            found = run(CASES[name], folder)
        changed = differences(cases.get(name, {}), found)
        num_changed += bool(changed)
        verdict = f"{len(changed)} of {len(found)} files differ" if changed else "same"
        _say(f"{name}: {verdict} ({time.perf_counter() - began:.1f} s)")
        for line in changed if not asked.update else ():
            _say(f"  {line}")
        cases[name] = found
    if asked.update:
        written = {"environment": environment(), "cases": {name: cases[name] for name in CASES if name in cases}}
        EXPECTED.write_text(json.dumps(written, indent=1) + "\n", encoding="utf-8")
        return 0
    return 1 if num_changed else 0


def _say(line: str) -> None:
    sys.stdout.write(line + os.linesep)
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(command_line())
