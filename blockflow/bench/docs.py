"""Writes what the documents say of stored results: whole pages, and the table of promises.

Each ``docs/PAGE.in.md`` holds the prose of ``docs/PAGE.md``. In it, a line
``<!-- results: TABLE -->`` becomes a table of ``docs/results/*.jsonl`` with a line that says how,
where and when it was measured, and a line ``<!-- image: NAME | what it shows -->`` becomes that
picture of ``docs/img``. ``<!-- verdicts: TABLE | TEXT -->`` becomes a row that counts what that
table says of aims. ``<!-- runs: FILE -->`` becomes the list of that file's runs where there are
several, and its tables name them by their numbers. What has no results yet says so, with the
command that makes them. Lines between ``<!-- if: FILE -->`` and ``<!-- end -->`` are there only
when that result file is, those after ``<!-- unless: FILE -->`` only when it is not.
``<!-- thesis -->`` becomes the stored experiments of the thesis.

The table of promises is written into docs/reliability.md, and what ``make bench`` has found into
README.md beside that folder, each between two marks.

``python -m blockflow.bench.docs --take results`` first copies what the benchmarks have written to
that folder and draws its pictures.
"""

from __future__ import annotations

import argparse
import re
import shutil
import sys
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console

from blockflow.bench import thesis_page
from blockflow.bench.calibration import steadiness_of
from blockflow.bench.doc_tables import TABLES, Make, Table
from blockflow.bench.plots import PLOTS, draw_all
from blockflow.bench.readme import COSTS, SAVINGS, costs, savings
from blockflow.bench.readme import PAGE as FRONT_PAGE
from blockflow.bench.reliability.page import PAGE as PROMISE_PAGE
from blockflow.bench.reliability.page import PROMISE_PASSAGE, promise_table
from blockflow.bench.reliability.promises import COMMANDS
from blockflow.bench.results import Figure, ResultFile, Run, revision_text
from blockflow.bench.statistics import Verdict

PAGE, TEMPLATE = ".md", ".in.md"
NOTICE = "<!-- Made from {} and results/ by python -m blockflow.bench.docs. -->"
BENCH, BATCHING = "bench", "batching"
VERDICTS = (Verdict.MET, Verdict.NOISE, Verdict.MISSED)
"""The columns of verdicts."""
THESIS = "<!-- thesis -->"
_PLACE = re.compile(r"^<!-- (results|image|verdicts|runs): ([\w.-]+)(?: \| (.*))? -->$")
_RUNS = re.compile(r"^<!-- runs: ([\w.-]+) -->$", re.MULTILINE)
_IF = re.compile(r"^<!-- (if|unless): ([\w.-]+) -->$")
_END = "<!-- end -->"


@dataclass(frozen=True, slots=True)
class Stored:
    """One result file: its runs, mostly a single one."""

    runs: Sequence[Run]

    @classmethod
    def read(cls, path: Path) -> Stored | None:
        """None when there is no such file, or nothing in it."""
        runs = ResultFile(path, path.stem).runs()
        return cls(runs) if runs else None

    @property
    def figures(self) -> list[Figure]:
        return [f for run in self.runs for f in run.figures]

    def shown_by(self, make: Make) -> list[int]:
        """Which runs a table shows something of; all where it shows nothing of any."""
        each = range(len(self.runs))
        return [i for i in each if make(self.runs[i].figures).rows] or list(each)

    def provenance(self, usual: str, make: Make | None = None) -> str:
        """How, where and when, in a sentence per run.

        Args:
            usual: the command where none was stored.
            make: of a table: only the runs that it shows something of; None for all.
        """
        shown = self.runs if make is None else [self.runs[i] for i in self.shown_by(make)]
        return " ".join(_sentence(run, usual) for run in shown)


