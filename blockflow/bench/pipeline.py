"""``make bench`` and ``make bench-pipeline``: what a modular pipeline costs beside its compute.

One network in blocks, several ways, interleaved in one run:

* ``in-process``: the blocks called in turn in one process, nothing between them; a second such
  process (``again``) shows what equal things differ by in this run;
* ``tensormq``: one worker process per block, handles between them;
* ``zeromq``: the same with whole tensors in the messages;
* ``one-worker``: all blocks in one worker process.

The order of the ways is balanced over the rounds, so that drift of the machine hits all alike; read
the ratios. Time accounting is the thesis's (eq. 4.1): waiting + overhead + compute per block. For
throughput, the bound is as many independent in-process pipelines as there are cores to use.
"""

from __future__ import annotations

import functools
import os
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import replace
from pathlib import Path

from rich.console import Console
from rich.progress import Progress

from blockflow.bench import pipeline_aims
from blockflow.bench.bare import BareLink
from blockflow.bench.calibration import calibrate, calibration_figures, compare
from blockflow.bench.client_import import import_figure
from blockflow.bench.contenders import CONTENDERS, Contender, prepare_apart
from blockflow.bench.in_process import Chain, InProcess, example, side_by_side
from blockflow.bench.interrupts import orderly
from blockflow.bench.kpi_reader import KpiReader, per_hop
from blockflow.bench.options import result_path
from blockflow.bench.own_system import own_settings, workplace
from blockflow.bench.pipeline_figures import (
    AGAIN,
    APART,
    AWAKE,
    BOUND,
    IN_LANES,
    IN_PROCESS,
    NOT_RUN,
    REPLICATED,
    TENSORMQ,
    Sample,
    Series,
    aim_grid,
    cost_grid,
    latency_grid,
    remarks,
    start_grid,
    throughput_grid,
)
from blockflow.bench.pipeline_plan import BENCH, PIPELINE, Plan, parse_args
from blockflow.bench.pipeline_ways import (
    block_names,
    in_process_sample,
    run_many,
    run_once,
    topology,
)
from blockflow.bench.results import PARTIAL, Figure, ResultFile, latency_figure, make_command
from blockflow.bench.turns import in_turn
from blockflow.bench.worker_start import measure_start, start_figures
from blockflow.client import Client
from blockflow.control.system import System
from blockflow.core.errors import BlockFlowError
from blockflow.dispatcher.cpu_latency import DEVICE, CpuLatency
from blockflow.repository.repository import BlockRepository

_WARM_UP = 2
_GAPS_MS = (0, 30)


