"""The findings as SARIF 2.1.0, for code-scanning views and editors."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from opgraft.diagnostics.model import Finding, Location, Report
from opgraft.diagnostics.report.files import write_atomically
from opgraft.diagnostics.report.pages import pages

_LEVEL = {"error": "error", "warning": "warning", "note": "note"}


def write_sarif(report: Report, path: Path | str) -> None:
    """Writes the findings, whole or not at all."""
    write_atomically(Path(path), json.dumps(to_sarif(report), indent=1).encode() + b"\n")


def to_sarif(report: Report) -> dict[str, Any]:
    """One run with one result a finding; rules carry the pages' titles."""
    codes = sorted({found.code for found in report.findings})
    return {
        "$schema": "https://json.schemastore.org/sarif-2.1.0.json",
        "version": "2.1.0",
        "runs": [
            {
                "tool": {
                    "driver": {
                        "name": "opgraft",
                        "version": report.opgraft,
                        "rules": [_rule(code, report) for code in codes],
                    }
                },
                "results": [_result(found, codes) for found in report.findings],
                "columnKind": "unicodeCodePoints",
            }
        ],
    }


def _rule(code: str, report: Report) -> dict[str, Any]:
    kind = next(found.kind for found in report.findings if found.code == code)
    page = pages().get(code)
    rule: dict[str, Any] = {"id": code, "name": kind}
    if page is not None:
        rule["shortDescription"] = {"text": page.title}
        rule["help"] = {"text": page.text}
    return rule


def _result(found: Finding, codes: list[str]) -> dict[str, Any]:
    advice = "".join(f"\n{remedy.id}: {remedy.text}" for remedy in found.remedies)
    result: dict[str, Any] = {
        "ruleId": found.code,
        "ruleIndex": codes.index(found.code),
        "level": _LEVEL[found.severity],
        "message": {"text": found.message + advice},
    }
    if found.location.path:
        result["locations"] = [_location(found.location)]
        result["partialFingerprints"] = {
            "opgraft/v1": f"{found.code}:{Path(found.location.path).name}:{found.location.text.strip()}"
        }
    others = [site for site in found.sites if site != found.location]
    if others:
        result["relatedLocations"] = [_location(site) for site in others]
    return result


def _location(place: Location) -> dict[str, Any]:
    path = Path(place.path)
    here = Path.cwd()
    uri = path.relative_to(here).as_posix() if path.is_absolute() and path.is_relative_to(here) else path.as_posix()
    region: dict[str, Any] = {"startLine": max(1, place.line)}
    if place.column is not None:
        region["startColumn"] = place.column + 1
        if place.end_column is not None:
            region["endLine"] = place.end_line or place.line
            region["endColumn"] = place.end_column + 1
    if place.text:
        region["snippet"] = {"text": place.text}
    return {"physicalLocation": {"artifactLocation": {"uri": uri}, "region": region}}
