"""The report of the thesis's experiments: Markdown and HTML from their documents."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from blockflow.bench.grid import Grid
from blockflow.bench.mlperf.job import disk
from blockflow.bench.mlperf.report import Heading, Part, Picture, Text, to_html, to_markdown
from blockflow.bench.results import revision_text
from blockflow.bench.thesis.outcome import read_documents, title_of

MARKDOWN, HTML = "report.md", "report.html"
_TITLE = "The thesis's experiments on this machine"

_QUICK = "Quick: is everything sound? Too few rounds, and perhaps a small model; no results."


def write_report(out: Path, names: Iterable[str]) -> None:
    """From the documents in ``out``: those of this call, and what earlier ones have left there.

    Raises:
        BlockFlowError: NO_SPACE, or INVALID_REQUEST where nothing can be written.
    """
    parts = sections(read_documents(out, names))
    with disk(out):
        (out / MARKDOWN).write_text(to_markdown(parts, _TITLE), encoding="utf-8")
        (out / HTML).write_text(to_html(parts, _TITLE), encoding="utf-8")


def sections(documents: Sequence[Mapping[str, Any]]) -> list[Part]:
    """The report's parts, in order."""
    found: list[Part] = [_overview(documents)]
    for document in documents:
        found += _section(document)
    return found


def _overview(documents: Iterable[Mapping[str, Any]]) -> Grid:
    rows = [(title_of(d, "name"), ", ".join(d["of"]), state(d), d["says"]) for d in documents]
    return Grid("What it shows", ("experiment", "of", "", "in one line"), rows)


def state(document: Mapping[str, Any]) -> str:
    """Done, skipped, failed; and whether there is something although it failed."""
    kept = document["partial"] and document["files"]
    return "failed, PARTIAL" if kept else str(document["state"])


def _section(document: Mapping[str, Any]) -> list[Part]:
    found: list[Part] = [Heading(f"{title_of(document, 'title')} ({', '.join(document['of'])})")]
    if document["settings"]["quick"]:
        found.append(Text(_QUICK))
    if document["partial"]:
        found.append(
            Text(
                "PARTIAL: the experiment broke off; the table and the files hold what it had found."
            )
        )
    found.append(Text(document["says"]))
    for table in document["tables"]:
        found.append(Grid(table["title"], tuple(table["heads"]), table["rows"]))
    found += [Picture(p["title"], p["file"]) for p in document["pictures"]]
    found += [Text(note) for note in document["notes"]]
    if document["error"] is not None and document["error"].get("hint"):
        found.append(Text(document["error"]["hint"]))
    if document["fixed_work"]:
        found.append(Text(document["fixed_work"]))
    found.append(Text(_origin(document)))
    return found


def _origin(document: Mapping[str, Any]) -> str:
    """The command, the day, the sources and the machine; and the files."""
    machine = document["machine"]
    facts = [
        document["date"],
        revision_text(machine),
        str(machine.get("cpu", "")),
        f"{machine.get('cores')} cores",
        f"{machine.get('memory_gib')} GiB",
        f"torch {machine.get('torch')}",
        f"{document['seconds']:.0f} s",
    ]
    files = f" Files: {', '.join(document['files'])}." if document["files"] else ""
    return f"{document['command']} ({'; '.join(filter(None, facts))}).{files}"
