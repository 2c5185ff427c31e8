"""Plotly figures that save themselves in the format of a file name."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from plotly import graph_objects

from headway.core.errors import HeadwayError
from headway.report.page import document, literal, write_page
from headway.report.picture import SUFFIXES, write_picture
from headway.workload.atomic_file import write_text


class Figure(graph_objects.Figure):  # type: ignore[misc]  # plotly has no types
    """A Plotly figure. It can be changed like any other, and saved with `save`."""

    def __init__(self, figure: Mapping[str, Any] | None = None) -> None:
        super().__init__(None if figure is None else dict(figure))

    def save(self, path: str | Path, *, width: int = 700, height: int | None = None) -> Path:
        """Write an .html page with plotly.js beside it, .json, or a picture: .svg, .png, .pdf, .webp.

        matplotlib draws pictures (`pip install 'headway[figures]'`) without a browser, `width` x `height` pixels.
        Raises HeadwayError if it is missing, if the figure contains an unsupported kind of trace, or for another
        suffix.
        """
        path = Path(path)
        if path.suffix == ".html":
            write_page(path, self._page(path.stem))
        elif path.suffix == ".json":
            write_text(path, self.to_json())
        elif path.suffix in SUFFIXES:
            write_picture(self.to_plotly_json(), path, width, height or self.layout.height or 400)
        else:
            raise HeadwayError(f"{path}: expected .html, .json, {', '.join(SUFFIXES)}")
        return path

    def _page(self, title: str) -> str:
        figure = literal(json.loads(self.to_json()))
        drawn = f'Plotly.newPlot("figure", {{...{figure}, config: {{displaylogo: false, responsive: true}}}});'
        return document(title, '<div class="chart" id="figure"></div>', drawn)
