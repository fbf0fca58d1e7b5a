"""``make faultsim``: seeds of virtual days with faults, every invariant looked after at each step.

The exit status is 1 if one was broken; the seed, what had happened before, and the command that
runs just that seed again are printed.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from threading import Lock
from typing import Any

from rich.console import Console
from rich.progress import Progress

from blockflow.bench.faultsim.faults import KINDS
from blockflow.bench.faultsim.ledger import SeedLedger, code_digest, simulated
from blockflow.bench.faultsim.outcome import Found, figures, run_seed
from blockflow.bench.interrupts import INTERRUPTED, orderly
from blockflow.bench.options import count, make_parser, positive, result_path, some_of
from blockflow.bench.results import ResultFile, figure_table, make_command
from blockflow.bench.simulation.farm import spread

_SEEDS, _HOURS = 1000, 24.0
_TRACE_SHOWN = 40
_SHOWN = 5


def replay(found: Found, hours: float, only: str = "") -> str:
    """The command that runs one seed again (``only`` with these kinds of faults)."""
    words = ["--first-seed", str(found.seed), "--seeds", "1", "--hours", f"{hours:g}"]
    return make_command("faultsim", [*words, "--only", only] if only else words)


def run(
    seeds: Sequence[int],
    hours: float,
    processes: int = 1,
    kinds: Sequence[str] = KINDS,
    done: Callable[[Found], None] = lambda one: None,
) -> list[Found]:
    """Run all seeds, in so many processes; ``done`` is told each that has ended."""
    found: dict[int, Found] = {}
    lock = Lock()

    def take(seed: int, answer: dict[str, Any]) -> None:
        with lock:
            found[seed] = Found(**answer)
            done(found[seed])

    count = min(processes, len(seeds))
    if count > 1:
        head = {"hours": hours, "kinds": list(kinds)}
        spread("blockflow.bench.faultsim.child", head, seeds, int, count, take)
    else:
        for seed in seeds:
            take(seed, asdict(run_seed(seed, hours, kinds)))
    return [found[seed] for seed in seeds]


@orderly
def main(arguments: list[str]) -> int:
    """Run, print, write the figures; status 1 if an invariant was broken."""
    parser = make_parser("faultsim")
    parser.add_argument("--seeds", type=count, default=_SEEDS, help=f"runs (default {_SEEDS})")
    parser.add_argument("--first-seed", type=int, default=1, help="of them (default 1)")
    parser.add_argument(
        "--hours", type=positive, default=_HOURS, help=f"virtual, of each (default {_HOURS:g})"
    )
    parser.add_argument(
        "--processes",
        type=count,
        default=len(os.sched_getaffinity(0)),
        help="default: one per core",
    )
    parser.add_argument(
        "--only", type=some_of(KINDS), default="", help="kinds of faults, separated by commas"
    )
    parser.add_argument(
        "--resume", action="store_true", help="keep seeds that are done, and go on after them"
    )
    parser.add_argument(
        "--ledger", default="results/faultsim-seeds.jsonl", help="file of --resume for that"
    )
    args = parser.parse_args(arguments)
    console = Console()
    only, kinds = ",".join(args.only), args.only or KINDS
    seeds = range(args.first_seed, args.first_seed + args.seeds)
    ledger = None
    if args.resume:
        ledger = SeedLedger(Path(args.ledger), code_digest(simulated()), args.hours, kinds)
    known = ledger.read() if ledger is not None else {}
    left = [seed for seed in seeds if seed not in known]
    with Progress(console=console) as bar:
        step = bar.add_task("seeds", total=len(seeds), completed=len(seeds) - len(left))
        broken = 0

        def done(one: Found) -> None:
            nonlocal broken
            broken += bool(one.rule)
            if ledger is not None:
                ledger.add(one)
            bar.update(
                step, advance=1, description=f"seeds, {broken} broken" if broken else "seeds"
            )

        try:
            new = {one.seed: one for one in run(left, args.hours, args.processes, kinds, done)}
        except KeyboardInterrupt:
            bar.stop()
            kept = "what was done is kept" if ledger is not None else "--resume would keep seeds"
            console.print(f"interrupted; {kept}")
            return INTERRUPTED
    found = [new.get(seed) or known[seed] for seed in seeds]
    made = figures(found)
    console.print(figure_table(f"{len(found)} seeds", [f for f in made if f.value]))
    bad = [f for f in found if f.rule]
    for one in bad[:_SHOWN]:
        console.print(f"\nseed {one.seed}: {one.what}", highlight=False, markup=False)
        for line in one.trace[-_TRACE_SHOWN:]:
            console.print(line, highlight=False, markup=False)
        console.print(replay(one, args.hours, only), highlight=False, markup=False)
    rest = ", ".join(str(f.seed) for f in bad[_SHOWN:])
    if rest:
        console.print(f"\nfurther seeds: {rest}", highlight=False)
    if not bad:
        console.print("no invariant was broken")
    whole = args.seeds >= _SEEDS and args.hours >= _HOURS and not only
    path = result_path(args, "faultsim", whole=whole)
    ResultFile(path, "faultsim", make_command("faultsim", arguments)).write(made)
    return 1 if bad else 0
