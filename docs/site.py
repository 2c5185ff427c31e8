"""Hooks of the documentation site: links that leave docs/ become paths in the repository; old addresses lead on."""

from __future__ import annotations

import re
from html import escape
from pathlib import Path
from typing import Any

_LINK = re.compile(r"\[((?:[^\[\]]|\[[^\[\]]*\])+)\]\(\.\./([^)\s]+)\)")

MOVED = {
    "arena-held-out": "headway.html#the-held-out-grid-time-to-first-token",
    "cascadia-reproduced": "cascadia.html#the-paper-reproduced",
    "cauchy-reproduced": "cauchy.html#the-paper-reproduced",
    "findings": "reproduce.html#what-holds",
    "ktier-reproduced": "ktier.html#the-paper-reproduced",
    "pascal-reproduced": "pascal.html#the-paper-reproduced",
    "sageserve-reproduced": "sageserve.html#the-paper-reproduced",
}
"""Pages that are parts of others now, and where they are."""


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Replace `[text](../path)` by the text and the path: the site has no page for source files."""
    return _LINK.sub(lambda link: link[1] if link[1].strip("`") == link[2] else f"{link[1]} (`{link[2]}`)", markdown)


def on_post_build(config: Any, **_: Any) -> None:
    """Write a page at each old address that leads to the new one."""
    for old, new in MOVED.items():
        url = escape(new)
        page = f'<!doctype html>\n<meta http-equiv="refresh" content="0; url={url}">\n<a href="{url}">{url}</a>\n'
        (Path(config["site_dir"]) / f"{old}.html").write_text(page, encoding="utf-8")
