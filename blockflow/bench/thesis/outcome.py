"""Outcome: what became of one experiment, and the files that are left of it.

``NAME.json`` is the experiment's part of the report, ``NAME.jsonl`` and ``NAME.csv`` its figures,
``NAME-STEM.csv`` further data, ``NAME-STEM.png`` the plots. A later run of the same experiment
takes the place of all of them; one of another model, say, has another name (``Experiment.stem``).
"""

from __future__ import annotations

import csv
import enum
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from blockflow.bench.calibration import Steadiness, calibration_figures
from blockflow.bench.canvas import save_page
from blockflow.bench.grid import Grid
from blockflow.bench.mlperf.job import disk, write_json
from blockflow.bench.results import PARTIAL, Figure, ResultFile
from blockflow.bench.thesis.beside import beside_grid
from blockflow.bench.thesis.experiment import Experiment, Findings, Settings
from blockflow.core.errors import BlockFlowError

FORMAT = 1
"""Of the document; a change that readers would notice gets the next number."""

_WHICH = frozenset({"block", "clients", "lambda", "pdi", "scenario", "tasks", "of_what"})
"""Labels that tell figures of one experiment apart."""

_COLUMNS = (
    *("name", "mode", "batch", "value", "unit", "low", "high", "n"),
    *("p10_ms", "p50_ms", "p90_ms", "p99_ms"),
)


class State(enum.StrEnum):
    """What became of an experiment."""

    DONE = "done"
    SKIPPED = "skipped"
    FAILED = "failed"


@dataclass(frozen=True, slots=True)
class Outcome:
    """One experiment that was run, or was to be.

    Attributes:
        findings: what it found; after an error, what it had until then.
        steadiness: the fixed work before and after; None where it was not run.
        error: why it broke off, or why its files could not be written.
    """

    experiment: Experiment
    findings: Findings
    seconds: float = 0.0
    steadiness: Steadiness | None = None
    error: BlockFlowError | None = None

    @property
    def state(self) -> State:
        if self.error is not None or self.findings.failed:
            return State.FAILED
        return State.DONE if self.findings.skipped is None else State.SKIPPED

    @property
    def figures(self) -> list[Figure]:
        """With the fixed work's."""
        fixed = [] if self.steadiness is None else calibration_figures(self.steadiness)
        return [*self.findings.figures, *fixed]


def broken_off(
    experiment: Experiment,
    error: BlockFlowError,
    kept: Iterable[Figure],
    seconds: float,
    steadiness: Steadiness | None = None,
) -> Outcome:
    """Of an experiment that failed; what it had kept is marked as partial."""
    figures = [replace(f, labels={**f.labels, PARTIAL: True}) for f in kept]
    said = f"broke off: {error.code}: {error.message}"
    tables = []
    if figures:
        said += f" ({len(figures)} figures until then are kept)"
        tables = [partial_grid(figures)]
    return Outcome(experiment, Findings(said, figures, tables), seconds, steadiness, error)


def partial_grid(figures: Sequence[Figure]) -> Grid:
    """What was kept of an experiment, whatever it is; labels tell figures of one name apart."""
    shown = [
        replace(f, mode=", ".join([f.mode, *(f"{k} {v}" for k, v in _apart(f, figures))]))
        for f in figures
    ]
    return beside_grid("PARTIAL: what was found until it broke off", shown)


def _apart(figure: Figure, figures: Sequence[Figure]) -> list[tuple[str, Any]]:
    """The labels that name what was measured, where they differ from one figure to another."""
    keys = [k for k in figure.labels if k in _WHICH]
    return [(k, figure.labels[k]) for k in keys if len({f.labels.get(k) for f in figures}) > 1]


@dataclass(frozen=True, slots=True)
class Call:
    """What all documents of a call have in common.

    Attributes:
        settings: of the call.
        command: what a person types to get the same.
        machine: :func:`blockflow.bench.results.fingerprint`.
    """

    settings: Settings
    command: str
    machine: Mapping[str, Any]


def document_name(stem: str) -> str:
    """The file of an experiment's document."""
    return f"{stem}.json"


