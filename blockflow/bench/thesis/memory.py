"""``make bench-thesis-memory``: the memory of modular and of traditional deployment.

The thesis's comparison (section 4.3, tables 4.5 and 4.6): eight scenarios of tasks in three
classes, three degrees of fusion, 100 and 1000 tasks. What a process takes is measured here, a
worker at a time; the deployments are sums over it. With ``--constants thesis`` it is taken from the
thesis, and the tables come out cell by cell (status 1 if one did not).
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from rich.console import Console
from rich.progress import Progress

from blockflow.bench.canvas import save_page
from blockflow.bench.contenders import ANY_ROWS, Model
from blockflow.bench.interrupts import orderly
from blockflow.bench.mlperf.job import disk
from blockflow.bench.results import Figure, ResultFile, make_command
from blockflow.bench.thesis.memory_figures import (
    draw,
    fusion_note,
    mismatches,
    process_figures,
    process_grid,
    remarks,
    saving_figures,
    saving_grids,
    scenario_grid,
)
from blockflow.bench.thesis.memory_measure import (
    KINDS,
    ROUNDS,
    by_rounds,
    measure,
    occupancy,
    prepared,
)
from blockflow.bench.thesis.memory_model import FULL, Blocks
from blockflow.bench.thesis.memory_tables import TABLES
from blockflow.core.errors import BlockFlowError
from blockflow.repository.zoo.catalog import ZOO

_MACHINE, _THESIS = "machine", "thesis"


def measured(model: str, engine: str, rounds: int, console: Console) -> tuple[list[Figure], str]:
    """From this machine's processes; figures, and how well sums of blocks foretell a fused one."""
    with (
        tempfile.TemporaryDirectory(prefix="bf-memory-") as folder,
        Progress(console=console) as bar,
    ):
        root = Path(folder)
        step = bar.add_task(f"{model}: one worker at a time", total=rounds * len(KINDS))
        chain = prepared(Model(model), engine, root / "blocks")
        samples = measure(chain, rounds, root / "state", lambda: bar.advance(step))
    return concluded(model, samples)


def concluded(model: str, samples: Mapping[Blocks, Sequence[float]]) -> tuple[list[Figure], str]:
    """What :func:`measured` gives, from the memory of this machine's processes."""
    rounds = by_rounds(Model(model), samples)
    figures = [
        *process_figures(occupancy(Model(model), samples), samples),
        *saving_figures(rounds, TABLES.get(model), constants_of_thesis=False),
    ]
    return figures, fusion_note(rounds)


def from_thesis(model: str) -> tuple[list[Figure], str]:
    """From the constants behind the thesis's table of this model."""
    found = TABLES[model].occupancy
    figures = [
        *process_figures(found),
        *saving_figures([found], TABLES[model], constants_of_thesis=True),
    ]
    return figures, fusion_note([found])


def parse_args(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m blockflow.bench.thesis.memory", description=__doc__
    )
    parser.add_argument("--constants", choices=(_MACHINE, _THESIS), default=_MACHINE)
    parser.add_argument("--model", help="of the zoo, in four blocks (default resnet50)")
    parser.add_argument("--engine", choices=ANY_ROWS, default="exported")
    parser.add_argument(
        "--rounds", type=int, default=ROUNDS, help="starts of every kind of process"
    )
    parser.add_argument("--quick", action="store_true", help="a small model once: is it sound?")
    parser.add_argument("--json", help="file for the figures")
    parser.add_argument("--plot", help="file for the picture")
    args = parser.parse_args(argv)
    args.model = args.model or ("resnet18" if args.quick else "resnet50")
    if args.quick:
        args.rounds = 1
    if args.rounds < 1:
        parser.error("--rounds is at least 1")
    if args.constants == _THESIS and args.model not in TABLES:
        parser.error(f"the thesis has tables for {' and '.join(TABLES)}")
    if args.model not in fitting():
        parser.error(f"--model is one with {len(FULL)} blocks: {', '.join(fitting())}")
    return args


def fitting() -> list[str]:
    """Models of the zoo in as many blocks as the thesis's."""
    return [name for name, model in ZOO.items() if len(model.cuts) + 1 == len(FULL)]


@orderly
def main(arguments: list[str]) -> int:
    """Measure or take the constants, print the tables, write figures and picture."""
    args = parse_args(arguments)
    console = Console()
    try:
        if args.constants == _THESIS:
            found, note = from_thesis(args.model)
        else:
            found, note = measured(args.model, args.engine, args.rounds, console)
    except BlockFlowError as error:
        console.print(str(error), highlight=False)
        return 2
    for grid in (process_grid(found), scenario_grid(), *saving_grids(found)):
        console.print(grid.rich())
    for line in (*remarks(found), note):
        console.print(line, highlight=False)
    wrong = mismatches(found)
    for line in wrong:
        console.print(f"not the thesis's: {line}", highlight=False)
    # Neither a quick run nor another model must take the place of the usual one.
    stem = f"results/thesis-memory-{args.model}"
    stem += f"{'-constants' * (args.constants == _THESIS)}{'-quick' * args.quick}"
    path = Path(args.json or f"{stem}.jsonl")
    command = make_command("bench-thesis-memory", arguments)
    try:
        with disk(path, "what was found stands above; name other files with --json and --plot"):
            ResultFile(path, "thesis-memory", command).write(found)
            save_page(draw(found), Path(args.plot or f"{stem}.png"))
    except BlockFlowError as error:
        console.print(str(error), highlight=False)
        return 2
    return 1 if wrong else 0


if __name__ == "__main__":
    raise SystemExit(main())