class Bench:
    """One run: a system, and for each contender its in-process runs beside its workers.

    Args:
        system: running, over the repository ``root / "blocks"``.
        prepared: labels of contenders whose blocks were made before -> why they cannot run here,
            if they cannot.

    Attributes:
        found: figures so far, of whole batch sizes.
    """

    def __init__(
        self,
        plan: Plan,
        root: Path,
        system: System,
        progress: Progress,
        prepared: Mapping[str, BlockFlowError | None],
    ) -> None:
        self._plan = plan
        self._prepared = dict(prepared)
        self._root = root / "blocks"
        self._system = system
        self._kpis = KpiReader(system)
        self._progress = progress
        self.found: list[Figure] = []

    def run(self) -> None:
        """All contenders; those that cannot run here leave a figure that says why."""
        for label in self._plan.engines:
            contender = CONTENDERS[label]
            tags = {"engine": label, "precision": contender.precision}
            tags["model"] = self._plan.model.name
            if label not in self._prepared:
                with self._step(f"{label}: preparing", None):
                    made = prepare_apart(self._plan.model, contender, self._root)
                    self._prepared[label] = made
            problem = self._prepared[label]
            if problem is not None:
                tags["reason"] = f"{problem.code}: {problem.message}"
                none = Figure.of(NOT_RUN, label, 0.0, "1", 0, tags)
                self.found.append(none)
                continue
            self._contend(contender, tags)

    def _contend(self, contender: Contender, tags: Mapping[str, str]) -> None:
        plan = self._plan
        asked = list(dict.fromkeys([*plan.batches, *plan.loads]))
        chain = plan.model.chain(contender, self._root, asked)
        loaded = plan.ways
        if plan.loads and plan.seats > 1:
            loaded = (*plan.ways, REPLICATED, IN_LANES)
        wanted = topology(chain, loaded, plan.seats)
        with self._step(f"{contender.label}: starting", None):
            self._system.apply(wanted)
        runs = max(2, plan.seats if plan.loads else 2)
        with ExitStack() as stack:
            client = stack.enter_context(Client(self._system.client_endpoint))
            others = [stack.enter_context(InProcess(chain)) for _ in range(runs)]
            singles = [replace(chain, blocks=(block,)) for block in chain.blocks]
            apart = [stack.enter_context(InProcess(one)) for one in singles]
            for rows in asked:
                series = Series(rows, tags)
                if rows in plan.batches:
                    self._latency(series, chain, client, others, apart)
                if rows in plan.loads and plan.loads[rows].of(contender.label):
                    self._throughput(series, chain, client, others)
                self.found += series.figures()
        if plan.starts:
            with self._step("starting workers one by one", None):
                starts = measure_start(self._system, wanted, chain.blocks, plan.starts)
                self.found += start_figures(starts)
            self._plan = replace(plan, starts=0)  # once is enough: the engine says little about it

    def _latency(
        self,
        series: Series,
        chain: Chain,
        client: Client,
        others: Sequence[InProcess],
        apart: Sequence[InProcess],
    ) -> None:
        """One inference per way and round after some of warm-up, in balanced order."""
        plan, rows = self._plan, series.rows
        rounds = plan.batches[rows]
        spec = BlockRepository(self._root).info(chain.blocks[0]).contract.input
        x = example(spec, rows)
        calls: dict[str, Callable[[], Sample]] = {
            IN_PROCESS: lambda: in_process_sample(others[0].run(rows)),
            AGAIN: lambda: in_process_sample(others[1].run(rows)),
            APART: lambda: in_process_sample([sum(one.run(rows)) for one in apart]),
        }
        for way in plan.ways:
            calls[way] = functools.partial(run_once, client, way, x)
        before = self._kpis.now()
        with self._step(f"{series.tags['engine']}: {rows} rows", rounds + _WARM_UP) as advance:
            series.latency = in_turn(calls, rounds, advance, warm_up=_WARM_UP)
        ways_of = Counter(b for way in plan.ways for b in block_names(way, chain))
        asked = {block: ways * (rounds + _WARM_UP) for block, ways in ways_of.items()}
        grown = self._kpis.since(before, asked)
        series.memory[IN_PROCESS] = others[0].pss_mib()
        for way in plan.ways:
            if way.endswith(AWAKE):
                continue  # on the blocks of another one
            names = block_names(way, chain)
            series.counted[way] = per_hop(grown, names)
            series.memory[way] = self._kpis.pss_mib(names)

    def _throughput(
        self, series: Series, chain: Chain, client: Client, others: Sequence[InProcess]
    ) -> None:
        """Rates of the loaded ways and of the bound, in turns."""
        plan, rows = self._plan, series.rows
        load = plan.loads[rows]
        spec = BlockRepository(self._root).info(chain.blocks[0]).contract.input
        x = example(spec, rows)
        there = [w for w in plan.ways if w == TENSORMQ]
        if plan.seats > 1:
            there += [REPLICATED, IN_LANES]
        calls: dict[str, Callable[[], float]] = {
            BOUND: functools.partial(side_by_side, others[: plan.seats], rows, load.seconds)
        }
        for way in there:
            if way in load.ways:
                calls[way] = functools.partial(run_many, client, way, x, load.seconds)
        with self._step(f"{series.tags['engine']}: {rows} rows, load", load.rounds) as advance:
            series.rates = in_turn(calls, load.rounds, advance)

    @contextmanager
    def _step(self, what: str, total: int | None) -> Iterator[Callable[[], None]]:
        step = self._progress.add_task(what, total=total)
        yield lambda: self._progress.advance(step)
        self._progress.remove_task(step)


