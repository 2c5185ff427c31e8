"""The ends of the parts of HTTP/1.1 messages in a connection's bytes, the number of bytes outside of bodies, and the
usual forms of messages, which need no parser."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

MAX_HEAD_BYTES: Final = 64 << 10
"""Maximum length of a request's first line and headers."""
MAX_HEADERS: Final = 256
MAX_FRAMING_BYTES: Final = 64 << 10
"""Maximum length of a body's chunk headers and trailers, in addition to one byte for each 8 bytes of the body."""
_BODY_BYTES_PER_FRAMING_BYTE: Final = 8
_MAX_SIZE_DIGITS = 16
_DIGITS = b"0123456789abcdefABCDEF"
BLANK_LINE: Final = b"\r\n\r\n"
HEAD: Final = 0
BODY: Final = 1
CHUNK_HEADER: Final = 2
CHUNK: Final = 3
TRAILERS: Final = 4
END: Final = 5
"""The part of a request that comes next on a connection. END: the request is complete. Plain numbers, because looking
up an enum's members takes a tenth of a request's time here."""
_MAX_REPEATED_BYTES: Final = 1 << 12
"""Longest head that is kept to compare later heads with."""
_MAX_LENGTH_DIGITS: Final = 15
_ZERO: Final = 48
"""The digit 0 in ASCII."""
_LENGTH_LINE: Final = b"\r\ncontent-length:"
_CR: Final = 13
_LF: Final = 10
_MAX_PLAIN_DIGITS: Final = 8
"""Most digits of a chunk's size that is read without a parser."""


class RequestFraming:
    """Divides a connection's bytes at the ends of heads, chunk headers, chunks, trailers and bodies.

    The parser gets each part by itself, but for heads that repeat an earlier one (`RepeatedHead`) and their bodies. The
    same bytes therefore give the same requests with the same limits, for any division into network segments. The parser
    decides what is valid. A request that the parser and this class divide differently is refused.
    """

    def __init__(self) -> None:
        self.begin_head()

    def begin_head(self) -> None:
        self.part = HEAD
        self.num_outside = 0
        """Bytes outside the body: of the head first, then of the chunk headers and the trailers."""
        self._last = b""
        """The end of the last lines, kept because it may be the first half of a blank line."""

    def begin_body(self, headers: Mapping[bytes, bytes], version: str, is_upgrade: bool) -> str | None:
        """Begin to frame the body after a complete head. Returns an error message if the request cannot be served; else
        None. `is_upgrade`: the client asks to change the protocol."""
        coding, length = headers.get(b"transfer-encoding"), int(headers.get(b"content-length", 0))
        if version != "1.1" and version != "1.0":
            return f"expected HTTP/1.1 or HTTP/1.0, got {version}"
        if is_upgrade and (coding is not None or length):
            return "a request with a body cannot change the protocol; expected no Upgrade"
        if coding is not None and (coding.lower() != b"chunked" or version == "1.0"):
            return "expected transfer-encoding: chunked, with HTTP/1.1"
        self.num_outside = self._num_inside = 0
        self._num_left, self._size_line = length, b""
        if coding is None:
            self.part = BODY if length else END
        else:
            self.part = CHUNK_HEADER
        return None

    def begin_known_body(self, length: int) -> None:
        """Begin to frame a body of this length, after a head that needs no parser."""
        self.num_outside = self._num_inside = 0
        self._num_left, self._size_line, self.part = length, b"", BODY

    def count_body(self, num_bytes: int) -> None:
        """Count the next bytes of a body that `begin_known_body` began."""
        self._num_left -= num_bytes
        self._num_inside += num_bytes
        if not self._num_left:
            self.part = END

    def end_of_part(self, data: bytes, start: int) -> int:
        """The end of the part of `data[start:]` that the parser gets next. After the parser, call `agrees`."""
        part = self.part
        if part in (BODY, CHUNK):
            end, size = start + self._num_left, len(data)
            return end if end < size else size
        if part == HEAD and not self.num_outside:  # most heads come in one piece
            end = data.find(BLANK_LINE, start) + 4
            if 4 <= end <= start + MAX_HEAD_BYTES:
                return end
        end = data.find(b"\n", start) + 1 if part == CHUNK_HEADER else self._blank_line_end(data, start)
        return min(end or len(data), start + self._max_outside - self.num_outside)

    def _blank_line_end(self, data: bytes, start: int) -> int:
        """The end of the next blank line in `data`; 0 if there is none. The line may have begun before `data`."""
        if self._last:
            at = (self._last + data[start : start + 3]).find(BLANK_LINE)
            if at >= 0:
                return start + at + len(BLANK_LINE) - len(self._last)
        at = data.find(BLANK_LINE, start)
        return at + len(BLANK_LINE) if at >= 0 else 0

    @property
    def _max_outside(self) -> int:
        if self.part == HEAD:
            return MAX_HEAD_BYTES
        return MAX_FRAMING_BYTES + self._num_inside // _BODY_BYTES_PER_FRAMING_BYTE

    def agrees(self, part: int, data: bytes, start: int, end: int, is_complete: bool, num_body: int) -> bool:
        """Whether the parser, which accepted `data[start:end]` of `part`, found the same end as this class.

        `is_complete`: whether the parser found the end of the request; `num_body`: number of body bytes that the parser
        found so far.
        """
        if part == BODY:
            self._num_left -= end - start
            self._num_inside += end - start
            if not self._num_left:
                self.part = END
        elif part == HEAD:
            is_end = end - start >= 4 and data[end - 4 : end] == BLANK_LINE  # most heads come in one piece
            is_end = is_end or self._ends_in_blank_line(data, start, end)
            if self.part == HEAD:  # the parser has begun no body
                self.num_outside += end - start
                return not is_end
            return is_end and not num_body and is_complete == (self.part == END)
        elif part == CHUNK:
            self._num_left -= end - start
            if not self._num_left:
                self.part, self._size_line = CHUNK_HEADER, b""
            return not is_complete and num_body == self._num_inside - max(self._num_left - 2, 0)
        else:
            self.num_outside += end - start
            if part == TRAILERS:
                if self._ends_in_blank_line(data, start, end):
                    self.part = END
            else:
                self._size_line = (self._size_line + data[start:end])[: _MAX_SIZE_DIGITS + 2]
                if data[end - 1] == 10:
                    expected = self._num_inside
                    return self._begins_chunk() and not is_complete and num_body == expected
        return num_body == self._num_inside and is_complete == (self.part == END)

    def _ends_in_blank_line(self, data: bytes, start: int, end: int) -> bool:
        last = data[end - 4 : end] if end - start >= 4 else (self._last + data[start:end])[-4:]
        self._last = last[-3:]
        return last == BLANK_LINE

    def _begins_chunk(self) -> bool:
        """Whether the line is a valid chunk size."""
        digits = self._size_line.partition(b";")[0].rstrip(b"\r\n")
        if not 0 < len(digits) <= _MAX_SIZE_DIGITS or digits.strip(_DIGITS):
            return False
        size = int(digits, 16)
        self._num_inside += size
        if size:
            self.part, self._num_left = CHUNK, size + 2
            self.num_outside += 2
        else:
            self.part, self._last = TRAILERS, b"\r\n"
        return True

    @property
    def is_too_long(self) -> bool:
        """Whether an unfinished head, or the framing of a body, has reached its limit."""
        return self.num_outside >= self._max_outside


