"""The gateway's own log on stderr: its level, and lines of text or of JSON."""

from __future__ import annotations

import logging
import sys
from datetime import UTC, datetime
from typing import Literal

import msgspec
from msgspec import Struct

Level = Literal["debug", "info", "warning", "error"]


class LogOptions(Struct, frozen=True):
    """Settings of the log of one gateway process."""

    level: Level = "info"
    format: Literal["text", "json"] = "text"

    def apply(self) -> None:
        """Log to stderr from now on. Libraries log warnings and errors only."""
        handler = logging.StreamHandler(sys.stderr)
        text = logging.Formatter("%(asctime)s %(message)s", datefmt="%H:%M:%S")
        handler.setFormatter(_JsonFormatter() if self.format == "json" else text)
        logging.basicConfig(handlers=[handler], force=True)
        logging.getLogger("headway").setLevel(self.level.upper())


class _JsonFormatter(logging.Formatter):
    """Writes one JSON object per line; a traceback is a text in the object."""

    def format(self, record: logging.LogRecord) -> str:
        line = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return msgspec.json.encode(line).decode()
