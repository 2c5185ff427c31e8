"""Shared parts of all readers: options, files in blocks of lines, and the last steps from rows to a workload."""

from __future__ import annotations

import gzip
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from io import BytesIO
from pathlib import Path
from typing import IO

import numpy as np
from msgspec import Struct

from headway.core.errors import HeadwayError
from headway.workload.readers.arrival_times import from_first_arrival
from headway.workload.table import Workload

BLOCK_BYTES = 1 << 23
GZIP_MAGIC = b"\x1f\x8b"
BOM = b"\xef\xbb\xbf"
NO_ARRIVALS = "the file has no arrival times: without `arrivals` beside the trace, all requests arrive at 0"


UTF_16 = (b"\xff\xfe", b"\xfe\xff")
"""Byte-order marks of files that Windows PowerShell writes."""
HEAD_BYTES = 1 << 16


class ReadOptions(Struct, frozen=True):
    limit: int | None = None
    """Read at most this many rows of the file."""
    sort: bool = False
    """Sort by arrival. If False, rows out of order are an error."""
    skip_bad: bool = False
    """Skip and count bad lines. If False, the first bad line is an error."""
    timestamp_unit: str | None = None
    """`s` or `ms`, for formats whose files omit the unit. None: guessed from the values, with a note."""
    block_tokens: int | None = None
    """Prompt tokens of a hash block, for formats whose files omit it. None: the size that fits all rows."""
    spread_ticks: bool = False
    """Spread requests with equal times evenly over the time to the next one. If False, they arrive together."""


REQUESTS = "requests.parquet"


def trace_file(path: Path) -> Path:
    """The file of a trace. For the folder of a run's records: its `requests.parquet`. Raises HeadwayError if it is
    missing."""
    if not path.is_dir():
        return path
    file = path / REQUESTS
    if file.is_file():
        return file
    if (path / "parts").is_dir():
        raise HeadwayError(f"{path}: no request has been recorded yet; a gateway writes them every records_period_s")
    raise HeadwayError(f"{path}: is a folder without {REQUESTS}; expected a file, or the folder of a run's records")


@contextmanager
def open_unpacked(path: Path) -> Iterator[IO[bytes]]:
    """Open a file for reading bytes, decompressed if it is gzip. Errors while reading become HeadwayError."""
    try:
        with path.open("rb") as raw:
            packed = raw.read(2) == GZIP_MAGIC
        with gzip.open(path, "rb") if packed else path.open("rb") as file:
            yield _with_line_feeds(file, path)  # type: ignore[arg-type]
    except FileNotFoundError:
        raise HeadwayError(f"{path}: no such file") from None
    except IsADirectoryError:
        raise HeadwayError(f"{path}: is a folder; expected a file") from None
    except EOFError:
        raise HeadwayError(f"{path}: the gzip file is truncated; fetch it again") from None
    except (gzip.BadGzipFile, zlib.error) as error:
        raise HeadwayError(f"{path}: the gzip file is damaged ({error}); fetch it again") from None
    except OSError as error:
        raise HeadwayError(f"{path}: cannot be read ({error.strerror or error})") from None


def _with_line_feeds(file: IO[bytes], path: Path) -> IO[bytes]:
    """The file as UTF-8 with line feeds: UTF-16 and lines that end with a bare carriage return are converted."""
    head = file.read(HEAD_BYTES)
    is_wide, is_bare = head.startswith(UTF_16), b"\r" in head[:-1].replace(b"\r\n", b"") and b"\n" not in head
    if not is_wide and not is_bare:
        file.seek(0)
        return file
    data = head + file.read()
    if is_wide:
        try:
            data = data.decode("utf-16").encode()
        except UnicodeDecodeError as error:
            raise HeadwayError(f"{path}: begins as UTF-16 and is not: {error.reason}") from None
    return BytesIO(data.replace(b"\r\n", b"\n").replace(b"\r", b"\n"))


def first_line(path: Path) -> str:
    """The first line of a file, such as a CSV header. Raises HeadwayError if the file is empty."""
    with open_unpacked(path) as file:
        line = file.readline(1 << 20).removeprefix(BOM)
    if not line.strip():
        raise HeadwayError(f"{path}: the file is empty")
    return line.decode("utf-8", "replace").strip()


def blocks(path: Path, skip_lines: int = 0) -> Iterator[tuple[int, bytes]]:
    """Yield blocks of whole lines as (line number of the first line, counted from 1; bytes).

    Reading in blocks allows files larger than memory. The first `skip_lines` lines are skipped.
    """
    with open_unpacked(path) as file:
        for _ in range(skip_lines):
            file.readline()
        number, rest = skip_lines + 1, b""
        while data := file.read(BLOCK_BYTES):
            if number == 1 and not rest:
                data = data.removeprefix(BOM)
            end = data.rfind(b"\n") + 1
            if not end:
                rest += data
                continue
            block, rest = rest + data[:end], data[end:]
            yield number, block
            number += block.count(b"\n")
        if rest:
            yield number, rest


def without_failures(workload: Workload) -> Workload:
    """Drop failed requests, which have no prompt or no output tokens. A note counts them."""
    failed = (workload.prompt_tokens == 0) | (workload.output_tokens == 0)
    num_failed = int(np.count_nonzero(failed))
    if not num_failed:
        return workload
    return workload.take(~failed).with_notes(f"{num_failed} rows with zero tokens (failed requests) skipped")


def normalised(workload: Workload, path: Path, options: ReadOptions) -> Workload:
    """Sort if `options.sort`, shift the first arrival to 0, and validate."""
    if not len(workload):
        raise HeadwayError(f"{path}: no requests left to read")
    ordered = from_first_arrival(workload.sorted() if options.sort else workload)
    shifted = ordered.with_columns({"arrival_s": ordered.arrival_s - ordered.arrival_s[0]})
    return shifted.validate(str(path))
