"""A planner's result in the form that the command prints and the API returns."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from headway.core.errors import HeadwayError
from headway.report.blocks import Report, Said

Made = Callable[[], str]


@dataclass(frozen=True, repr=False)
class Planned:
    """A plan of any kind. `answer` holds all values, as `--json` prints them."""

    answer: Any
    is_met: bool
    """Whether the targets are met."""
    rows: tuple[dict[str, Any], ...]
    """The options that were considered."""
    sentences: tuple[str, ...]
    """The answer in words."""
    said: tuple[Said, ...]
    """Sentences and tables for the console."""
    files: Mapping[str, Made] = field(default_factory=dict)
    """The plan as scenario files, by name. "" is the name of a single file, which the user names."""
    report: Callable[[Path | None], Report] | None = None
    """Creates the page. The argument is the path of the plan's file, None if no file was written. A plan without a page
    has no `report`."""
    counted: str = ""
    """A text on how much was simulated."""

    def yaml(self) -> str:
        """The plan as a scenario file. Raises HeadwayError if there is none, or several."""
        if not self.files:
            raise HeadwayError(f"there is no plan to write: {self.sentences[0]}")
        if len(self.files) > 1:
            raise HeadwayError(f"several plans: {', '.join(self.files)}; expected a folder to save them in")
        return next(iter(self.files.values()))()
