"""``make bench-reliability``: what the promises of docs/reliability.md come to on this machine.

Real processes: workers are killed, stopped, made to hang and given up; clients ask too much, too
late, or do not read; a process of each kind is killed, and everything at once. About half an hour,
of which 27 minutes are rounds beside a client that does not read. What other commands measure
(chaos, kills, overload, updates, malformed frames) stands beside it in the table of promises.
"""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from blockflow.bench.calibration import calibrate, calibration_figures, compare
from blockflow.bench.chaos.lag import Lag
from blockflow.bench.interrupts import orderly
from blockflow.bench.options import make_parser, result_path, some_of
from blockflow.bench.reliability import clients, deaths, everything, givenup, roles
from blockflow.bench.reliability.promise import find, missed
from blockflow.bench.reliability.promises import BENCH, PROMISES
from blockflow.bench.results import Figure, ResultFile, figure_table, make_command

_PARTS = ("deaths", "givenup", "clients", "roles", "everything")


def measure(parts: Sequence[str], *, quick: bool, console: Console) -> list[Figure]:
    """All figures of these parts."""

    def say(what: str) -> None:
        console.print(what, style="dim", highlight=False)

    found: list[Figure] = []
    with tempfile.TemporaryDirectory(prefix="bf-reliability-") as name:
        folder = Path(name)
        if "deaths" in parts:
            plan = deaths.QUICK if quick else deaths.FULL
            with deaths.running(plan, folder / "deaths") as system:
                found += deaths.measure(system, plan, say)
        if "givenup" in parts:
            with givenup.running(folder / "givenup") as system:
                found += givenup.measure(system, folder / "givenup", say)
        if "clients" in parts:
            with clients.running(folder / "clients") as system:
                found += clients.Bench(
                    system, clients.QUICK if quick else clients.Plan(), say
                ).run()
        if "roles" in parts:
            (folder / "roles").mkdir()
            found += roles.measure(folder / "roles", 1 if quick else 3, say)
        if "everything" in parts:
            (folder / "everything").mkdir()
            found += everything.measure(folder / "everything", 1 if quick else 3, say)
    return found


@orderly
def main(arguments: list[str]) -> int:
    """Measure, print, write the figures; status 1 if one of the promises is missed."""
    parser = make_parser("reliability.run", quick="once each: is everything sound?", name=BENCH)
    parser.add_argument(
        "--only", type=some_of(_PARTS), default="", help="some of " + ", ".join(_PARTS)
    )
    args = parser.parse_args(arguments)
    parts = args.only or _PARTS
    console = Console()
    before, lag = calibrate(), Lag()
    found = measure(parts, quick=args.quick, console=console)
    worst_ms = 1e3 * lag.stop().worst_s
    found.append(Figure.of("lag", "worst", worst_ms, "ms"))
    found += calibration_figures(compare(before, calibrate()))
    console.print(figure_table("reliability", found))
    whole = len(parts) == len(_PARTS)
    mine = [p for p in PROMISES if whole or find(p, {BENCH: found}) is not None]
    lines, broken = missed(mine, BENCH, found)
    for line in lines:
        console.print(line, highlight=False, markup=False)
    path = result_path(args, BENCH, whole=whole)
    ResultFile(path, BENCH, make_command("bench-reliability", arguments)).write(found)
    return int(broken and not args.quick)


if __name__ == "__main__":
    raise SystemExit(main())
