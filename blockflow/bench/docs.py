"""Writes docs/performance.md from its template and the stored results.

``docs/performance.in.md`` holds the prose. In it, a line ``<!-- results: TABLE -->`` becomes a
table of ``docs/results/*.jsonl`` with a line that says how, where and when it was measured, and a
line ``<!-- image: NAME | what it shows -->`` becomes that picture of ``docs/img``. What has no
results yet says so, with the command that makes them.

``python -m blockflow.bench.docs --take results`` first copies what the benchmarks have written to
that folder and draws its pictures.
"""

from __future__ import annotations

import argparse
import re
import shutil
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from blockflow.bench import hop_figures, pipeline_figures
from blockflow.bench.batching import grids as batching
from blockflow.bench.calibration import steadiness_of
from blockflow.bench.demo_grids import demo_memory_grid, demo_task_grid
from blockflow.bench.grid import Grid
from blockflow.bench.plots import PLOTS, draw_all
from blockflow.bench.results import Figure, ResultFile

PAGE, TEMPLATE = "performance.md", "performance.in.md"
NOTICE = "<!-- Made from performance.in.md and results/ by python -m blockflow.bench.docs. -->"
_PLACE = re.compile(r"^<!-- (results|image): ([\w.-]+)(?: \| (.*))? -->$")


@dataclass(frozen=True, slots=True)
class Table:
    """A table of the document: which result file it shows and what makes it."""

    results: str
    command: str
    make: Callable[[Sequence[Figure]], Grid]


TABLES: Mapping[str, Table] = {
    "hops.time": Table("hops", "make bench-hops", hop_figures.time_grid),
    "hops.check": Table("hops", "make bench-hops", hop_figures.check_grid),
    "hops.legs": Table("hops", "make bench-hops", hop_figures.leg_grid),
    "hops.aims": Table("hops", "make bench-hops", hop_figures.aim_grid),
    "pipeline.latency": Table("pipeline", "make bench-pipeline", pipeline_figures.latency_grid),
    "pipeline.throughput": Table(
        "pipeline", "make bench-pipeline", pipeline_figures.throughput_grid
    ),
    "pipeline.cost": Table("pipeline", "make bench-pipeline", pipeline_figures.cost_grid),
    "pipeline.missing": Table("pipeline", "make bench-pipeline", pipeline_figures.missing_grid),
    "pipeline.aims": Table("pipeline", "make bench-pipeline", pipeline_figures.aim_grid),
    "bench.latency": Table("bench", "make bench", pipeline_figures.latency_grid),
    "bench.start": Table("bench", "make bench", pipeline_figures.start_grid),
    "batching.lbci": Table("batching", "make bench-batching", batching.lbci_grid),
    "batching.lbci-ratios": Table("batching", "make bench-batching", batching.lbci_ratio_grid),
    "batching.sizes": Table("batching", "make bench-batching", batching.size_grid),
    "batching.dvabatch": Table("batching", "make bench-batching", batching.dvabatch_grid),
    "batching.dvabatch-ratios": Table(
        "batching", "make bench-batching", batching.dvabatch_ratio_grid
    ),
    "batching.peaks": Table("batching", "make bench-batching", batching.peak_grid),
    "batching.shared": Table("batching", "make bench-batching", batching.shared_grid),
    "batching.cost": Table("batching", "make bench-batching", batching.cost_grid),
    "batching.aims": Table("batching", "make bench-batching", batching.aim_grid),
    "batching.notes": Table("batching", "make bench-batching", batching.note_grid),
    "demo.tasks": Table("demo", "make demo", demo_task_grid),
    "demo.memory": Table("demo", "make demo", demo_memory_grid),
}
"""A further benchmark adds its tables here."""


