"""JSON: the report as ``model.py`` defines it, and the schema that every output satisfies."""

from __future__ import annotations

import json
from importlib.resources import files
from pathlib import Path
from typing import Any

import msgspec

from opgraft.diagnostics.model import SCHEMA, Report
from opgraft.diagnostics.report.files import write_atomically


def to_bytes(report: Report) -> bytes:
    """The report as indented JSON."""
    return msgspec.json.format(msgspec.json.encode(report), indent=1) + b"\n"


def write_json(report: Report, path: Path | str) -> None:
    """Writes the report to ``path``, whole or not at all."""
    write_atomically(Path(path), to_bytes(report))


def read_json(path: Path | str) -> Report:
    """Reads a report that :func:`write_json` wrote; ValueError says what is wrong with another file."""
    try:
        report: Report = msgspec.json.decode(Path(path).read_bytes(), type=Report)
    except msgspec.DecodeError as error:
        raise ValueError(f"{path} is not a report of opgraft: {error}") from error
    if report.schema != SCHEMA:
        raise ValueError(f"{path} has schema {report.schema}; this version reads schema {SCHEMA}")
    return report


def json_schema() -> dict[str, Any]:
    """The JSON Schema that ships with the package."""
    found: dict[str, Any] = json.loads(files("opgraft.diagnostics.report").joinpath("schema.json").read_bytes())
    return found


def make_schema() -> dict[str, Any]:
    """The JSON Schema of :class:`~opgraft.diagnostics.model.Report`, made from the model."""
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "opgraft report",
        **msgspec.json.schema(Report),
    }
