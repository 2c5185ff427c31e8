"""Hooks of the documentation site: links that leave docs/ become paths in the repository; old addresses lead on."""

from __future__ import annotations

import re
from html import escape
from pathlib import Path
from typing import Any

_LINK = re.compile(r"\[((?:[^\[\]]|\[[^\[\]]*\])+)\]\(\.\./([^)\s]+)\)")

MOVED = {
    "arena-held-out": "headway.html#the-held-out-grid-time-to-first-token",
    "autopilot": "advise.html#shadow-and-autopilot",
    "cascadia-reproduced": "cascadia.html#the-paper-reproduced",
    "cauchy-reproduced": "cauchy.html#the-paper-reproduced",
    "energy": "plan-fleet.html#energy",
    "fairness": "tenants.html#fair-shares",
    "fallback": "reliability.html#fallback-pools",
    "findings": "reproduce.html#what-holds",
    "forecast": "plan-scaling.html#demand-and-forecasts",
    "gallery": "index.html#gallery",
    "ktier-reproduced": "ktier.html#the-paper-reproduced",
    "kv-events": "cache.html#kv-cache-events",
    "load": "discover.html#load-on-a-running-engine",
    "lora": "models.html#lora-adapters",
    "pascal-reproduced": "pascal.html#the-paper-reproduced",
    "sageserve-reproduced": "sageserve.html#the-paper-reproduced",
    "scorecard": "accuracy.html#scorecard",
    "speculative-decoding": "plan-capacity.html#speculative-decoding",
    "stores": "high-availability.html#stores-postgresql-valkey-and-redis",
    "upgrade": "operate.html#upgrade-from-020-to-030",
    "vllm-h100": "step-times.html#vllm-025-on-an-h100-measured",
    "why": "observe.html#why-was-this-request-slow",
}
"""Pages that are parts of others now, and where they are."""


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Replace `[text](../path)` by the text and the path: the site has no page for source files."""
    return _LINK.sub(_path, markdown)


def _path(link: re.Match[str]) -> str:
    text, path = link[1].strip("`").replace("\\", ""), link[2]
    return f"`{path}`" if path.endswith(text) else f"{link[1]} (`{path}`)"


def on_post_build(config: Any, **_: Any) -> None:
    """Write a page at each old address that leads to the new one."""
    for old, new in MOVED.items():
        url = escape(new)
        page = f'<!doctype html>\n<meta http-equiv="refresh" content="0; url={url}">\n<a href="{url}">{url}</a>\n'
        (Path(config["site_dir"]) / f"{old}.html").write_text(page, encoding="utf-8")
