"""Read any trace: the format by name, or by looking at the file's first line."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from headway.core.errors import HeadwayError, unknown
from headway.workload.readers import (
    azure,
    burstgpt,
    mooncake,
    mooncake_lengths,
    own_csv,
    own_parquet,
    servegen,
)
from headway.workload.readers.blocks import first_line
from headway.workload.readers.options import Options
from headway.workload.table import Workload

Matches = Callable[[str], bool]
Read = Callable[[Path, Options], Workload]

FORMATS: dict[str, tuple[Matches, Read]] = {
    "headway-parquet": (own_parquet.matches, own_parquet.read),
    "headway-csv": (own_csv.matches, own_csv.read),
    "azure": (azure.matches, azure.read),
    "mooncake": (mooncake.matches, mooncake.read),
    "mooncake-lengths": (mooncake_lengths.matches, mooncake_lengths.read),
    "burstgpt": (burstgpt.matches, burstgpt.read),
    "servegen": (servegen.matches, servegen.read),
}


def read(
    path: str | Path,
    format: str | None = None,
    *,
    limit: int | None = None,
    sort: bool = False,
    skip_bad: bool = False,
) -> Workload:
    """The workload in a file, gzip or not. What was skipped stands in its `notes`.

    `format` is a key of `FORMATS`; None = recognised by the first line. HeadwayError for a file that is
    empty, truncated, out of order (unless `sort`) or has a bad line (unless `skip_bad`): it says the line and
    what was expected.
    """
    file = Path(path)
    if limit is not None and limit < 1:
        raise HeadwayError(f"limit: {limit}; expected 1 or more")
    if format is not None and format not in FORMATS:
        raise unknown("trace format", format, FORMATS, str(file))
    _, reader = FORMATS[format or detect(file)]
    return reader(file, Options(limit, sort, skip_bad))


def detect(path: Path) -> str:
    """The name of the file's format."""
    line = first_line(path)
    for name, (matches, _) in FORMATS.items():
        if matches(line):
            return name
    raise HeadwayError(
        f"{path}: line 1: no known trace format begins with {line[:80]!r}; known: {', '.join(FORMATS)}."
        " Name columns arrival_s,prompt_tokens,output_tokens to have any CSV read"
    )