def _sentence(run: Run, usual: str) -> str:
    m = run.machine
    where = [
        str(m.get("cpu", "unknown CPU")),
        f"{m.get('cores', '?')} cores",
        f"{m.get('memory_gib', '?')} GiB",
        f"Linux {m.get('kernel', '?')}",
        f"Python {m.get('python', '?')}",
    ]
    if m.get("gpu"):
        where.insert(0, f"{m['gpu']} ({m.get('gpu_gib', '?')} GiB)")
    versions = [f"{p} {m[p]}" for p in _PACKAGES if m.get(p)]
    how = ", ".join(filter(None, (f"`{run.command or usual}`", run.date, revision_text(m))))
    text = f"{how}; {', '.join(where + versions)}."
    steady = steadiness_of(run.figures)
    return text if steady is None else f"{text} {steady.sentence().capitalize()}."


_PACKAGES = ("torch", "pyzmq", "onnxruntime", "openvino", "mlcommons-loadgen")


def render(
    template: str,
    stored: Mapping[str, Stored],
    images: frozenset[str],
    thesis: Sequence[str] = (),
) -> str:
    """The page's text.

    Args:
        stored: results by the name of their file, without suffix.
        images: names of the pictures that there are.
        thesis: lines about the thesis's experiments; none where nothing of them is stored.

    Raises:
        ValueError: the template names a table, a picture or a file that nobody makes, or a
            condition does not end.
    """
    out: list[str] = []
    asked, shown = "", True
    listed = set(_RUNS.findall(template))
    for line in template.splitlines():
        match, condition = _PLACE.match(line), _IF.match(line)
        if condition is not None:
            word, asked = condition.groups()
            there = bool(thesis) if asked == thesis_page.FOLDER else _is_stored(asked, stored)
            shown = there == (word == "if")
        elif line == _END:
            asked, shown = "", True
        elif not shown:
            continue
        elif line == THESIS:
            out += thesis
        elif match is None:
            out.append(line)
        else:
            kind, name, text = match.groups()
            if kind == "image":
                out += _image(name, text or "", images)
            elif kind == "runs":
                out += _runs(name, stored)
            elif kind == "verdicts":
                out.append(_verdicts(name, text or "", stored))
            else:
                out += _table(name, stored, listed)
    if asked:
        raise ValueError(f"the lines for {asked!r} have no end: {_END}")
    # A picture that is not there leaves its empty lines behind.
    return re.sub(r"\n{3,}", "\n\n", "\n".join(out)) + "\n"


def made_pages(
    docs: Path,
    stored: Mapping[str, Stored],
    images: frozenset[str],
    thesis: Sequence[str] = (),
) -> dict[Path, str]:
    """The text of every page that has a template; arguments and errors as :func:`render`."""
    pages = {}
    for template in sorted(docs.glob(f"*{TEMPLATE}")):
        text = render(template.read_text(encoding="utf-8"), stored, images, thesis)
        page = template.with_name(template.name.removesuffix(TEMPLATE) + PAGE)
        pages[page] = f"{NOTICE.format(template.name)}\n\n{text}"
    return pages


def _is_stored(name: str, stored: Mapping[str, Stored]) -> bool:
    if name not in _result_files():
        raise ValueError(f"nobody writes {name!r}; known: {', '.join(_result_files())}")
    return name in stored


def _image(name: str, text: str, images: frozenset[str]) -> list[str]:
    if name not in PLOTS:
        raise ValueError(f"nobody draws {name!r}; known: {', '.join(PLOTS)}")
    return [f"![{text}](img/{name})"] if name in images else []


def _table_of(name: str) -> Table:
    table = TABLES.get(name)
    if table is None:
        raise ValueError(f"nobody makes table {name!r}; known: {', '.join(TABLES)}")
    return table


def _verdicts(name: str, text: str, stored: Mapping[str, Stored]) -> str:
    """A row: ``text``, and how many aims the table calls met, within noise and missed."""
    table = _table_of(name)
    results = stored.get(table.results)
    rows = [] if results is None else table.make(results.figures).rows
    counts = Counter(row[-1] for row in rows)
    return f"| {text} | {' | '.join(str(counts[v]) if rows else '' for v in VERDICTS)} |"


