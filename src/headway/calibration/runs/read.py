"""Reads measured runs from a file or a folder of any known format, recognised by its content."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

from headway.calibration.runs import aiperf, guidellm, inference_perf, request_table, vllm_bench
from headway.calibration.runs.run import MeasuredRun, Object
from headway.core.errors import HeadwayError
from headway.workload.readers.csv_table import header_of
from headway.workload.readers.shared import BOM, first_line, open_unpacked

KNOWN = (
    "a result of vllm bench serve (completed, mean_ttft_ms, ...), a report of guidellm (benchmarks), an export of"
    " AIPerf or genai-perf (request_latency, time_to_first_token, ...), a report of inference-perf"
    f" (load_summary, successes), or a table of requests ({request_table.EXPECTED})"
)
JSON_SUFFIXES, YAML_SUFFIXES = (".json", ".jsonl"), (".yaml", ".yml")


def is_runs(path: Path) -> bool:
    """Whether a file may hold runs of a load generator, by its name or its beginning."""
    if path.suffix in (*JSON_SUFFIXES, *YAML_SUFFIXES):
        return True
    try:
        line = first_line(path)
    except HeadwayError:
        return False
    return line[:1] in ("{", "[") or aiperf.is_csv(header_of(line)) or request_table.is_table(header_of(line))


def read(path: Path) -> tuple[list[MeasuredRun], list[str]]:
    """The runs in a file, and the skipped runs with reasons.

    Raises HeadwayError if the file has no known format, lacks a required key, or has no usable run.
    """
    runs: list[MeasuredRun] = []
    skipped: list[str] = []
    for run in _runs(path):
        same = next((known for known in runs if run.is_same(known)), None)
        if run.fault:
            skipped.append(f"{run.where}: {run.fault}")
        elif same is not None and same.rows is None and run.rows is not None:
            runs[runs.index(same)] = run  # a file of requests contains more than their summary
            skipped.append(f"{same.where}: the same as {run.where}")
        elif same is not None:
            skipped.append(f"{run.where}: the same as {same.where}")
        else:
            runs.append(run)
    if not runs:
        raise HeadwayError(f"{path}: no run that can be used: {'; '.join(skipped) or 'the file holds none'}")
    return runs, skipped


def _runs(path: Path) -> Iterator[MeasuredRun]:
    text = _text(path)
    if path.suffix not in (*JSON_SUFFIXES, *YAML_SUFFIXES) and text[:1] not in ("{", "["):
        lines = text.splitlines()
        if lines and request_table.is_table(header_of(lines[0])):
            yield from request_table.read_csv(lines, str(path))
            return
        yield aiperf.read_csv(lines, _beside(path, aiperf.SUMMARY), str(path))
        return
    documents = _documents(text, path)
    if any(not isinstance(each, dict) for each in documents):
        odd = next(each for each in documents if not isinstance(each, dict))
        raise HeadwayError(f"{path}: expected JSON objects, found {type(odd).__name__}")
    if documents and aiperf.is_request(documents[0]):
        yield aiperf.read_requests(documents, _beside(path, aiperf.SUMMARY), str(path))
    elif documents and request_table.is_table(documents[0]):
        yield from request_table.read_json(documents, str(path))
    elif documents and inference_perf.is_request(documents[0]):
        yield inference_perf.read_requests(documents, _beside(path, inference_perf.CONFIG), str(path))
    else:
        for i, document in enumerate(documents):
            where = f"{path}: run {i + 1}" if len(documents) > 1 else str(path)
            yield from _of_document(document, path, where)


def _of_document(document: Object, path: Path, where: str) -> Iterator[MeasuredRun]:
    if guidellm.is_report(document):
        yield from guidellm.read(document, where)
    elif inference_perf.is_report(document):
        yield inference_perf.read(document, _beside(path, inference_perf.CONFIG), where)
    elif aiperf.is_summary(document):
        yield aiperf.read(document, where)
    elif vllm_bench.is_result(document):
        yield vllm_bench.read(document, where)
    else:
        keys = ", ".join(list(document)[:6]) or "none"
        raise HeadwayError(f"{where}: not recognised, with the keys {keys}; expected {KNOWN}")


def _text(path: Path) -> str:
    with open_unpacked(path) as file:
        try:
            return file.read().removeprefix(BOM).decode()
        except UnicodeDecodeError as error:
            raise HeadwayError(f"{path}: cannot be read as text: {error}") from None


def _documents(text: str, path: Path) -> list[Any]:
    """The objects of a file: one, a list, or one per line."""
    if path.suffix in YAML_SUFFIXES:
        document = _yaml(text, path)
        return document if isinstance(document, list) else [document]
    try:
        document = json.loads(text)  # json accepts the NaN that load generators write
        return document if isinstance(document, list) else [document]
    except ValueError as error:
        try:
            return [json.loads(line) for line in text.splitlines() if line.strip()]
        except ValueError:
            raise HeadwayError(f"{path}: not valid JSON: {error}") from None


def _yaml(text: str, path: Path) -> Any:
    try:
        return yaml.load(text, Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader))
    except yaml.YAMLError as error:
        raise HeadwayError(f"{path}: not valid YAML: {' '.join(str(error).split())}") from None


def _beside(path: Path, name: str) -> Object:
    """The object in another file of the folder; empty if there is none."""
    other = path.with_name(name)
    if other == path or not other.is_file():
        return {}
    found = _documents(_text(other), other)
    return found[0] if found and isinstance(found[0], dict) else {}
