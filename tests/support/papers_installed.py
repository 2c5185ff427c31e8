"""The commands of headway-papers: `make` installs them beside Headway."""

from __future__ import annotations

from importlib.metadata import entry_points

import pytest

HAS_PAPERS = bool(entry_points(group="headway.commands"))
needs_papers = pytest.mark.skipif(not HAS_PAPERS, reason="headway-papers is not installed")
