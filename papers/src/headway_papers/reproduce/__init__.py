"""Reproductions of papers: claims with rules fixed beforehand, measurements over seeds, figures and tables."""

from __future__ import annotations

SYSTEMS: dict[str, str] = {
    "cascadia": "headway_papers.reproduce.cascadia",
    "cauchy": "headway_papers.reproduce.cauchy",
    "headway": "headway_papers.reproduce.united",
    "ktier": "headway_papers.reproduce.ktier",
    "pascal": "headway_papers.reproduce.pascal",
    "sageserve": "headway_papers.reproduce.sageserve",
}
"""Module by system. docs/reproduce.md lists the names that a module must define."""
