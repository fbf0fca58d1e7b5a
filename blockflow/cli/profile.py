"""``blockflow profile``: what a block's batches cost on this machine, and which engine suits it."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import chain as joined
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.markup import escape

from blockflow.bench.interrupts import interruptible
from blockflow.cli.exits import ExitCode
from blockflow.cli.options import Json, bar, close_json, commas, print_json, typed_command
from blockflow.cli.outputs import PLOTS, check_output, writing
from blockflow.core.errors import RequestError

if TYPE_CHECKING:
    from blockflow.bench.profiling.candidates import Candidate
    from blockflow.bench.profiling.plan import Cell
    from blockflow.bench.profiling.run import Measured, Wish
    from blockflow.repository.repository import BlockRepository


def profile(
    context: typer.Context,
    blocks: Annotated[
        list[str] | None, typer.Argument(help="Blocks of the repository; none means all.")
    ] = None,
    repository: Annotated[
        Path, typer.Option("--repository", "-r", help="Where the blocks are.")
    ] = Path("blocks"),
    chain: Annotated[
        str, typer.Option(help="Blocks that run after one another in one process: A,B,C.")
    ] = "",
    task: Annotated[str, typer.Option(help="The chain of a task of --topology.")] = "",
    topology: Annotated[Path, typer.Option(help="Where --task is looked up.")] = Path(
        "topology.json"
    ),
    engines: Annotated[
        str, typer.Option(help="Engines with commas, auto or all; with --choose: all.")
    ] = "",
    precisions: Annotated[
        str, typer.Option(help="fp32, bf16, fp16, int8 or all; with --choose: all.")
    ] = "",
    option: Annotated[
        list[str] | None, typer.Option(help="KEY=VALUE: an engine's option, for all engines.")
    ] = None,
    threads: Annotated[
        str, typer.Option(help="Like 1,2,4 or 1-4; default: 1, 2, 4.. up to the cores.")
    ] = "",
    rows: Annotated[str, typer.Option(help="Default: 1, 2, 4.. up to 32.")] = "",
    lengths: Annotated[
        str, typer.Option(help="Of blocks with a variable dim; default: up to four.")
    ] = "",
    confidence: Annotated[
        float, typer.Option(help="Enough when the median is sure within this share.")
    ] = 0.02,
    seconds: Annotated[float, typer.Option(help="Time per cell and engine at most.")] = 3.0,
    again: Annotated[bool, typer.Option("--again", help="Measure what is there already.")] = False,
    choose: Annotated[
        bool, typer.Option("--choose", help="Record the best engine: what auto means here.")
    ] = False,
    tolerance: Annotated[
        float, typer.Option(help="With --choose: largest error, as a share of the largest output.")
    ] = 1e-2,
    show: Annotated[
        bool, typer.Option("--show", help="Only show what is stored, and whether it holds.")
    ] = False,
    results: Annotated[
        Path | None, typer.Option(help="A file for the figures, one JSON object per line.")
    ] = None,
    plot: Annotated[Path | None, typer.Option(help="A PNG: time per row over rows.")] = None,
    json_: Json = False,
) -> None:
    """Measure latency per block (or chain), threads and rows, and store it beside the block.

    It can be interrupted: every finished cell is stored, and the same command goes on.
    """
    from blockflow.repository.repository import BlockRepository

    store = BlockRepository(repository)
    if show:
        asked = blocks or chain or task or store.names()
        _show(store, _subjects(store, blocks or [], chain, task, topology) if asked else [], json_)
        return
    check_output(results, "--results")
    check_output(plot, "--plot", PLOTS)
    wish = _wish(
        engines, precisions, option, threads, rows, lengths, confidence, seconds, again, choose,
        tolerance,
    )  # fmt: skip
    found = _measure(store, _subjects(store, blocks or [], chain, task, topology), wish, json_)
    if results is not None:
        from blockflow.bench.profiling.report import figures
        from blockflow.bench.results import ResultFile

        # Without --again a repetition would show what this run has stored.
        command = typed_command(context, "again")
        with writing(results):
            ResultFile(results, "profile", command).write(f for m in found for f in figures(m))
    if plot is not None:
        from blockflow.bench.profiling.report import plot as draw

        with writing(plot):
            draw(found, plot)
    if json_:  # at last: a file that cannot be written is an error, and there is one document
        from blockflow.bench.profiling.report import document

        print_json({"profiles": [document(m) for m in found]})


def _wish(
    engines: str,
    precisions: str,
    option: Sequence[str] | None,
    threads: str,
    rows: str,
    lengths: str,
    confidence: float,
    seconds: float,
    again: bool,
    choose: bool,
    tolerance: float,
) -> Wish:
    from blockflow.bench.profiling.candidates import ALL, parse_option
    from blockflow.bench.profiling.plan import Effort
    from blockflow.bench.profiling.run import Wish
    from blockflow.core.engines import AUTO

    named = commas(engines) or [ALL if choose else AUTO]
    wide = choose or ALL in named or named == [AUTO]
    try:
        effort = Effort(confidence=confidence, seconds=seconds)
        if not 0 < tolerance < 1:
            raise ValueError(f"tolerance {tolerance} is not between 0 and 1")
    except ValueError as e:
        raise RequestError("INVALID_REQUEST", str(e)) from None
    return Wish(
        engines=named,
        precisions=commas(precisions) or ([ALL] if wide else ["fp32"]),
        options=dict(parse_option(o) for o in option) if option else None,
        threads=_numbers("--threads", threads),
        rows=_numbers("--rows", rows),
        lengths=_numbers("--lengths", lengths),
        effort=effort,
        again=again,
        choose=choose,
        tolerance=tolerance,
    )


def _subjects(
    store: BlockRepository, blocks: Sequence[str], chain: str, task: str, topology: Path
) -> list[list[str]]:
    """What to measure: each block by itself, or one chain."""
    if sum(bool(x) for x in (blocks, chain, task)) > 1:
        raise RequestError("INVALID_REQUEST", "name blocks, or --chain, or --task")
    if chain:
        members = commas(chain)
        if not members:
            raise RequestError("INVALID_REQUEST", "the chain has no blocks", where="--chain")
        return [members]
    if task:
        return [_path(store, task, topology)]
    names = list(dict.fromkeys(blocks)) or store.names()
    if not names:
        raise RequestError(
            "INVALID_REQUEST",
            "there is no block to profile",
            where=str(store.root),
            hint="blockflow export makes blocks; --repository names another folder",
        )
    return [[n] for n in names]


def _path(store: BlockRepository, task: str, topology: Path) -> list[str]:
    """The stored blocks of a task, in order."""
    from blockflow.control.rest.body import read_update
    from blockflow.core.topology import parse_topology

    parsed = parse_topology(
        read_update(topology), store.info, pinned=lambda n, d: store.info(n, digest=d)
    )
    if task not in parsed.tasks:
        raise RequestError(
            "INVALID_REQUEST",
            f"no task {task!r}",
            where=str(topology),
            hint=f"tasks: {', '.join(parsed.tasks)}",
        )
    return [parsed.blocks[b].artifact for b in parsed.tasks[task].path]


def _measure(
    store: BlockRepository, subjects: Sequence[Sequence[str]], wish: Wish, json_: bool
) -> list[Measured]:
    from blockflow.bench.profiling.run import measure

    console = Console(stderr=json_, highlight=False)
    found: list[Measured] = []
    with _resumable(console), _Progress() as progress:
        for names in subjects:
            progress.subject = "+".join(names)
            measured = measure(store, names, wish, progress)
            found.append(measured)
            with progress.paused():
                _print(console, measured, wish)
    return found


@contextmanager
def _resumable(console: Console) -> Iterator[None]:
    """Ctrl-C and SIGTERM end it with everything stopped on the way, and say how to go on."""
    try:
        with interruptible():
            yield
    except KeyboardInterrupt:
        console.print(
            "Interrupted. What was measured is stored; the same command goes on from there."
        )
        raise typer.Exit(ExitCode.INTERRUPTED) from None


def _print(console: Console, measured: Measured, wish: Wish) -> None:
    from blockflow.bench.profiling.report import (
        choice_table,
        fit_line,
        legend,
        profile_table,
        unmeasured_lines,
    )

    shown = [o for o in measured.outcomes if any(c in o.points for c in measured.cells)]
    if measured.judged:
        shown = [j.outcome for j in measured.judged if j.chosen]
    for outcome in shown:
        points = [outcome.points[c] for c in measured.cells if c in outcome.points]
        reused = f", {outcome.reused} cells from before" if outcome.reused else ""
        title = f"{measured.name}: {outcome.candidate.label}{reused}"
        console.print(profile_table(title, points, wish.effort))
        of = [[part[c] for c in measured.cells if c in part] for part in outcome.parts]
        notes = [legend([*points, *joined.from_iterable(of)], wish.effort)]
        for threads in dict.fromkeys(p.threads for p in points):
            notes.append(fit_line(points, threads))
        for note in filter(None, notes):
            console.print(escape(note))
        for info, part in zip(measured.infos, of, strict=False):
            console.print(profile_table(f"of it {info.name}", part, wish.effort))
    if measured.judged:
        console.print(choice_table(measured.judged, wish.tolerance))
    for line in unmeasured_lines(measured.outcomes):
        console.print(escape(line))
    console.print(escape(measured.steadiness.sentence()))


def _show(store: BlockRepository, subjects: Sequence[Sequence[str]], json_: bool) -> None:
    """Stored profiles; when none of those asked for holds, the reason is the exit status."""
    from blockflow.bench.profiling.stored import problem, stored, stored_chain, stored_tables

    shelves = [stored(store, s[0]) if len(s) == 1 else stored_chain(store, s) for s in subjects]
    found = problem(shelves)
    if json_:
        close_json({"blocks": [s.to_dict() for s in shelves]}, found)
        return
    console = Console(highlight=False)
    for shelf in shelves:
        for piece in stored_tables(shelf):
            console.print(piece)
    if found is not None:
        raise found


class _Progress:
    """A bar on standard error with what is measured and about how long it will take yet."""

    def __init__(self) -> None:
        from rich.progress import TextColumn

        self.subject = ""
        self._bar = bar(TextColumn("{task.fields[left]}"))
        self._task = self._bar.add_task("loading", total=None, left="")
        self._begin = time.monotonic()

    def __enter__(self) -> _Progress:
        self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.stop()

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Tables are printed without the bar in between."""
        self._bar.stop()
        yield
        self._bar.start()

    def start(self, seconds: float) -> None:
        self._begin = time.monotonic()
        self._bar.update(self._task, description=f"{self.subject}: loading", total=seconds or None)

    def step(self, candidate: Candidate, cell: Cell, left_s: float) -> None:
        elapsed = time.monotonic() - self._begin
        length = "" if cell.length is None else f", length {cell.length}"
        what = f"{candidate.label}, {cell.threads} thr., {cell.rows} rows{length}"
        minutes, rest = divmod(round(left_s), 60)
        self._bar.update(
            self._task,
            description=f"{self.subject}: {what}",
            completed=elapsed,
            total=elapsed + left_s,
            left=f"about {minutes}:{rest:02d} left",
        )


def _numbers(what: str, text: str) -> list[int] | None:
    """``1,2,8-10`` -> [1, 2, 8, 9, 10]; nothing -> None."""
    out: list[int] = []
    for part in commas(text):
        first, _, last = part.partition("-")
        if not (first.isdecimal() and (last.isdecimal() or part == first)) or len(part) > 16:
            raise RequestError(
                "INVALID_REQUEST",
                f"{what} {text!r}: {part!r} is no number",
                hint="like 1,2,4 or 1-4",
            )
        low, high = int(first), int(last or first)
        if not 1 <= low <= high <= 1 << 20 or high - low > 1024:
            raise RequestError(
                "INVALID_REQUEST",
                f"{what} {text!r}: {part!r} is not within 1 to {1 << 20}, or too wide a range",
                hint="like 1,2,4 or 1-4",
            )
        out += range(low, high + 1)
    return out or None
