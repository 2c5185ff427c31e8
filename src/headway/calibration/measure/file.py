"""The measurement file: CSV, a row an operator, whole at any time, and continued where it was left."""

from __future__ import annotations

import csv
from collections.abc import Iterable
from io import StringIO
from pathlib import Path

from msgspec import Struct

from headway.calibration.measure.plan import Operation
from headway.calibration.operators import COLUMNS, SHAPES
from headway.core.errors import HeadwayError
from headway.workload.atomic_file import write_text


class Row(Struct, frozen=True):
    """One operator and how long it took."""

    operation: Operation
    latency_s: float
    gpu: str
    software: str


def read(path: Path, gpu: str) -> list[Row]:
    """The rows of a file that was begun; none where there is no file.

    HeadwayError where it is no such file, or of another GPU.
    """
    if not path.exists():
        return []
    try:
        with path.open(newline="", encoding="utf-8") as file:
            reader = csv.DictReader(file)
            if tuple(reader.fieldnames or ()) != COLUMNS:
                raise HeadwayError(f"{path}: is there, and no file of headway measure; give another --out")
            rows = [_row(values, path, reader.line_num) for values in reader]
    except (OSError, UnicodeDecodeError) as error:
        raise HeadwayError(f"{path}: cannot be read as text: {error}") from None
    for row in rows:
        if row.gpu != gpu:
            raise HeadwayError(f"{path}: holds measurements of {row.gpu}; expected {gpu}; give another --out")
    return rows


def write(path: Path, rows: Iterable[Row]) -> None:
    """All rows, whole or not at all."""
    text = StringIO()
    writer = csv.DictWriter(text, COLUMNS, restval="", lineterminator="\n")
    writer.writeheader()
    for row in rows:
        shape = {name: f"{value:.0f}" for name, value in row.operation.columns().items()}
        writer.writerow({
            "operator": row.operation.kind, "dtype": row.operation.dtype, **shape,
            "latency_s": f"{row.latency_s:.6g}", "gpu": row.gpu, "software": row.software,
        })  # fmt: skip
    write_text(path, text.getvalue())


def _row(values: dict[str, str], path: Path, line: int) -> Row:
    for kind, names in SHAPES.items():
        if kind == values["operator"]:
            try:
                shape = tuple(float(values[name]) for name in names)
                operation = Operation(kind, values["dtype"], shape)
                return Row(operation, float(values["latency_s"]), values["gpu"], values["software"])
            except (ValueError, TypeError, KeyError):
                raise HeadwayError(f"{path}:{line}: not as headway measure writes it; give another --out") from None
    raise HeadwayError(f"{path}:{line}: unknown operator {values['operator']!r}; give another --out")
