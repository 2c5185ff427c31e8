"""The papers' tables and figures: claims with rules fixed beforehand, measured over seeds, and charts."""

from __future__ import annotations

SYSTEMS: dict[str, str] = {
    "cascadia": "headway.reproduce.cascadia",
    "cauchy": "headway.reproduce.cauchy",
    "headway": "headway.reproduce.united",
    "ktier": "headway.reproduce.ktier",
    "pascal": "headway.reproduce.pascal",
    "sageserve": "headway.reproduce.sageserve",
}
"""Name -> module. docs/reproduce.md says what a module offers."""