def take_chunks(data: bytes, start: int, parts: list[bytes]) -> int:
    """Add the content of each whole chunk at `data[start:]` to `parts`. Returns their end, after which comes the last
    chunk, a part of a chunk, or an unusual form."""
    size = len(data)
    while True:
        at, length = start, 0
        while at < size and at - start < _MAX_PLAIN_DIGITS:
            digit = data[at]
            if 48 <= digit <= 57:
                digit -= 48
            elif 97 <= digit <= 102:
                digit -= 87
            elif 65 <= digit <= 70:
                digit -= 55
            else:
                break
            length = 16 * length + digit
            at += 1
        begin = at + 2
        end = begin + length
        if not length or end + 2 > size:
            return start
        if data[at] != _CR or data[at + 1] != _LF or data[end] != _CR or data[end + 1] != _LF:
            return start
        parts.append(data[begin:end])
        start = end + 2


class RepeatedHead:
    """The head of an earlier message of a connection. Most heads repeat an earlier one but for the length of the body,
    and need no parser."""

    def __init__(self) -> None:
        self.is_known = False
        self._before = self._after = b""
        """The head's bytes before and after the length of the body."""
        self._num_unlike = 0
        """Number of heads since the last repetition."""

    def body_length(self, data: bytes, start: int, end: int) -> int:
        """The length of the body if `data[start:end]` repeats the head; otherwise 0."""
        first, last = start + len(self._before), end - len(self._after)
        if not 0 < last - first <= _MAX_LENGTH_DIGITS or data[first] == _ZERO:
            return 0  # the parser decides about unusual lengths
        if data[start:first] != self._before or data[last:end] != self._after:
            return 0
        length = 0
        for i in range(first, last):
            digit = data[i] - _ZERO
            if not 0 <= digit <= 9:
                return 0
            length = 10 * length + digit
        self._num_unlike = 0
        return length

    def learn(self, data: bytes, start: int, end: int, length: bytes) -> bool:
        """Keep the head `data[start:end]`, which the parser has accepted with this length of the body. False if it is
        not kept: the more heads differ, the more rarely one of them is kept."""
        self._num_unlike += 1
        if self._num_unlike & (self._num_unlike - 1) or end - start > _MAX_REPEATED_BYTES or not length.isdigit():
            return False
        head = data[start:end]
        at = head.lower().find(_LENGTH_LINE)
        first = at + len(_LENGTH_LINE)
        while at >= 0 and head[first] == 32:
            first += 1
        last = first + len(length)
        if at < 0 or head[first:last] != length or head[last : last + 2] != b"\r\n":
            return False
        self._before, self._after, self.is_known = head[:first], head[last:], True
        return True
