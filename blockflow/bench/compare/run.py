"""``make bench-compare BASE=<rev>``: is the working tree faster or slower than a revision?

The same benchmark runs in both trees in turns (A B B A ...), each time as a new process that
imports its own tree's sources. Ratios are taken round by round; nothing is concluded inside the
run's own noise. The benchmark is any module that takes ``--json FILE`` and writes figures there;
by default a short form of ``make bench``: hops, latencies, start-up and private memory.
"""

from __future__ import annotations

import argparse
import re
import shlex
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from rich.console import Console
from rich.progress import Progress

from blockflow.bench.calibration import Steadiness, calibrate, calibration_figures, compare
from blockflow.bench.compare.arms import imported_from, run_benchmark, values_of
from blockflow.bench.compare.choice import ONLY, check_choice, check_verdicts, chosen
from blockflow.bench.compare.judgement import Arm, Change, Comparison, Visit, compare_arms, order
from blockflow.bench.compare.report import figures, remarks, verdict_grid
from blockflow.bench.compare.trees import Tree, state_of, top_of, working_tree, worktree
from blockflow.bench.interrupts import INTERRUPTED, hold, orderly
from blockflow.bench.mlperf.job import disk
from blockflow.bench.options import count, positive
from blockflow.bench.results import ResultFile, make_command
from blockflow.bench.statistics import percentile
from blockflow.core.errors import BlockFlowError, make_error

BENCH = "blockflow.bench.pipeline --model resnet18 --batches 1 --rounds 24 --starts 3"

ROUNDS = 8
_CALIBRATE_S = 0.3
_WIDTH = 110
_SLOWER, _ERROR = 1, 2
"""Exit statuses."""


@dataclass(frozen=True, slots=True)
class Plan:
    """What is compared.

    Attributes:
        repo: the working tree; the revision is one of its repository.
        bench: module and arguments.
        only: metrics whose text it finds.
        rounds: visits of each arm, after one that does not count.
    """

    repo: Path
    base: str
    bench: tuple[str, ...]
    only: re.Pattern[str]
    rounds: int = ROUNDS
    limit_s: float = 600.0


@dataclass(slots=True)
class Run:
    """What was measured so far; it is there however the run ends.

    Attributes:
        planned: visits that count, if all goes well.
        visits: those that count, in their order.
        fixed_ms: the fixed work's times before each visit, and after the last.
        broken: what ended the run too early.
        moved: the working tree changed in between: its visits are not of one thing.
    """

    planned: int
    titles: tuple[str, str] = ("", "")
    visits: list[Visit] = field(default_factory=list)
    fixed_ms: list[list[float]] = field(default_factory=list)
    broken: BlockFlowError | None = None
    moved: bool = False

    @property
    def steady(self) -> Steadiness:
        return compare(self.fixed_ms[0], self.fixed_ms[-1])

    @property
    def interrupted(self) -> bool:
        """By Ctrl-C or SIGTERM."""
        return self.broken is not None and self.broken.code == "CANCELLED"

    @property
    def flaw(self) -> str:
        """What makes the run less than whole; '' for nothing."""
        flaws = []
        if self.broken is not None:
            counted = f"{len(self.visits)} of {self.planned} visits"
            flaws.append(f"partial result, ended early after {counted}: {self.broken}")
        if self.moved:
            flaws.append("the working tree changed during the run: its visits are not of one thing")
        return "; ".join(flaws)


def measure(plan: Plan, run: Run, say: Callable[[str], None], advance: Callable[[], None]) -> None:
    """All visits, into ``run``, which keeps them whatever is raised.

    Raises:
        BlockFlowError: no such revision, nothing to compare, or the benchmark fails.
        KeyboardInterrupt: somebody has ended it.
    """
    repo = top_of(plan.repo)
    with worktree(repo, plan.base) as base:
        tree = working_tree(repo)
        before = state_of(repo)
        trees = {Arm.BASE: base, Arm.TREE: tree}
        run.titles = (base.title, tree.title)
        measured = {}
        for arm in Arm:
            # The first visit compiles the sources and fills the page cache: it never counts.
            say(f"{arm}: {trees[arm].title}, {imported_from(trees[arm])}")
            measured[arm] = values_of(run_benchmark(trees[arm], plan.bench, plan.limit_s))
            advance()
        check_choice(measured, plan.only)
        try:
            for arm in order(plan.rounds):
                run.visits.append(_visit(arm, trees[arm], plan, run))
                advance()
        finally:
            run.fixed_ms.append(calibrate(_CALIBRATE_S))
            run.moved = state_of(repo) != before


