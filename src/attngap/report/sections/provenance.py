"""Where every number comes from."""

from typing import Any

from attngap.report.page import Column, Section, Table, Text
from attngap.report.results import Results

COLUMNS = (
    Column("file", "file", wide=True),
    Column("kind", "kind"),
    Column("command", "command", wide=True),
    Column("seed", "seed"),
    Column("time", "when (UTC)"),
    Column("versions", "versions", wide=True),
    Column("machine", "machine", wide=True),
    Column("commit", "commit"),
)


def provenance_section(results: Results) -> list[Section]:
    rows = [_row(str(result.path), result.kind, result.content.get("provenance", {})) for result in results.results]
    for path, records in results.runs:
        last = records[-1].provenance
        rows.append(_row(str(path), f"{len(records)} probe runs", last))
    lead = "Every number on this page is in one of these files. The same command, versions and seed give it again."
    table = Table("provenance-table", "Sources", COLUMNS, rows)
    lines = ["Ratios and shares compare runs on one machine; absolute times hold for that machine only."]
    note = Text([*lines, *(f"Passed over: {line}" for line in results.skipped)])
    return [Section("sources", "Where the numbers come from", [table, note], lead)]


def _row(file: str, kind: str, provenance: dict[str, Any]) -> dict[str, Any]:
    machine = provenance.get("machine", {})
    described = ", ".join(str(machine[key]) for key in ("cpu", "system") if machine.get(key))
    versions = [f"{name} {version}" for name, version in provenance.get("versions", {}).items()]
    if provenance.get("far_part"):
        versions.append(f"far part by {provenance['far_part']}")
    cores = f"{machine['cores']} cores, " if machine.get("cores") else ""
    return {
        "file": file,
        "kind": kind,
        "command": provenance.get("command"),
        "seed": provenance.get("seed", provenance.get("seeds")),
        "time": str(provenance.get("time", ""))[:16].replace("T", " ") or None,
        "versions": ", ".join(versions),
        "machine": cores + described,
        "commit": (provenance.get("commit") or "")[:12] or None,
    }
