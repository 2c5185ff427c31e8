"""Reproductions of papers: claims with rules fixed beforehand, measurements over seeds, figures and tables."""

from __future__ import annotations

SYSTEMS: dict[str, str] = {
    "cascadia": "headway.reproduce.cascadia",
    "cauchy": "headway.reproduce.cauchy",
    "headway": "headway.reproduce.united",
    "ktier": "headway.reproduce.ktier",
    "pascal": "headway.reproduce.pascal",
    "sageserve": "headway.reproduce.sageserve",
}
"""Module by system. docs/reproduce.md lists the names that a module must have."""