def bare_messages(folder: Path, count: int, awake: bool) -> list[Figure]:
    """Bare 200-byte messages, back to back and after a sleep: what a hop is made of here. With
    ``awake`` also while idle cores are kept so."""
    out = []
    latency = CpuLatency()
    with BareLink(folder) as link, closing(latency):
        for held, words in ((None, ""), (0, AWAKE)) if awake else ((None, ""),):
            latency.hold(held)
            for gap_ms in _GAPS_MS:
                before = functools.partial(time.sleep, gap_ms / 1e3)
                times = link.burst(count, before=before)
                name = f"bare ZeroMQ message, {gap_ms} ms apart{words}"
                out.append(latency_figure(name, "ipc", None, times))
    return out


def without_awake(plan: Plan) -> tuple[Plan, list[Figure]]:
    """Where the kernel may not be asked to keep cores awake: what is left, and why it is less."""
    ways = {w for w in plan.ways if w.endswith(AWAKE)}
    why = {"reason": f"{DEVICE}: no leave to write there"}
    not_run = [Figure.of(NOT_RUN, way, 0.0, "1", 0, why) for way in sorted(ways)]
    return replace(plan, ways=tuple(w for w in plan.ways if w not in ways)), not_run


def measure(
    plan: Plan, console: Console, broken: Callable[[Sequence[Figure]], None]
) -> list[Figure]:
    """Everything of a plan, with the machine's steadiness.

    Args:
        broken: gets what was measured until then, if there is any, when something raises.
    """
    begin = calibrate()
    awake = os.access(DEVICE, os.W_OK)
    found: list[Figure] = []
    if not awake:
        plan, found = without_awake(plan)
    with workplace(console) as (root, progress):
        (root / "blocks").mkdir()
        prepared: dict[str, BlockFlowError | None] = {}
        if plan.starts:
            # Users start a system over blocks that are there: their load is rehearsed at its start.
            first = plan.engines[0]
            prepared[first] = prepare_apart(plan.model, CONTENDERS[first], root / "blocks")
        with System(own_settings(root)) as system:
            bench = Bench(plan, root, system, progress, prepared)
            try:
                bench.run()
            except BaseException:  # Ctrl-C as well
                if bench.found:
                    broken(bench.found)
                raise
            found += bench.found
        if plan.messages:
            found += bare_messages(root, plan.messages, awake)
        if plan.starts:
            found.append(import_figure(plan.starts))
    return [*found, *calibration_figures(compare(begin, calibrate()))]


@orderly
def main(arguments: list[str]) -> int:
    """Run the benchmark, print its tables, write its figures."""
    plan, args = parse_args(arguments)
    name = "pipeline" if args.all else "bench"
    console = Console()
    target = "bench-pipeline" if args.all else "bench"
    command = make_command(target, [a for a in arguments if a != "--all"])
    path = result_path(args, name, whole=plan.covers(PIPELINE if args.all else BENCH))

    def keep(found: Sequence[Figure]) -> None:
        """Beside the results of an earlier run, which are whole."""
        part = path.with_stem(f"{path.stem}-partial")
        marked = [replace(f, labels={**f.labels, PARTIAL: True}) for f in found]
        ResultFile(part, name, command).write(marked)
        console.print(f"What was measured until then is in {part}.", highlight=False)

    found = measure(plan, console, keep)
    wide = [latency_grid(found), throughput_grid(found), cost_grid(found)]
    tables = [part for grid in wide for part in grid.split("engine")]
    tables.append(start_grid(found))
    if args.all:
        tables += aim_grid(found).split("engine")
    else:
        found += pipeline_aims.judged(found)
        tables += pipeline_aims.aim_grid(found).split("of")
    for grid in tables:
        if grid.rows:
            console.print(grid.rich())
    for line in remarks(found):
        console.print(line, highlight=False)
    ResultFile(path, name, command).write(found)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
