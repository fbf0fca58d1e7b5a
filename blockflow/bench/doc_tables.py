"""The tables that documents show of stored results: which file, which command, who makes them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from blockflow.bench import (
    front_door,
    gpu_figures,
    gpu_floor,
    hop_figures,
    overload_figures,
    pipeline_aims,
    pipeline_figures,
    replicas,
    tasks,
)
from blockflow.bench.batching import grids as batching
from blockflow.bench.batching import reason_grids as reasons
from blockflow.bench.batching.several_figures import several_grid
from blockflow.bench.chaos import grids as chaos
from blockflow.bench.compare import report as compare
from blockflow.bench.demo_grids import demo_memory_grid, demo_task_grid, demo_time_grid
from blockflow.bench.fuzz import figures as fuzz
from blockflow.bench.grid import Grid, digits, ms
from blockflow.bench.mlperf import tables as mlperf
from blockflow.bench.results import Figure

Make = Callable[[Sequence[Figure]], Grid]


@dataclass(frozen=True, slots=True)
class Table:
    """A table of a document: which result file it shows and what makes it."""

    results: str
    command: str
    make: Make


def plain_grid(found: Sequence[Figure]) -> Grid:
    """Every figure in a row, for results that need no table of their own."""
    rows = [
        (
            f.name,
            f.mode,
            digits(f.value) if f.value < 1e6 else f"{f.value:,.0f}",
            f.unit,
            *(ms(v) for v in (f.p50_ms, f.p90_ms, f.p99_ms)),
        )
        for f in found
    ]
    heads = ("figure", "of", "value", "unit", "p50 ms", "p90 ms", "p99 ms")
    return Grid("figures", heads, rows, frozenset({"figure", "of", "unit"}))


def fuzz_grid(found: Sequence[Figure]) -> Grid:
    """One line: how much was sent, what failed, what grew most."""
    at = {(f.name, f.mode): f.value for f in found}
    grown = max((f for f in found if f.name == fuzz.GROWTH), key=lambda f: f.value, default=None)
    row = (
        f"{at[fuzz.FRAMES, 'all decoders']:,.0f}",
        f"{at[fuzz.FRAMES, 'all']:,.0f}",
        f"{at[fuzz.FAILURES, 'all']:.0f}",
        "" if grown is None else f"{grown.value:+.1f} ({grown.mode})",
    )
    heads = ("frames at decoders", "frames at sockets", "failures", "most growth, MiB")
    return Grid("malformed frames", heads, [row])


def faultsim_grid(found: Sequence[Figure]) -> Grid:
    """One line: how much was simulated, and what was broken."""
    at = {(f.name, f.mode): f for f in found}
    names = ("virtual time", "requests", "faults", "violations")
    row = (
        str(at["violations", "all"].n),
        *(f"{at[name, 'all'].value:,.0f}" for name in names),
        digits(at["real time", "all"].value),
    )
    heads = ("seeds", "virtual hours", "requests", "faults", "invariants broken", "cpu s")
    return Grid("simulated faults", heads, [row])


def _tables(results: str, command: str, **makers: Make) -> dict[str, Table]:
    return {
        f"{results}.{name.replace('_', '-')}": Table(results, command, make)
        for name, make in makers.items()
    }


TABLES: Mapping[str, Table] = {
    **_tables(
        "hops",
        "make bench-hops",
        time=hop_figures.time_grid,
        check=hop_figures.check_grid,
        legs=hop_figures.leg_grid,
        aims=hop_figures.aim_grid,
    ),
    **_tables(
        "pipeline",
        "make bench-pipeline",
        latency=pipeline_figures.latency_grid,
        throughput=pipeline_figures.throughput_grid,
        cost=pipeline_figures.cost_grid,
        missing=pipeline_figures.missing_grid,
        aims=pipeline_figures.aim_grid,
    ),
    **_tables(
        "bench",
        "make bench",
        latency=pipeline_figures.latency_grid,
        aims=pipeline_aims.aim_grid,
        start=pipeline_figures.start_grid,
    ),
    **_tables(
        "gpu",
        "make bench-gpu",
        floor=gpu_floor.floor_grid,
        latency=gpu_figures.latency_grid,
        clients=gpu_figures.client_grid,
        load=gpu_figures.load_grid,
        aims=gpu_figures.aim_grid,
    ),
    **_tables(
        "batching",
        "make bench-batching",
        lbci=batching.lbci_grid,
        lbci_ratios=batching.lbci_ratio_grid,
        closed=batching.closed_grid,
        sizes=batching.size_grid,
        delays=batching.delay_grid,
        dvabatch=batching.dvabatch_grid,
        dvabatch_ratios=batching.dvabatch_ratio_grid,
        peaks=batching.peak_grid,
        shared=batching.shared_grid,
        heads=batching.heads_grid,
        several=several_grid,
        cost=batching.cost_grid,
        served=batching.served_grid,
        aims=batching.aim_grid,
        notes=batching.note_grid,
    ),
    **_tables(
        "reasons",
        "make bench-batching ARGS='--only reasons'",
        rows=reasons.row_grid,
        gains=reasons.gain_grid,
        peaks=reasons.peak_grid,
        splits=reasons.split_grid,
        tests=reasons.test_grid,
    ),
    **_tables(
        "compare",
        "make bench-compare BASE=<rev>",
        revisions=compare.revision_grid,
        verdicts=compare.verdict_grid,
        notes=compare.note_grid,
    ),
    **_tables(
        "demo", "make demo", tasks=demo_task_grid, memory=demo_memory_grid, time=demo_time_grid
    ),
    **_tables(
        "mlperf",
        "blockflow bench",
        runs=mlperf.run_grid,
        accuracy=mlperf.accuracy_grid,
        targets=mlperf.target_grid,
        validation=mlperf.validation_grid,
        blocks=mlperf.block_grid,
    ),
    **_tables("overload", "make bench-overload", loads=overload_figures.load_grid),
    **_tables("tasks", "make bench-tasks", figures=tasks.grid),
    **_tables("front_door", "make bench-front-door", figures=front_door.grid),
    **_tables("replicas", "make bench-replicas", figures=replicas.grid),
    **_tables("updates", "make bench-updates", figures=plain_grid),
    **_tables("chaos", "make chaos", faults=chaos.fault_grid, outcomes=chaos.outcome_grid),
    **_tables(
        "kills",
        "make chaos ARGS='--kills 1000'",
        faults=chaos.fault_grid,
        outcomes=chaos.outcome_grid,
    ),
    **_tables("soak", "make soak", outcomes=chaos.outcome_grid, growth=chaos.growth_grid),
    **_tables("fuzz", "make fuzz", summary=fuzz_grid),
    **_tables("faultsim", "make faultsim", summary=faultsim_grid),
}
"""A further benchmark adds its tables here."""
