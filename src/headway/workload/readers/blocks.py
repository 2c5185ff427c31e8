"""A text file in blocks of whole lines, gzip or not, so that a file larger than memory can be read."""

from __future__ import annotations

import gzip
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from headway.core.errors import HeadwayError

BLOCK_BYTES = 1 << 23
GZIP_MAGIC = b"\x1f\x8b"
BOM = b"\xef\xbb\xbf"


@contextmanager
def reading(path: Path) -> Iterator[IO[bytes]]:
    """The file's bytes, unpacked; what goes wrong on the way is a HeadwayError."""
    try:
        with path.open("rb") as raw:
            packed = raw.read(2) == GZIP_MAGIC
        with gzip.open(path, "rb") if packed else path.open("rb") as file:
            yield file  # type: ignore[misc]
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


def first_line(path: Path) -> str:
    """The header of a CSV, or the first line of JSON lines."""
    with reading(path) as file:
        line = file.readline(1 << 20).removeprefix(BOM)
    if not line.strip():
        raise HeadwayError(f"{path}: the file is empty")
    return line.decode("utf-8", "replace").strip()


def blocks(path: Path, skip_lines: int = 0) -> Iterator[tuple[int, bytes]]:
    """(number of the first line, from 1; whole lines), without the first `skip_lines`."""
    with reading(path) as file:
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
