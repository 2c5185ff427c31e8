"""The documentation site: `make site` builds it without a warning, and it shows every page and picture."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import browser
import serving

pytest.importorskip("material")
ROOT = Path(__file__).parents[2]
HOOKS = (ROOT / "docs" / "site.py").read_text(encoding="utf-8")
WRITTEN = re.compile(r"<!-- (headway [^:]*): begin -->.*?<!-- \1: end -->", re.DOTALL)
"""Of a page, what a command of Headway writes between its marks."""


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        env={**os.environ, "NO_MKDOCS_2_WARNING": "1"},
    )
    assert done.returncode == 0, done.stderr
    return folder


@pytest.mark.ci
def test_every_page_is_in_the_navigation(site: Path) -> None:
    start = (site / "index.html").read_text(encoding="utf-8")
    for page in (ROOT / "docs").glob("*.md"):
        assert f'href="{page.stem}.html"' in start or page.stem == "index", f"{page.name} is missing in mkdocs.yml"


@pytest.mark.ci
def test_no_link_leaves_the_site(site: Path) -> None:
    """A link to a source file would point outside the site: the hook shows the file's path instead."""
    for page in site.glob("*.html"):
        text = page.read_text(encoding="utf-8")
        assert not re.search(r'(?:href|src)="\.\./', text), page.name


@pytest.mark.ci
def test_nothing_is_loaded_from_another_host(site: Path) -> None:
    """Nor a library for diagrams, which the theme loads for blocks of `mermaid`."""
    elsewhere = re.compile(
        r'<(?:script|img|iframe|link rel="(?:stylesheet|preload)")[^>]*(?:src|href)="?(?:https?:)?//'
    )
    for page in site.glob("*.html"):
        text = page.read_text(encoding="utf-8")
        assert not elsewhere.search(text) and 'class="mermaid"' not in text, page.name


@pytest.mark.ci
def test_a_source_file_is_named_once(site: Path) -> None:
    page = (site / "add-a-step-time-term.html").read_text(encoding="utf-8")
    assert "in <code>src/headway/perf/step.py</code>" in page and "step.py (" not in page


@pytest.mark.ci
def test_an_old_address_leads_to_the_section_that_has_its_text(site: Path) -> None:
    moved = re.findall(r'^    "([\w-]+)": "([\w-]+\.html)(?:#([\w-]+))?",$', HOOKS, re.MULTILINE)
    assert len(moved) > 6
    for old, page, section in moved:
        assert not (ROOT / "docs" / f"{old}.md").exists()
        assert f'url={page}{f"#{section}" if section else ""}"' in (site / f"{old}.html").read_text(encoding="utf-8")
        assert not section or f'id="{section}"' in (site / page).read_text(encoding="utf-8"), (old, page, section)


@pytest.mark.ci
def test_search_works_in_a_folder(site: Path, tmp_path: Path) -> None:
    """Where a browser starts no worker, and reads no file of the page's folder."""
    with browser.opened(f"file://{site}/index.html", tmp_path) as page:
        page.value("""
            const box = document.querySelector(".md-search__input")
            box.focus()
            box.value = "speculative decoding"
            box.dispatchEvent(new KeyboardEvent("keyup", { bubbles: true }))
        """)
        results = "[...document.querySelectorAll('.md-search-result__link')].map(each => each.href)"
        serving.until(lambda: page.value(results))
        assert any("plan-capacity.html" in each for each in page.value(results))
        assert page.value("[...document.scripts].filter(each => each.src && !each.src.startsWith('file:')).length") == 0


def test_pages_that_are_not_references_stay_short() -> None:
    """A longer page is a reference, searched and not read. Tables that a command writes do not count."""
    references = {"cli.md", "scenario.md", "policies.md", "log.md", "api.md", "metrics.md"}
    pages = (page for page in (ROOT / "docs").glob("*.md") if page.name not in references)
    long = {page.name: len(WRITTEN.sub("", page.read_text(encoding="utf-8")).splitlines()) for page in pages}
    assert {name: lines for name, lines in long.items() if lines > 300} == {}
