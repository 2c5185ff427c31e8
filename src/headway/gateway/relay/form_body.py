"""Multipart forms, as for /v1/audio/transcriptions: text fields are read, and files stay unchanged."""

from __future__ import annotations

from email.message import Message

from headway.gateway.errors import ApiError

_MAX_PARTS = 64
_MAX_FIELD_BYTES = 64 << 10


class Form:
    """One form and its text fields. A repeated field has its last value."""

    def __init__(self, raw: bytes, content_type: str) -> None:
        """Raises ApiError if the body is not a form."""
        self.raw = raw
        self.fields: dict[str, str] = {}
        self._places: dict[str, list[tuple[int, int]]] = {}
        """Start and end of the values, by field."""
        kind, boundary = _parameter("content-type", content_type, "boundary")
        if kind != "multipart/form-data" or not boundary:
            raise ApiError(415, "expected content-type: multipart/form-data", "unsupported_media_type")
        self._read(b"--" + boundary.encode("latin-1", "replace"))

    def _read(self, marker: bytes) -> None:
        raw = self.raw
        at = 0 if raw.startswith(marker) else raw.find(b"\r\n" + marker) + 2
        if at == 1:
            raise _invalid("has no part")
        for _ in range(_MAX_PARTS):
            at += len(marker)
            if raw.startswith(b"--", at):
                return
            head_end = raw.find(b"\r\n\r\n", at)
            end = raw.find(b"\r\n" + marker, head_end)
            if head_end < 0 or end < 0:
                raise _invalid("ends within a part")
            self._add(raw[at:head_end], head_end + 4, max(end, head_end + 4))
            at = end + 2
        raise _invalid(f"has more than {_MAX_PARTS} parts")

    def _add(self, head: bytes, start: int, end: int) -> None:
        for line in head.decode("utf-8", "replace").split("\r\n"):
            name, colon, value = line.partition(":")
            if not colon or name.strip().lower() != "content-disposition":
                continue
            _, field = _parameter("content-disposition", value.strip(), "name")
            _, file = _parameter("content-disposition", value.strip(), "filename")
            if field and file is None and end - start <= _MAX_FIELD_BYTES:
                self.fields[field] = self.raw[start:end].decode("utf-8", "replace")
                self._places.setdefault(field, []).append((start, end))

    def with_field(self, name: str, value: str) -> bytes:
        """The form with a new value for one of its text fields."""
        parts, at = [], 0
        for start, end in self._places[name]:
            parts += [self.raw[at:start], value.encode()]
            at = end
        return b"".join([*parts, self.raw[at:]])


def _parameter(header: str, value: str, name: str) -> tuple[str, str | None]:
    """A header's value, and one of its parameters."""
    message = Message()
    message[header] = value.replace("\r", " ").replace("\n", " ")
    found = message.get_param(name, header=header)
    return str(message[header]).partition(";")[0].strip().lower(), found if isinstance(found, str) else None


def _invalid(what: str) -> ApiError:
    return ApiError(400, f"the body is not a valid form: it {what}", "invalid_form")