def _visit(arm: Arm, tree: Tree, plan: Plan, run: Run) -> Visit:
    imported_from(tree)
    fixed = calibrate(_CALIBRATE_S)
    run.fixed_ms.append(fixed)
    values = values_of(run_benchmark(tree, plan.bench, plan.limit_s))
    return Visit(arm, percentile(fixed, 50), chosen(values, plan.only))


def parse_args(argv: Sequence[str]) -> tuple[Plan, argparse.Namespace]:
    parser = argparse.ArgumentParser(
        prog="python -m blockflow.bench.compare.run", description=__doc__
    )
    parser.add_argument("base", metavar="BASE", help="the revision to compare with")
    parser.add_argument("--rounds", type=count, default=ROUNDS, help=f"default {ROUNDS}")
    parser.add_argument("--bench", default=BENCH, help=f"module and arguments (default: {BENCH})")
    parser.add_argument("--only", help="metrics that this regular expression finds")
    parser.add_argument("--repo", type=Path, default=Path(), help="the working tree")
    parser.add_argument("--timeout", type=positive, default=600.0, help="seconds of one visit")
    parser.add_argument("--fail", action="store_true", help="status 1 if anything got slower")
    parser.add_argument("--json", default="results/compare.jsonl", help="file for the figures")
    args = parser.parse_args(argv)
    bench = tuple(shlex.split(args.bench))
    if not bench:
        parser.error("--bench names a module")
    # Another benchmark has other metrics: then all of them.
    only = args.only if args.only is not None else ONLY if args.bench == BENCH else ""
    try:
        pattern = re.compile(only)
    except re.error as error:
        parser.error(f"--only: {error}")
    return Plan(args.repo, args.base, bench, pattern, args.rounds, args.timeout), args


@orderly
def main(arguments: list[str]) -> int:
    """Compare, print, write.

    0; 1 with ``--fail`` where something got slower; 2 on errors, and where nothing was compared;
    130 after Ctrl-C or SIGTERM.
    """
    plan, args = parse_args(arguments)
    others = [a for a in arguments if a != plan.base]
    command = make_command(f"bench-compare BASE={shlex.quote(plan.base)}", others)
    target = ResultFile(Path(args.json), "compare", command)
    console = Console()

    def say(text: str) -> None:
        # No markup: what a benchmark said last, or a regular expression, may have brackets.
        console.print(text, highlight=False, markup=False, soft_wrap=True)

    run = Run(2 * plan.rounds)
    found: list[Comparison] = []
    try:
        with Progress(console=console) as bar:
            step = bar.add_task("A B B A", total=run.planned + len(Arm))
            measure(plan, run, say, lambda: bar.advance(step))
    except BlockFlowError as error:
        run.broken = error
    except KeyboardInterrupt:
        run.broken = make_error("CANCELLED", "interrupted before the end")
    hold()
    if run.broken is not None and len(run.visits) < len(Arm):
        problems = [str(run.broken)]
    else:
        found = compare_arms(run.visits)
        problems = _conclude(run, found, target, say)
    for problem in problems:
        say(problem)
    if run.interrupted:
        return INTERRUPTED
    if problems:
        return _ERROR
    slower = any(c.change is Change.SLOWER for c in found)
    return _SLOWER if slower and args.fail else 0


def _conclude(
    run: Run, found: Sequence[Comparison], target: ResultFile, say: Callable[[str], None]
) -> list[str]:
    """Show and store what was found; returns what is wrong with it."""
    made = figures(found, run.titles, run.flaw)
    # Where lines are narrower they wrap: better than figures that are cut off.
    Console(width=max(Console().width, _WIDTH)).print(verdict_grid(made).rich())
    for line in remarks(found, run.steady):
        say(line)
    silent = check_verdicts(found)
    problems = [run.flaw] if run.flaw else [] if silent is None else [str(silent)]
    try:
        with disk(target.path, "what was found stands above; name another file with --json"):
            target.write([*made, *calibration_figures(run.steady)])
    except BlockFlowError as error:
        problems.append(str(error))
    return problems


if __name__ == "__main__":
    raise SystemExit(main())
