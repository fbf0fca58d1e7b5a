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
import signal
import sys
import types
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.progress import Progress

from blockflow.bench.calibration import Steadiness, calibrate, calibration_figures, compare
from blockflow.bench.compare.arms import imported_from, run_benchmark, values_of
from blockflow.bench.compare.judgement import (
    Arm,
    Change,
    Visit,
    compare_arms,
    order,
)
from blockflow.bench.compare.report import figures, grid, remarks
from blockflow.bench.compare.trees import Tree, state_of, top_of, working_tree, worktree
from blockflow.bench.results import ResultFile, make_command
from blockflow.bench.statistics import percentile
from blockflow.core.errors import BlockFlowError

BENCH = "blockflow.bench.pipeline --model resnet18 --batches 1 --rounds 24 --starts 3"
ONLY = (
    r"^(latency to in-process|latency|overhead per hop), (tensormq|one-worker)"
    r"|^worker (ready,|USS)"
)
"""Of the default benchmark. The more is compared, the more differs by chance."""

ROUNDS = 8
_CALIBRATE_S = 0.3
_WIDTH = 110


@dataclass(frozen=True, slots=True)
class Plan:
    """What is compared.

    Attributes:
        repo: the working tree; the revision is one of its repository.
        base: that revision.
        bench: module and arguments.
        only: metrics whose text it finds.
        rounds: visits of each arm, after one that does not count.
        limit_s: of a visit.
    """

    repo: Path
    base: str
    bench: tuple[str, ...]
    only: re.Pattern[str]
    rounds: int = ROUNDS
    limit_s: float = 600.0


@dataclass(slots=True)
class Run:
    """What was measured so far.

    Attributes:
        titles: of base and tree.
        visits: those that count, in their order.
        fixed_ms: the fixed work's times before the first and before the last visit.
        broken: what ended the run too early.
        moved: the working tree changed in between: its visits are not of one thing.
    """

    titles: tuple[str, str]
    visits: list[Visit]
    fixed_ms: list[list[float]]
    broken: BlockFlowError | None = None
    moved: bool = False

    @property
    def steady(self) -> Steadiness:
        return compare(self.fixed_ms[0], self.fixed_ms[-1])

    @property
    def flaw(self) -> str:
        """What makes the run less than whole; '' for nothing."""
        if self.broken is not None:
            return f"ended early, after {len(self.visits)} visits: {self.broken}"
        if self.moved:
            return "the working tree changed during the run: its visits are not of one thing"
        return ""


def measure(plan: Plan, say: Callable[[str], None], advance: Callable[[], None]) -> Run:
    """All visits. A benchmark that fails after the first round ends the run, which keeps its rest.

    Raises:
        BlockFlowError: no such revision, or the benchmark fails in the very beginning.
    """
    repo = top_of(plan.repo)
    with worktree(repo, plan.base) as base:
        tree = working_tree(repo)
        before = state_of(repo)
        trees = {Arm.BASE: base, Arm.TREE: tree}
        run = Run((base.title, tree.title), [], [])
        for arm in Arm:
            # The first visit compiles the sources and fills the page cache: it never counts.
            say(f"{arm}: {trees[arm].title}, {imported_from(trees[arm])}")
            run_benchmark(trees[arm], plan.bench, plan.limit_s)
            advance()
        for arm in order(plan.rounds):
            try:
                run.visits.append(_visit(arm, trees[arm], plan, run))
            except BlockFlowError as error:
                if len(run.visits) < len(Arm):
                    raise
                run.broken = error
                break
            advance()
        run.fixed_ms.append(calibrate(_CALIBRATE_S))
        run.moved = state_of(repo) != before
    return run


def _visit(arm: Arm, tree: Tree, plan: Plan, run: Run) -> Visit:
    imported_from(tree)
    fixed = calibrate(_CALIBRATE_S)
    run.fixed_ms.append(fixed)
    values = values_of(run_benchmark(tree, plan.bench, plan.limit_s))
    chosen = {metric: v for metric, v in values.items() if plan.only.search(metric.text)}
    return Visit(arm, percentile(fixed, 50), chosen)


def parse_args(argv: Sequence[str]) -> tuple[Plan, argparse.Namespace]:
    parser = argparse.ArgumentParser(
        prog="python -m blockflow.bench.compare.run", description=__doc__
    )
    parser.add_argument("base", metavar="BASE", help="the revision to compare with")
    parser.add_argument("--rounds", type=int, default=ROUNDS, help=f"default {ROUNDS}")
    parser.add_argument("--bench", default=BENCH, help=f"module and arguments (default: {BENCH})")
    parser.add_argument("--only", help="metrics that this regular expression finds")
    parser.add_argument("--repo", type=Path, default=Path(), help="the working tree")
    parser.add_argument("--timeout", type=float, default=600.0, help="seconds of one visit")
    parser.add_argument("--fail", action="store_true", help="status 1 if anything got slower")
    parser.add_argument("--json", default="results/compare.jsonl", help="file for the figures")
    args = parser.parse_args(argv)
    if args.rounds < 1:
        parser.error("--rounds is at least 1")
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


def _stop(number: int, frame: types.FrameType | None) -> None:
    """SIGTERM as an exception, so that processes end and the worktree goes."""
    raise SystemExit(128 + number)


def main(argv: Sequence[str] | None = None) -> int:
    """Compare, print, write. 0; 1 with ``--fail`` where something got slower; 2 on errors."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    plan, args = parse_args(arguments)
    console = Console()

    def say(text: str) -> None:
        console.print(text, highlight=False, soft_wrap=True)

    before = signal.signal(signal.SIGTERM, _stop)
    try:
        with Progress(console=console) as bar:
            step = bar.add_task("A B B A", total=2 * plan.rounds + len(Arm))
            run = measure(plan, say, lambda: bar.advance(step))
    except BlockFlowError as error:
        say(str(error))
        return 2
    finally:
        signal.signal(signal.SIGTERM, before)
    found = compare_arms(run.visits)
    # Where lines are narrower they wrap: better than figures that are cut off.
    Console(width=max(console.width, _WIDTH)).print(grid(found, run.titles).rich())
    for line in remarks(found, run.steady):
        say(line)
    if run.flaw:
        say(run.flaw)
    others = [a for a in arguments if a != plan.base]
    command = make_command(f"bench-compare BASE={shlex.quote(plan.base)}", others)
    made = [*figures(found, run.titles, run.flaw), *calibration_figures(run.steady)]
    ResultFile(Path(args.json), "compare", command).write(made)
    if run.flaw:
        return 2
    slower = any(c.change is Change.SLOWER for c in found)
    return 1 if slower and args.fail else 0


if __name__ == "__main__":
    raise SystemExit(main())
