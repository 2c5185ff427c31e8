# ruff: noqa: T201 (a script prints)
"""Write entries of the catalog from folders with the config.json of published models, by the same reader as users'.

    python scripts/catalog_models.py FOLDER src/headway/catalog/data/models/published.json

FOLDER has a folder for each repository, named ORGANISATION--NAME, with a config.json, files of quantisers, and, where
the config.json is no copy of the published one, a source.txt that says where its sizes are from. A repository that the
catalog knows already is left out, and so is one that the reader refuses, which is printed.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import msgspec
from msgspec.structs import replace

from headway import catalog
from headway.core.errors import HeadwayError
from headway.core.model import Model

ALWAYS = ("name", "hf_id")
SOURCE = "config.json of {} on the Hugging Face hub, read in a published copy of that file, November 2026"


def main(folder: Path, out: Path) -> None:
    known = {name.lower() for model in catalog.models() if model.source for name in model.names}
    if out.exists():
        known -= {name.lower() for entry in json.loads(out.read_text()) for name in (entry["name"], entry["hf_id"])}
    lines = []
    for each in sorted(folder.iterdir(), key=lambda path: path.name.lower()):
        repository = each.name.replace("--", "/", 1)
        name = repository.rpartition("/")[2].lower()
        if {repository.lower(), name} & known:
            continue
        try:
            model = catalog.model_from_config(each, name)
        except HeadwayError as error:
            print(f"{repository}: {error}")
            continue
        stated = each / "source.txt"
        source = stated.read_text().strip() if stated.exists() else SOURCE.format(repository)
        lines.append(" " + json.dumps(entry(replace(model, hf_id=repository, source=source))))
    out.write_text("[\n" + ",\n".join(lines) + "\n]\n")


def entry(model: Model) -> dict[str, Any]:
    """The fields that differ from their defaults, and those that have none."""
    return _short(msgspec.to_builtins(model), model)


def _short(fields: dict[str, Any], value: msgspec.Struct) -> dict[str, Any]:
    defaults = {each.name: each.default for each in msgspec.structs.fields(value)}
    found = {}
    for name, written in fields.items():
        own = getattr(value, name)
        if name not in ALWAYS and (own == defaults[name] or own is None or own == ()):
            continue
        if isinstance(own, msgspec.Struct):
            written = _short(written, own)
        elif name == "layers":
            written = [_short(part, layer) for part, layer in zip(written, own, strict=True)]
        found[name] = written
    return found


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
