"""The thesis's experiments in a document: what each says, its tables and pictures, as stored."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from blockflow.bench.grid import Grid
from blockflow.bench.results import revision_text
from blockflow.bench.thesis.outcome import title_of

FOLDER = "thesis"
"""Below the folder of results; its pictures lie below that of the pictures."""

_MOST_PICTURE_BYTES = 150 * 1024

Document = Mapping[str, Any]


def read(results: Path) -> list[Document]:
    """The stored experiments, in the order of the thesis; none where nothing is stored."""
    found = [
        json.loads(path.read_text(encoding="utf-8")) for path in (results / FOLDER).glob("*.json")
    ]
    return sorted(found, key=lambda d: (_tables_of(d), title_of(d, "name")))


def take(results: Path, docs: Path) -> list[Path]:
    """Store the documents of ``results/thesis`` and those of their pictures that are small.

    A picture that nobody has made anew does not stay beside new figures.
    """
    taken: list[Path] = []
    for source in sorted((results / FOLDER).glob("*.json")):
        document = json.loads(source.read_text(encoding="utf-8"))
        if not isinstance(document, dict) or "says" not in document:
            continue  # not an experiment's
        if document["settings"]["quick"]:
            continue  # it says whether all is sound; its figures mean nothing
        pictures = [
            name
            for name in sorted(_pictures(document))
            if (source.parent / name).stat().st_size < _MOST_PICTURE_BYTES
        ]
        copies = [
            (source, docs / "results"),
            *((source.parent / p, docs / "img") for p in pictures),
        ]
        for path, folder in copies:
            (folder / FOLDER).mkdir(parents=True, exist_ok=True)
            shutil.copyfile(path, folder / FOLDER / path.name)
            taken.append(folder / FOLDER / path.name)
        for picture in _pictures(document) - set(pictures):
            (docs / "img" / FOLDER / picture).unlink(missing_ok=True)
    shown = {picture for document in read(docs / "results") for picture in _pictures(document)}
    for path in (docs / "img" / FOLDER).glob("*"):
        if path.name not in shown:
            path.unlink()
    return taken


def _pictures(document: Document) -> set[str]:
    return {p["file"] for p in document["pictures"]}


def lines(documents: Sequence[Document], images: frozenset[str]) -> list[str]:
    """Markdown: an overview, then every experiment; ``images`` are names below ``img/thesis``."""
    rows = [
        (f"`{title_of(d, 'name')}`", ", ".join(d["of"]), str(d["state"]), d["says"])
        for d in documents
    ]
    heads = ("experiment", "of", "", "in one line")
    out = [Grid("", heads, rows, frozenset(heads)).markdown(), ""]
    for document in documents:
        title = f"## {title_of(document, 'title')} ({', '.join(document['of'])})"
        out += [title, "", document["says"], ""]
        for table in document["tables"]:
            heads = tuple(table["heads"])
            cells = [tuple(map(str, row)) for row in table["rows"]]
            grid = Grid("", heads, cells, _texts(heads, cells))
            out += [f"*{table['title']}*", "", grid.markdown(), ""]
        for note in document["notes"]:
            out += [f"* {note}"]
        for picture in document["pictures"]:
            if picture["file"] in images:
                place = f"img/{FOLDER}/{picture['file']}"
                out += ["", f"![{picture['title']}]({place})"]
        out += ["", f"<sub>{_provenance(document)}</sub>", ""]
    return out


def _texts(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> frozenset[str]:
    """Columns without a number in them."""
    return frozenset(
        head
        for i, head in enumerate(heads)
        if not any(row[i].lstrip("+-")[:1].isdigit() for row in rows)
    )


def _provenance(document: Document) -> str:
    machine = document["machine"]
    where = f"{machine.get('cpu', 'unknown CPU')}, {machine.get('cores', '?')} cores"
    how = f"`{document['command']}`", document["date"], revision_text(machine)
    text = f"{', '.join(filter(None, how))}; {where}, torch {machine.get('torch')}."
    steady = document["fixed_work"]
    return f"{text} {steady.capitalize()}." if steady else text


def _tables_of(document: Document) -> tuple[float, ...]:
    """By the numbers of the thesis's tables and figures: ``table 4.10`` after ``table 4.9``."""
    numbers = []
    for name in document["of"]:
        for word in str(name).replace(",", " ").split():
            head, _, tail = word.partition(".")
            if head.isdigit() and tail.isdigit():
                numbers.append(int(head) + int(tail) / 1000)
    return tuple(numbers[:1]) or (99.0,)
