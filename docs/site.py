"""Hooks of the documentation site: links that leave docs/ become the paths of files in the repository."""

from __future__ import annotations

import re
from typing import Any

_LINK = re.compile(r"\[((?:[^\[\]]|\[[^\[\]]*\])+)\]\(\.\./([^)\s]+)\)")


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Replace `[text](../path)` by the text and the path: the site has no page for source files."""
    return _LINK.sub(lambda link: link[1] if link[1].strip("`") == link[2] else f"{link[1]} (`{link[2]}`)", markdown)
