"""``blockflow bench thesis``: the thesis's experiments on this machine, one after the other."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.markup import escape
from rich.progress import TimeElapsedColumn
from rich.table import Table

from blockflow.bench.canvas import new_page
from blockflow.bench.contenders import ANY_ROWS
from blockflow.bench.gpu import find_device
from blockflow.bench.interrupts import interruptible
from blockflow.bench.results import fingerprint
from blockflow.bench.thesis.beside import THESIS_MODEL
from blockflow.bench.thesis.experiment import (
    CPU,
    ENGINE,
    MACHINE,
    THESIS,
    Advance,
    Experiment,
    Settings,
)
from blockflow.bench.thesis.experiments import EXPERIMENTS
from blockflow.bench.thesis.outcome import Call, Outcome, State
from blockflow.bench.thesis.report import HTML, MARKDOWN, write_report
from blockflow.bench.thesis.run import Session, choose
from blockflow.cli.exits import ExitCode, exit_code
from blockflow.cli.options import Json, bar, print_json
from blockflow.core.errors import BlockFlowError, RequestError, SystemError_
from blockflow.repository.zoo.catalog import ZOO

_AUTO = "auto"
_QUICK_MODEL = "resnet18"


class Constants(StrEnum):
    """Where calculated experiments take their constants from."""

    MACHINE = MACHINE
    THESIS = THESIS


def thesis(
    only: Annotated[
        list[str] | None, typer.Option(help="NAME of an experiment; repeat it for several.")
    ] = None,
    list_: Annotated[bool, typer.Option("--list", help="Show the experiments and stop.")] = False,
    quick: Annotated[
        bool, typer.Option("--quick", help="Is everything sound? Few rounds of a small model.")
    ] = False,
    model: Annotated[
        str, typer.Option(help=f"Of the zoo. Default: {THESIS_MODEL}; --quick: {_QUICK_MODEL}.")
    ] = "",
    engine: Annotated[str, typer.Option(help=f"One of {', '.join(ANY_ROWS)}.")] = ENGINE,
    device: Annotated[
        str, typer.Option(help="cpu, cuda:N, or auto: the first GPU that can be shared.")
    ] = _AUTO,
    constants: Annotated[
        Constants, typer.Option(help="Of calculated experiments: measured, or the thesis's own.")
    ] = Constants.MACHINE,
    out: Annotated[
        Path | None,
        typer.Option(help="Folder of data, plots and report. Default: results/thesis[-quick]."),
    ] = None,
    as_json: Json = False,
) -> None:
    """Run the thesis's experiments here, and show our figures beside the thesis's."""
    chosen = choose(EXPERIMENTS, only or [])
    settings = Settings(
        quick,
        _known(model or (_QUICK_MODEL if quick else THESIS_MODEL), _models(), "--model"),
        _known(engine, ANY_ROWS, "--engine"),
        _device(device),
        str(constants),
    )
    console = Console(stderr=as_json, highlight=False)
    if list_:
        _list(chosen, settings, console, as_json)
        return
    new_page(1, 1)  # without matplotlib this says so now, not after the measurements
    folder = out or Path(f"results/thesis{'-quick' * quick}")
    call = Call(settings, shlex.join(["blockflow", *sys.argv[1:]]), fingerprint())
    with interruptible(), _Screen(console) as screen:
        session = Session(chosen, call, folder, screen)
        try:
            session.run()
        except KeyboardInterrupt:  # between two experiments
            session.interrupted = True
    status = _status(session)
    try:
        write_report(folder, [e.name for e in EXPERIMENTS])
        console.print(escape(f"Report: {folder / MARKDOWN}, {folder / HTML}"))
    except BlockFlowError as exc:
        console.print(escape(f"no report: {exc}"))
        status = status or exit_code(exc)
    if as_json:
        print_json({"command": call.command, "experiments": session.documents})
    if session.interrupted:
        console.print("Interrupted. What was started was stopped; what was found is kept.")
    for outcome in session.failed:
        console.print(f"[bold]{outcome.experiment.name}[/] {escape(outcome.findings.says)}")
    if status:
        raise typer.Exit(status)


def _status(session: Session) -> int:
    """Of the first error; 5 where an experiment ran and found something wrong."""
    if session.interrupted:
        return ExitCode.INTERRUPTED
    errors = [o.error for o in session.failed if o.error is not None]
    if errors:
        return exit_code(errors[0])
    return ExitCode.FAILED if session.failed else ExitCode.OK


def _models() -> list[str]:
    """Those with cuts and an input of floats, which is what the experiments make."""
    return [name for name, model in ZOO.items() if model.cuts and model.input.dtype == "float32"]


def _known(value: str, names: Sequence[str], option: str) -> str:
    if value not in names:
        raise RequestError(
            "INVALID_REQUEST",
            f"{value!r} is not one of {', '.join(names)}",
            where=option,
        )
    return value


def _device(wanted: str) -> str:
    """The device's name as topologies say it.

    Raises:
        BlockFlowError: it is no device, or there is no GPU here whose memory can be shared.
    """
    if wanted == _AUTO:
        with suppress(SystemError_):
            return _device("cuda:0")
        return CPU
    kind, _, number = wanted.partition(":")
    if kind == "cuda" and number.isdecimal():
        wanted = f"cuda:{int(number)}"
        find_device(wanted).close()
    elif wanted != CPU:
        raise RequestError("INVALID_REQUEST", f"{wanted!r} is no device", where="--device")
    return wanted


def _list(chosen: Sequence[Experiment], settings: Settings, console: Console, json: bool) -> None:
    """Names, what they reproduce, and why one would not run here."""
    reasons = {
        e.name: next((r for need in e.needs if (r := need(settings)) is not None), "")
        for e in chosen
    }
    if json:
        print_json(
            {
                "experiments": [
                    {
                        "name": e.name,
                        "of": list(e.of),
                        "title": e.title,
                        "skipped": reasons[e.name] or None,
                    }
                    for e in chosen
                ]
            }
        )
        return
    table = Table(title="The thesis's experiments", title_justify="left", box=SIMPLE_HEAD)
    table.add_column("name", no_wrap=True)
    for head in ("of", "experiment", "not run here"):
        table.add_column(head)
    for e in chosen:
        table.add_row(e.name, ", ".join(e.of), e.title, reasons[e.name])
    console.print(table)


class _Screen:
    """Two bars where that is a terminal, for all experiments and for what is being done; tables."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._bar = bar(TimeElapsedColumn(), console=console)
        self._whole = self._bar.add_task("starting", total=None)

    def __enter__(self) -> _Screen:
        self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.stop()

    def begins(self, experiment: Experiment, number: int, count: int) -> None:
        self._bar.update(
            self._whole,
            description=f"{number} of {count}: {experiment.name}",
            total=count,
            completed=number - 1,
        )
        of = ", ".join(experiment.of)
        line = f"{number} of {count}: {experiment.name}: {experiment.title} ({of})"
        self._console.print(f"[bold]{escape(line)}[/]")

    @contextmanager
    def step(self, what: str, parts: int | None) -> Iterator[Advance]:
        task = self._bar.add_task(what, total=parts)
        try:
            yield lambda: self._bar.advance(task)
        finally:
            self._bar.remove_task(task)

    def ended(self, outcome: Outcome) -> None:
        for grid in outcome.findings.tables:
            self._console.print(grid.rich())
        for note in outcome.findings.notes:
            self._console.print(escape(note))
        if outcome.steadiness is not None:
            self._console.print(escape(outcome.steadiness.sentence()))
        mark = {State.DONE: "", State.SKIPPED: "", State.FAILED: "[bold red]failed[/] "}
        self._console.print(f"{mark[outcome.state]}=> {escape(outcome.findings.says)}\n")