@dataclass(frozen=True, slots=True)
class Stored:
    """One result file: its figures, and where and when they were measured."""

    figures: Sequence[Figure]
    machine: Mapping[str, Any]
    date: str = ""
    command: str = ""

    @classmethod
    def read(cls, path: Path) -> Stored | None:
        """None when there is no such file, or nothing in it."""
        if not path.exists():
            return None
        lines = ResultFile(path, path.stem).read()
        if not lines:
            return None
        found = [Figure.from_dict(line) for line in lines]
        head = lines[0]
        return cls(found, head["machine"], head.get("date", ""), head.get("command", ""))

    def provenance(self, usual: str) -> str:
        """How, where and when, in a sentence; ``usual`` is the command where none was stored."""
        m = self.machine
        where = [
            str(m.get("cpu", "unknown CPU")),
            f"{m.get('cores', '?')} cores",
            f"{m.get('memory_gib', '?')} GiB",
            f"Linux {m.get('kernel', '?')}",
            f"Python {m.get('python', '?')}",
        ]
        versions = [f"{p} {m[p]}" for p in _PACKAGES if m.get(p)]
        how = ", ".join(filter(None, (f"`{self.command or usual}`", self.date)))
        text = f"{how}; {', '.join(where + versions)}."
        steady = steadiness_of(self.figures)
        return text if steady is None else f"{text} {steady.sentence().capitalize()}."


_PACKAGES = ("torch", "pyzmq", "onnxruntime", "openvino")


def render(template: str, stored: Mapping[str, Stored], images: frozenset[str]) -> str:
    """The page's text.

    Args:
        template: with placeholders.
        stored: results by the name of their file, without suffix.
        images: names of the pictures that there are.

    Raises:
        ValueError: the template names a table or a picture that nobody makes.
    """
    out = [NOTICE, ""]
    for line in template.splitlines():
        match = _PLACE.match(line)
        if match is None:
            out.append(line)
            continue
        kind, name, text = match.groups()
        out += _image(name, text or "", images) if kind == "image" else _table(name, stored)
    # A picture that is not there leaves its empty lines behind.
    return re.sub(r"\n{3,}", "\n\n", "\n".join(out)) + "\n"


def _image(name: str, text: str, images: frozenset[str]) -> list[str]:
    if name not in PLOTS:
        raise ValueError(f"nobody draws {name!r}; known: {', '.join(PLOTS)}")
    return [f"![{text}](img/{name})"] if name in images else []


def _table(name: str, stored: Mapping[str, Stored]) -> list[str]:
    table = TABLES.get(name)
    if table is None:
        raise ValueError(f"nobody makes table {name!r}; known: {', '.join(TABLES)}")
    results = stored.get(table.results)
    grid = None if results is None else table.make(results.figures)
    if results is None or grid is None:
        return [f"*No stored results yet: `{table.command}`.*"]
    if not grid.rows:
        return []
    return [grid.markdown(), "", f"<sub>{results.provenance(table.command)}</sub>"]


def read_all(docs: Path) -> tuple[dict[str, Stored], frozenset[str]]:
    """What ``docs/results`` and ``docs/img`` hold."""
    stored = {}
    for name in dict.fromkeys(t.results for t in TABLES.values()):
        found = Stored.read(docs / "results" / f"{name}.jsonl")
        if found is not None:
            stored[name] = found
    return stored, frozenset(p.name for p in (docs / "img").glob("*.png"))


def take(results: Path, docs: Path) -> list[Path]:
    """Copy the result files that the document uses, and draw their pictures."""
    (docs / "results").mkdir(parents=True, exist_ok=True)
    taken = []
    for name in dict.fromkeys(t.results for t in TABLES.values()):
        source = results / f"{name}.jsonl"
        if source.exists():
            target = docs / "results" / source.name
            shutil.copyfile(source, target)
            taken.append(target)
    return [*taken, *draw_all(docs / "results", docs / "img")]


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m blockflow.bench.docs", description=__doc__)
    parser.add_argument("--docs", type=Path, default=Path("docs"), help="folder of the documents")
    parser.add_argument("--take", type=Path, help="folder of new results to store and draw first")
    args = parser.parse_args(argv)
    console = Console()
    if args.take is not None:
        for path in take(args.take, args.docs):
            console.print(str(path), highlight=False)
    template = (args.docs / TEMPLATE).read_text(encoding="utf-8")
    page = args.docs / PAGE
    page.write_text(render(template, *read_all(args.docs)), encoding="utf-8")
    console.print(str(page), highlight=False)
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
