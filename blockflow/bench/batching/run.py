"""``make bench-batching``: the experiments one after the other, in one running system.

Every arm of an experiment meets the same queries, in turns, in real workers: the policies are
changed in place between the visits. Each experiment's figures are written as soon as it is done.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from rich.console import Console
from rich.progress import Progress

from blockflow.bench.batching import (
    cost,
    diversity,
    grids,
    lbci,
    reason_grids,
    reasons,
    several,
    several_figures,
    shared,
)
from blockflow.bench.batching.blocks import Profiles, export_apart, folder_of, profile
from blockflow.bench.batching.ladder import Ladder
from blockflow.bench.batching.plan import (
    COST,
    EXPERIMENTS,
    FULL,
    HEADS,
    LARGEST,
    LBCI,
    LOAD,
    QUICK,
    REASONS,
    SEVERAL,
    SHARED,
    TINY,
    Plan,
    Recipe,
)
from blockflow.bench.batching.rig import Rig
from blockflow.bench.batching.steady import Steady
from blockflow.bench.calibration import (
    Steadiness,
    calibrate,
    calibration_figures,
    compare,
    steadiness_of,
)
from blockflow.bench.grid import Grid
from blockflow.bench.interrupts import orderly
from blockflow.bench.options import some_of
from blockflow.bench.results import (
    Figure,
    ResultFile,
    fingerprint,
    kept_runs,
    make_command,
    same_machine,
)
from blockflow.client import Client
from blockflow.control.settings import ControlSettings
from blockflow.control.system import System

PLANS: Mapping[str, Plan] = {"full": FULL, "quick": QUICK, "tiny": TINY}
GRIDS = (
    grids.lbci_grid,
    grids.lbci_ratio_grid,
    grids.closed_grid,
    grids.size_grid,
    grids.delay_grid,
    grids.dvabatch_grid,
    grids.dvabatch_ratio_grid,
    grids.peak_grid,
    grids.shared_grid,
    grids.heads_grid,
    several_figures.several_grid,
    grids.cost_grid,
    grids.served_grid,
    reason_grids.row_grid,
    reason_grids.gain_grid,
    reason_grids.peak_grid,
    reason_grids.split_grid,
    reason_grids.test_grid,
    grids.aim_grid,
)
_LBCI_BATCH = 32
_SPARE_STRETCH = 10
SETTINGS = ControlSettings(
    rest_port=0,
    client_port=0,
    max_inflight=480,
    max_inflight_per_client=480,
    adaptive_limit=False,
    dispatcher_arena_bytes=2**30,
)
"""Queues are what is compared: room for what a serial one gathers above its capacity, and no limit
that would turn away what a static batch waits for."""


class Bench:
    """One run."""

    def __init__(self, plan: Plan, rig: Rig) -> None:
        self._plan = plan
        self._rig = rig
        self._profiles: dict[str, Profiles] = {}

    def run(self, experiment: str) -> list[Figure]:
        """One experiment's figures, and how many of its visits were disturbed."""
        self._rig.steady.take()
        found = self._measure(experiment)
        tally = self._rig.steady.take()
        return found + (tally.figures(experiment) if tally.visits else [])

    def _measure(self, experiment: str) -> list[Figure]:
        plan = self._plan
        if experiment == LBCI:
            return lbci.measure(self._ladder(experiment, plan.lbci, _LBCI_BATCH, LARGEST))
        if experiment in (SHARED, HEADS):
            return shared.measure(plan, self._rig, experiment)
        if experiment == SEVERAL:
            return several.measure(plan, self._rig)
        if experiment == COST:
            one = plan.diversities[LOAD]
            return cost.measure(self._ladder(COST, one.recipe, one.bs_max), plan.decisions)
        if experiment == REASONS:
            return self._reasons()
        one = plan.diversities[experiment]
        ladder = self._ladder(experiment, one.recipe, one.bs_max, lengths=one.lengths)
        return diversity.measure(ladder, one)

    def _reasons(self) -> list[Figure]:
        plan, rig = self._plan, self._rig
        # Those of the last run are what its figures are to be explained by.
        measured = {
            name: profile(rig.folder, one.recipe, plan.effort, rig.progress).in_turn
            for name, one in plan.diversities.items()
        }
        with rig.step("reasons: in virtual time", reasons.steps(measured, plan)) as advance:
            return reasons.measure(measured, plan, advance)

    def _ladder(
        self, name: str, recipe: Recipe, batch: int, max_rows: int = 32, lengths: str = ""
    ) -> Ladder:
        rig, plan = self._rig, self._plan
        if recipe.name not in self._profiles:
            self._profiles[recipe.name] = profile(
                rig.folder, recipe, plan.effort, rig.progress, again=plan.profile_again
            )
        measured = self._profiles[recipe.name]
        return Ladder(rig, plan, name, recipe, measured, batch, max_rows, lengths)


