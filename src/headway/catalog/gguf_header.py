"""Reads the header of a GGUF file: its metadata, and the names, shapes and types of its tensors."""

from __future__ import annotations

import mmap
import re
import struct
from pathlib import Path
from typing import Any, NamedTuple

from headway.core.errors import HeadwayError

BLOCKS = {
    0: ("F32", 1, 4), 1: ("F16", 1, 2), 2: ("Q4_0", 32, 18), 3: ("Q4_1", 32, 20), 6: ("Q5_0", 32, 22),
    7: ("Q5_1", 32, 24), 8: ("Q8_0", 32, 34), 9: ("Q8_1", 32, 40), 10: ("Q2_K", 256, 84), 11: ("Q3_K", 256, 110),
    12: ("Q4_K", 256, 144), 13: ("Q5_K", 256, 176), 14: ("Q6_K", 256, 210), 15: ("Q8_K", 256, 292),
    16: ("IQ2_XXS", 256, 66), 17: ("IQ2_XS", 256, 74), 18: ("IQ3_XXS", 256, 98), 19: ("IQ1_S", 256, 50),
    20: ("IQ4_NL", 32, 18), 21: ("IQ3_S", 256, 110), 22: ("IQ2_S", 256, 82), 23: ("IQ4_XS", 256, 136),
    24: ("I8", 1, 1), 25: ("I16", 1, 2), 26: ("I32", 1, 4), 27: ("I64", 1, 8), 28: ("F64", 1, 8),
    29: ("IQ1_M", 256, 56), 30: ("BF16", 1, 2), 34: ("TQ1_0", 256, 54), 35: ("TQ2_0", 256, 66),
    39: ("MXFP4", 32, 17), 40: ("NVFP4", 64, 36), 41: ("Q1_0", 128, 18),
}  # fmt: skip
"""ggml's types of tensors by number: (name, weights in a block, bytes of a block)."""
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
"""Formats of metadata values by the number of their type."""
_STRING, _ARRAY = 8, 9
_VERSIONS = (2, 3)
_PART = re.compile(r"(?P<name>.*)-\d{5}-of-(?P<num>\d{5})\.gguf")


class Tensor(NamedTuple):
    """One tensor in a file."""

    name: str
    shape: tuple[int, ...]
    """Input columns first, as ggml orders dimensions."""
    kind: str
    """ggml's name of its type."""
    num_bytes: float

    @property
    def num_weights(self) -> int:
        num = 1
        for each in self.shape:
            num *= each
        return num


class GgufHeader(NamedTuple):
    """The metadata and tensors of a model, of all its files if it is split."""

    metadata: dict[str, Any]
    """Values by key. Lists of strings, such as the vocabulary, are left out."""
    tensors: list[Tensor]


def read_header(file: Path) -> GgufHeader:
    """The header of a GGUF file, whose weights are not read. Of a split model, any of its files stands for all.

    Raises HeadwayError if a file cannot be read or has another format.
    """
    header = _read(file)
    part = _PART.fullmatch(file.name)
    if part is None or header.metadata.get("split.count", 1) < 2:
        return header
    num = int(part["num"])
    parts = [_read(file.with_name(f"{part['name']}-{i:05}-of-{num:05}.gguf")) for i in range(1, num + 1)]
    return GgufHeader(parts[0].metadata, [each for one in parts for each in one.tensors])


def _read(file: Path) -> GgufHeader:
    try:
        with file.open("rb") as opened:
            if opened.read(4) != b"GGUF":
                raise HeadwayError(f"{file}: not a GGUF file")
            with mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ) as data:
                return _Reader(file, data).header()
    except OSError as error:
        raise HeadwayError(f"{file}: {error.strerror or error}") from error
    except (struct.error, OverflowError):  # beyond the file's end, or beyond any file's
        raise HeadwayError(f"{file}: ends within its header; is the download complete?") from None


class _Reader:
    """Reads values one after the other."""

    def __init__(self, file: Path, data: mmap.mmap) -> None:
        self._file, self._data, self._at = file, data, 4

    def header(self) -> GgufHeader:
        version = self._one("I")
        if version not in _VERSIONS:
            raise HeadwayError(
                f"{self._file}: GGUF of version {version}; expected little-endian GGUF of version 2 or 3"
            )
        num_tensors, num_keys = self._one("Q"), self._one("Q")
        metadata = {}
        for _ in range(num_keys):
            key = self._text()
            if (value := self._value(self._one("I"))) is not None:
                metadata[key] = value
        return GgufHeader(metadata, [self._tensor() for _ in range(num_tensors)])

    def _one(self, code: str) -> Any:
        (value,) = self._several(code, 1)
        return value

    def _several(self, code: str, num: int) -> tuple[Any, ...]:
        form = f"<{num}{code}"
        values = struct.unpack_from(form, self._data, self._at)
        self._at += struct.calcsize(form)
        return values

    def _text(self) -> str:
        (text,) = self._several("s", self._one("Q"))
        return str(text, "utf-8", "replace")

    def _value(self, kind: int) -> Any:
        """A value of metadata; None for a list of strings, over which it passes."""
        if kind == _STRING:
            return self._text()
        if kind == _ARRAY:
            return self._list(self._one("I"), self._one("Q"))
        return self._one(self._format(kind))

    def _list(self, kind: int, num: int) -> list[Any] | None:
        if kind == _STRING:
            length, data, at = struct.Struct("<Q"), self._data, self._at
            for _ in range(num):
                at += 8 + length.unpack_from(data, at)[0]
            self._at = at
            return None
        return list(self._several(self._format(kind), num))

    def _format(self, kind: int) -> str:
        if kind not in _SCALARS:
            raise HeadwayError(f"{self._file}: a value of unknown type {kind}; is the file damaged?")
        return _SCALARS[kind]

    def _tensor(self) -> Tensor:
        name = self._text()
        shape, kind = self._several("Q", self._one("I")), self._one("I")
        self._one("Q")  # where its weights begin
        if kind not in BLOCKS:
            known = ", ".join(each for each, _, _ in BLOCKS.values())
            raise HeadwayError(f"{self._file}: {name} is of unknown type {kind}; expected one of {known}")
        if not shape or 0 in shape:
            raise HeadwayError(f"{self._file}: {name} has the shape {shape} without weights; is the file damaged?")
        called, num_weights, num_bytes = BLOCKS[kind]
        tensor = Tensor(name, shape, called, 0.0)
        return tensor._replace(num_bytes=tensor.num_weights * num_bytes / num_weights)
