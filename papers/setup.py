"""The papers have the version of the Headway beside them, and need that one: their rows are of its simulator."""

from __future__ import annotations

import re
from email import message_from_string
from pathlib import Path

from setuptools import setup

HERE = Path(__file__).resolve().parent


def version() -> str:
    """Of the Headway in this repository; in a source distribution, which holds the papers alone, its own."""
    headway = HERE.parent / "src" / "headway" / "__init__.py"
    if headway.is_file():
        return re.findall(r'^__version__ = "(.+)"$', headway.read_text(encoding="utf-8"), re.MULTILINE)[0]
    return str(message_from_string((HERE / "PKG-INFO").read_text(encoding="utf-8"))["Version"])


setup(version=version(), install_requires=[f"headway[plan]=={version()}"])