class Book:
    """The result file. After every experiment it holds what has been measured until then, with how
    steady the machine was, and of former runs on this machine what has not been measured again yet.

    Args:
        command: what a person types to measure the same.
        steady: whether the machine's pace matters to the figures.
    """

    def __init__(self, path: Path, command: str, *, steady: bool = True) -> None:
        self._out = ResultFile(path, "batching", command)
        self._machine = fingerprint()  # now: what has been loaded is what is measured
        self._former = [r for r in self._out.runs() if same_machine(r.machine, self._machine)]
        self._found: list[Figure] = []
        self._done: list[str] = []
        self._begin = calibrate() if steady else []

    def add(self, experiment: str, found: Sequence[Figure]) -> Steadiness | None:
        """Store an experiment's figures; how steady the machine was until now."""
        self._found += found
        self._done.append(experiment)
        pace = calibration_figures(compare(self._begin, calibrate())) if self._begin else []
        kept = kept_runs(self._former, lambda f: f.labels.get("experiment"), self._done)
        self._out.write([*self._found, *pace], self._machine, kept)
        return steadiness_of(pace)


def parse_args(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m blockflow.bench.batching", description=__doc__)
    extent = parser.add_mutually_exclusive_group()
    extent.add_argument("--quick", action="store_true", help="eight minutes: a first look")
    extent.add_argument("--tiny", action="store_true", help="small models: is everything sound?")
    known = (*EXPERIMENTS, REASONS)
    parser.add_argument("--only", type=some_of(known), help=f"comma-separated: {', '.join(known)}")
    parser.add_argument(
        "--spare",
        type=float,
        metavar="SECONDS",
        help="for further visits at each load whose ratios decide nothing yet",
    )
    parser.add_argument("--json", type=Path, help="file for the figures")
    parser.add_argument(
        "--cache",
        type=Path,
        default=Path(".cache/bench-batching"),
        help="folder that keeps blocks and profiles from run to run",
    )
    args = parser.parse_args(argv)
    args.extent = "quick" if args.quick else "tiny" if args.tiny else "full"
    args.experiments = args.only or list(EXPERIMENTS)
    return args


@orderly
def main(arguments: list[str]) -> int:
    """Run the benchmark, print its tables, write its figures."""
    args = parse_args(arguments)
    plan = PLANS[args.extent]
    if args.spare is not None:
        plan = replace(plan, stretch=max(plan.stretch, _SPARE_STRETCH), spare_seconds=args.spare)
    console = Console()
    # A short run must not take the place of a real one.
    suffix = "" if args.extent == "full" else f"-{args.extent}"
    stem = REASONS if args.experiments == [REASONS] else "batching"
    path: Path = args.json or Path(f"results/{stem}{suffix}.jsonl")
    recipes = plan.recipes(args.experiments)
    folder = folder_of(args.cache, plan.recipes(EXPERIMENTS))
    folder.mkdir(parents=True, exist_ok=True)
    # Virtual time does not depend on the machine's.
    virtual = args.experiments == [REASONS]
    book = Book(path, make_command("bench-batching", arguments), steady=not virtual)
    with (
        tempfile.TemporaryDirectory(prefix="bf-bench-") as state,
        Progress(console=console) as progress,
    ):
        step = progress.add_task("exporting blocks", total=None)
        export_apart(folder, recipes)
        progress.update(step, description="starting the system")
        with (
            System(SETTINGS, repository=folder, state_dir=state) as system,
            Client(system.client_endpoint) as client,
        ):
            progress.remove_task(step)
            bench = Bench(plan, Rig(folder, system, client, progress, Steady(plan.patience)))
            failed = measure_all(args.experiments, bench.run, book, console)
    for name in failed:
        again = make_command("bench-batching", [*_without_only(arguments), "--only", name])
        console.print(f"{name} was not measured; {again} measures it", highlight=False)
    return 1 if failed else 0


def measure_all(
    experiments: Sequence[str],
    measure: Callable[[str], list[Figure]],
    book: Book,
    console: Console,
) -> list[str]:
    """Measure, store and show one after the other; those that failed. They end nothing: the others
    take an hour, and need none of them."""
    failed: list[str] = []
    steady: Steadiness | None = None
    for name in experiments:
        try:
            new = measure(name)
        except Exception:
            console.print_exception()
            failed.append(name)
            continue
        _print(console, new)  # before what may fail for want of space
        steady = book.add(name, new)
    if steady is not None:
        console.print(steady.sentence(), highlight=False)
    return failed


def _without_only(arguments: Sequence[str]) -> list[str]:
    """Of a command line, all but which experiments were to be run."""
    found: list[str] = []
    left = iter(arguments)
    for word in left:
        if word == "--only":
            next(left, None)
        elif not word.startswith("--only="):
            found.append(word)
    return found


def _print(console: Console, found: Sequence[Figure]) -> None:
    tables: list[Grid] = [make(found) for make in GRIDS]
    for grid in tables:
        for part in grid.split("model") if "model" in grid.heads and grid.rows else [grid]:
            if part.rows:
                console.print(part.rich())
    for line in grids.remarks(found):
        console.print(line, highlight=False)