def write_outcome(outcome: Outcome, call: Call, out: Path) -> dict[str, Any]:
    """Write everything of an experiment and return its document.

    Raises:
        BlockFlowError: NO_SPACE, or INVALID_REQUEST where nothing can be written at ``out``.
    """
    name, stem = outcome.experiment.name, outcome.experiment.stem(call.settings)
    with disk(out):
        out.mkdir(parents=True, exist_ok=True)
        _forget(stem, out)
        files = [f"{stem}.jsonl", f"{stem}.csv"] if outcome.figures else []
        if files:
            path = out / files[0]
            ResultFile(path, f"thesis-{name}", call.command).write(outcome.figures, call.machine)
            write_csv(out / files[1], *figure_rows(outcome.figures))
        for data in outcome.findings.data:
            files.append(f"{stem}-{data.stem}.csv")
            write_csv(out / files[-1], data.heads, data.rows)
        pictures = []
        for plot in outcome.findings.plots:
            files.append(f"{stem}-{plot.stem}.png")
            save_page(plot.page, out / files[-1])
            pictures.append({"title": plot.title, "file": files[-1]})
        document = make_document(outcome, call, files, pictures)
        write_json(out / document_name(stem), document)
    return document


def make_document(
    outcome: Outcome,
    call: Call,
    files: Sequence[str] = (),
    pictures: Sequence[Mapping[str, str]] = (),
) -> dict[str, Any]:
    """Everything that the report says of an experiment, as plain JSON."""
    experiment, findings, steady = outcome.experiment, outcome.findings, outcome.steadiness
    tables = [
        {"title": g.title, "heads": list(g.heads), "rows": [list(r) for r in g.rows if r]}
        for g in findings.tables
    ]
    return {
        "format": FORMAT,
        "name": experiment.name,
        "variant": experiment.variant(call.settings),
        "of": list(experiment.of),
        "title": experiment.title,
        "state": str(outcome.state),
        "partial": outcome.error is not None,
        "says": findings.says,
        "notes": list(findings.notes),
        "skipped": findings.skipped,
        "error": None if outcome.error is None else outcome.error.to_dict(),
        "seconds": round(outcome.seconds, 1),
        "fixed_work": "" if steady is None else steady.sentence(),
        "settings": asdict(call.settings),
        "command": call.command,
        "date": datetime.now(UTC).date().isoformat(),  # for people who ask how old a figure is
        "machine": dict(call.machine),
        "tables": tables,
        "pictures": [dict(p) for p in pictures],
        "files": list(files),
    }


def figure_rows(figures: Iterable[Figure]) -> tuple[tuple[str, ...], list[list[Any]]]:
    """Heads and rows of a table of figures: a column per field and per label."""
    found = list(figures)
    labels = tuple(dict.fromkeys(label for f in found for label in f.labels))
    rows = [
        [
            *("" if (v := getattr(f, c)) is None else v for c in _COLUMNS),
            *(f.labels.get(label, "") for label in labels),
        ]
        for f in found
    ]
    return (*_COLUMNS, *labels), rows


def write_csv(path: Path, heads: Sequence[str], rows: Iterable[Sequence[Any]]) -> None:
    """A header and a line per row."""
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(heads)
        writer.writerows(rows)


def read_documents(out: Path, names: Iterable[str]) -> list[dict[str, Any]]:
    """The documents that lie in a folder, of this call or of earlier ones; broken ones are not.

    No experiment's name begins with another one's and a hyphen: what does is a variant of it.
    """
    paths = [
        path
        for name in names
        for path in (out / document_name(name), *sorted(out.glob(document_name(f"{name}-*"))))
    ]
    return [document for path in paths if (document := _read(path)) is not None]


def title_of(document: Mapping[str, Any], what: str) -> str:
    """A document's ``name`` or ``title``, with the variant that it is of."""
    more = document.get("variant", "")
    return f"{document[what]} ({more})" if more else str(document[what])


def _read(path: Path) -> dict[str, Any] | None:
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return None
    if not isinstance(document, dict) or document.get("format") != FORMAT:
        return None
    return document


def _forget(stem: str, out: Path) -> None:
    """Remove what an earlier run of the experiment has left: figures of two runs do not mix."""
    earlier = _read(out / document_name(stem))
    for file in () if earlier is None else earlier.get("files", ()):
        if isinstance(file, str) and Path(file).name == file and file.startswith(stem):
            (out / file).unlink(missing_ok=True)
    (out / document_name(stem)).unlink(missing_ok=True)