def _runs(name: str, stored: Mapping[str, Stored]) -> list[str]:
    """The list of a file's runs; a single one stands below each table itself."""
    if not _is_stored(name, stored) or len(runs := stored[name].runs) == 1:
        return []
    usual = next(t.command for t in TABLES.values() if t.results == name)
    return ["*Runs:*", "", *(f"{i}. {_sentence(run, usual)}" for i, run in enumerate(runs, 1))]


def _table(name: str, stored: Mapping[str, Stored], listed: Collection[str]) -> list[str]:
    table = _table_of(name)
    results = stored.get(table.results)
    grid = None if results is None else table.make(results.figures)
    if results is None or grid is None:
        return [f"*No stored results yet: `{table.command}`.*"]
    if not grid.rows:
        return []
    if table.results in listed and len(results.runs) > 1:
        numbers = [str(i + 1) for i in results.shown_by(table.make)]
        word = "Run" if len(numbers) == 1 else "Runs"
        found = f"{word} {', '.join(numbers)} of the list at the end of this section."
    else:
        found = results.provenance(table.command, table.make)
    return [grid.markdown(), "", f"<sub>{found}</sub>"]


def _result_files() -> list[str]:
    """The names of all result files that documents use, without suffix."""
    return list(dict.fromkeys([*(t.results for t in TABLES.values()), *COMMANDS]))


def read_all(docs: Path) -> tuple[dict[str, Stored], frozenset[str], list[str]]:
    """What ``docs/results`` and ``docs/img`` hold; the last are the lines of the thesis."""
    stored = {}
    for name in _result_files():
        found = Stored.read(docs / "results" / f"{name}.jsonl")
        if found is not None:
            stored[name] = found
    experiments = thesis_page.read(docs / "results")
    pictures = frozenset(p.name for p in (docs / "img" / thesis_page.FOLDER).glob("*.png"))
    thesis = thesis_page.lines(experiments, pictures) if experiments else []
    return stored, frozenset(p.name for p in (docs / "img").glob("*.png")), thesis


def promises(stored: Mapping[str, Stored]) -> str:
    """The table of promises, with what was measured of each."""
    return promise_table(
        {name: found.figures for name, found in stored.items()},
        {name: found.provenance(COMMANDS.get(name, "")) for name, found in stored.items()},
    )


def front_page(page: str, stored: Mapping[str, Stored]) -> str:
    """README.md with what the stored results say of what a crossing costs and a trunk saves."""
    for passage, name, command, text in (
        (COSTS, BENCH, "bench", costs),
        (SAVINGS, BATCHING, "bench-batching", savings),
    ):
        made = f"*No stored results yet: `make {command}`.*"
        if name in stored:
            runs = stored[name].runs
            # The runs of one sentence may be of several machines.
            cpus = dict.fromkeys(str(run.machine.get("cpu", "unknown CPU")) for run in runs)
            machine = {**runs[-1].machine, "cpu": " and ".join(cpus)}
            made = text([f for run in runs for f in run.figures], machine) or made
        page = passage.fill(page, made)
    return page


def take(results: Path, docs: Path) -> list[Path]:
    """Copy the result files that the documents use, and draw their pictures."""
    (docs / "results").mkdir(parents=True, exist_ok=True)
    taken = []
    for name in _result_files():
        source = results / f"{name}.jsonl"
        if source.exists():
            target = docs / "results" / source.name
            shutil.copyfile(source, target)
            taken.append(target)
    taken += thesis_page.take(results, docs)
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
    stored, images, thesis = read_all(args.docs)
    pages = made_pages(args.docs, stored, images, thesis)
    page = args.docs / PROMISE_PAGE
    if page.exists():
        text = page.read_text(encoding="utf-8")
        pages[page] = PROMISE_PASSAGE.fill(text, promises(stored))
    front = args.docs.absolute().parent / FRONT_PAGE
    if front.exists():
        pages[front] = front_page(front.read_text(encoding="utf-8"), stored)
    for path, text in pages.items():
        path.write_text(text, encoding="utf-8")
        console.print(str(path), highlight=False)
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
