"""Read any trace. The format is given by name or recognised by the first line of the file."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import lru_cache
from pathlib import Path
from stat import S_ISREG

from headway.core.errors import HeadwayError, unknown
from headway.workload import agent_calls, files
from headway.workload.readers import mooncake, servegen
from headway.workload.readers.csv_table import header_of
from headway.workload.readers.csv_traces import AZURE, BURSTGPT, MOONCAKE_LENGTHS
from headway.workload.readers.run_parts import is_under_way
from headway.workload.readers.shared import REQUESTS, ReadOptions, first_line, trace_file
from headway.workload.table import Workload


def _with_columns(names: Iterable[str]) -> Callable[[str], bool]:
    return lambda line: set(names) <= set(header_of(line))


FORMATS: dict[str, tuple[Callable[[str], bool], Callable[[Path, ReadOptions], Workload]]] = {
    "headway-parquet": (lambda line: line.startswith("PAR1"), files.read_parquet),
    "headway-csv": (_with_columns(files.CSV_REQUIRED), files.read_csv),
    "azure": (lambda line: header_of(line) == AZURE.names, AZURE.read),
    "mooncake-agents": (agent_calls.matches, agent_calls.read),
    "bailian": (mooncake.matches_bailian, mooncake.read_bailian),
    "mooncake": (mooncake.matches, mooncake.read),
    "mooncake-lengths": (_with_columns(MOONCAKE_LENGTHS.names), MOONCAKE_LENGTHS.read),
    "burstgpt": (_with_columns(BURSTGPT.names), BURSTGPT.read),
    "servegen": (_with_columns(servegen.LENGTHS), servegen.read),
    "servegen-batch": (servegen.matches_batch, servegen.read_batch),
}
"""Maps each format name to a test of a file's first line, and the reader."""


UNSAID = {
    "timestamp_unit": ("mooncake",),
    "block_tokens": ("mooncake", "mooncake-agents"),
    "spread_ticks": ("mooncake",),
}
"""Options for facts that some files omit, and the formats that take each option."""


def read(
    path: str | Path,
    format: str | None = None,
    *,
    limit: int | None = None,
    sort: bool = False,
    skip_bad: bool = False,
    timestamp_unit: str | None = None,
    block_tokens: int | None = None,
    spread_ticks: bool = False,
) -> Workload:
    """Read the workload in a file, gzip or not, or in the records of a run's folder. Its `notes` list what was skipped.

    `format` is a key of `FORMATS`; None = recognised by the first line. `timestamp_unit` (`s`, `ms`) and `block_tokens`
    describe files that omit these facts. `spread_ticks` spreads requests with the same tick of a coarse clock over the
    tick. Raises HeadwayError for a file that is empty, truncated, out of order (unless `sort`) or has a bad line
    (unless `skip_bad`) names the line and what was expected.
    """
    file = _file(Path(path))
    if limit is not None and limit < 1:
        raise HeadwayError(f"limit: {limit}; expected 1 or more")
    if format is not None and format not in FORMATS:
        raise unknown("trace format", format, FORMATS, str(file))
    name = format or detect(file)
    options = ReadOptions(limit, sort, skip_bad, timestamp_unit, block_tokens, spread_ticks)
    check_unsaid(options, name, file)
    key = _version(file)
    if key is None:
        return FORMATS[name][1](file, options)
    return _kept(file, key, name, options).copy()


MOST_KEPT_BYTES = 1 << 22
"""Size of the largest file whose requests stay in memory: a planner reads a few files hundreds of times."""
_Version = tuple[int, int, int, int]


def _version(file: Path) -> _Version | None:
    """Identifies the content of a small file; None for other files and for folders."""
    try:
        found = file.stat()
    except OSError:
        return None
    is_small = S_ISREG(found.st_mode) and found.st_size <= MOST_KEPT_BYTES
    return (found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns) if is_small else None


@lru_cache(maxsize=8)
def _kept(file: Path, _version: _Version, name: str, options: ReadOptions) -> Workload:
    """The requests of a file. The columns are shared, and cannot be written."""
    rows = FORMATS[name][1](file, options)
    for column in rows.columns.values():
        column.flags.writeable = False
    return rows


def _file(path: Path) -> Path:
    """The trace's file, or the folder of a running or killed run."""
    if path.is_file():
        return path
    folder = path.parent if path.name == REQUESTS and not path.is_file() else path
    return folder if is_under_way(folder) else trace_file(path)


def _first_line(file: Path, version: _Version | None) -> str:
    return first_line(file) if version is None else _kept_line(file, version)


@lru_cache(maxsize=64)
def _kept_line(file: Path, _version: _Version) -> str:
    return first_line(file)


def check_unsaid(options: ReadOptions, name: str, file: Path) -> None:
    """Raises HeadwayError if an option describes a fact that files of the format contain."""
    given = {option: getattr(options, option) or None for option in UNSAID}
    for option, value in given.items():
        if value is not None and name not in UNSAID[option]:
            takes = ", ".join(UNSAID[option])
            raise HeadwayError(f"{file}: {option}: traces of the format {name} say it themselves; it is for {takes}")
    if options.timestamp_unit not in (None, "s", "ms"):
        raise HeadwayError(f"timestamp_unit: {options.timestamp_unit!r}; expected s or ms")


def detect(path: Path) -> str:
    """The name of the file's format. Raises HeadwayError if no format matches its first line."""
    file = _file(path)
    if file.is_dir():
        return "headway-parquet"
    line = _first_line(file, _version(file))
    for name, (matches, _) in FORMATS.items():
        if matches(line):
            return name
    if (other := next((mark for mark in (";", "\t") if line.count(mark) >= 2 and "," not in line), None)) is not None:
        raise HeadwayError(f"{path}: line 1: columns are separated by {other!r}; expected commas")
    raise HeadwayError(
        f"{path}: line 1: no known trace format begins with {line[:80]!r}; known: {', '.join(FORMATS)}."
        " Name columns arrival_s,prompt_tokens,output_tokens to have any CSV read"
    )
