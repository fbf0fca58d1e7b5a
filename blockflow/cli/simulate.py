"""``blockflow simulate``: policies against each other on measured profiles, in virtual time."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import MofNCompleteColumn, TimeRemainingColumn

from blockflow.batching.shares import TaskShare
from blockflow.bench.numerals import plain
from blockflow.bench.options import nonsense
from blockflow.bench.results import ResultFile, fingerprint
from blockflow.bench.simulation.comparison import Entry, compare, figures
from blockflow.bench.simulation.example import NOTICE, example_profiles
from blockflow.bench.simulation.experiment import Cell, Experiment
from blockflow.bench.simulation.farm import run_all
from blockflow.bench.simulation.outcome import Outcome
from blockflow.bench.simulation.plan import Order, plan_experiment
from blockflow.bench.simulation.report import batch_tables, legend, plot, tables, task_tables
from blockflow.bench.simulation.sources import (
    Costs,
    TaskChoice,
    Traits,
    parse_share,
    parse_task,
    plain_system,
    read_profiles,
    stored_paths,
    topology_system,
)
from blockflow.bench.simulation.system import SystemModel
from blockflow.bench.simulation.watch import InvariantBroken
from blockflow.cli.options import Json, bar, commas, print_json, typed_command, was_given
from blockflow.cli.outputs import PLOTS, check_output, writing
from blockflow.core import limits
from blockflow.core.errors import make_error
from blockflow.launch.cgroup import available_cores

_TOPOLOGY_SAYS = (
    "blocks",
    "apart",
    "replicas",
    "threads",
    "lanes",
    "slots",
    "max-rows",
    "deadline-ms",
)
"""Options beside which ``--topology`` cannot stand."""


def simulate(
    context: typer.Context,
    example: Annotated[bool, typer.Option("--example", help="Made-up profiles.")] = False,
    profile: Annotated[
        list[Path] | None, typer.Option(help="A file with a profile; repeat it per block.")
    ] = None,
    repository: Annotated[
        Path, typer.Option("--repository", "-r", help="Where the blocks and profiles are.")
    ] = Path("blocks"),
    blocks: Annotated[str, typer.Option(help="The path, with commas.")] = "",
    task: Annotated[
        list[str] | None,
        typer.Option(help="NAME@TRAFFIC=a,b,c; repeat it for tasks that share blocks."),
    ] = None,
    share: Annotated[
        list[str] | None,
        typer.Option(help="NAME:weight=2,priority=1,max_batch_rows=4 of a task."),
    ] = None,
    topology: Annotated[
        Path | None, typer.Option(help="Simulate its tasks and workers; --task picks some.")
    ] = None,
    policy: Annotated[
        list[str] | None,
        typer.Option(help="NAME or NAME:option=value,...; repeat it to compare."),
    ] = None,
    apart: Annotated[bool, typer.Option("--apart", help="A process per block.")] = False,
    replicas: Annotated[
        int, typer.Option(min=1, max=limits.MAX_REPLICAS, help="Copies of each worker.")
    ] = 1,
    cores: Annotated[
        int | None, typer.Option(min=1, max=4096, help="Default: those of this machine.")
    ] = None,
    threads: Annotated[int, typer.Option(min=1, max=1024, help="Of one forward.")] = 1,
    lanes: Annotated[
        int, typer.Option(min=1, max=limits.MAX_LANES, help="Forwards at once per worker.")
    ] = 1,
    slots: Annotated[int, typer.Option(min=1, max=4096, help="Per worker.")] = 16,
    credits_: Annotated[
        int, typer.Option("--credits", min=1, max=1 << 20, help="Queries in flight at most.")
    ] = 256,
    max_rows: Annotated[int, typer.Option(min=1, max=limits.MAX_ROWS, help="Of a batch.")] = 32,
    hop_ms: Annotated[float, typer.Option(min=0.0, max=1e4, help="From process to process.")] = 0.3,
    turn_ms: Annotated[
        float, typer.Option(min=0.0, max=1e4, help="Between two forwards of a worker.")
    ] = 0.1,
    load: Annotated[
        str, typer.Option(help="Rates relative to the capacity without batching, with commas.")
    ] = "",
    rate: Annotated[str, typer.Option(help="Queries per second, with commas.")] = "",
    arrivals: Annotated[
        str, typer.Option(help="poisson, burst, step, closed:K, or a .csv or .jsonl file.")
    ] = "poisson",
    rows: Annotated[str, typer.Option(help="Per query: 3, uniform:1-8, zipf:..., ...")] = "1",
    lengths: Annotated[str, typer.Option(help="Per query, as --rows.")] = "",
    duration: Annotated[
        float | None,
        typer.Option(min=0.001, max=1e6, help="Virtual seconds; default 60, or the trace's."),
    ] = None,
    warmup: Annotated[
        float | None, typer.Option(min=0.0, max=1e6, help="Default: a tenth of the duration.")
    ] = None,
    deadline_ms: Annotated[
        float,
        typer.Option(min=1.0, max=float(limits.MAX_DEADLINE_MS), help="When a query expires."),
    ] = float(limits.DEFAULT_DEADLINE_MS),
    bound_ms: Annotated[
        float, typer.Option(min=0.001, max=1e6, help="For the share of queries over it.")
    ] = 500.0,
    seeds: Annotated[int, typer.Option(min=1, max=100_000, help="Runs per policy and rate.")] = 20,
    first_seed: Annotated[int, typer.Option(min=0, help="Of the first run; then upwards.")] = 1,
    exact: Annotated[bool, typer.Option("--exact", help="Forwards do not fluctuate.")] = False,
    check: Annotated[bool, typer.Option("--check", help="Look after all invariants.")] = False,
    processes: Annotated[
        int | None, typer.Option(min=1, max=1024, help="To simulate in. Default: one per core.")
    ] = None,
    batches: Annotated[bool, typer.Option("--batches", help="Show the batch sizes.")] = False,
    plot_: Annotated[Path | None, typer.Option("--plot", help="A PNG file.")] = None,
    results: Annotated[
        Path | None, typer.Option("--results", help="A JSON Lines file for the figures.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Compare batching policies in virtual time: seconds instead of hours of measuring."""
    if topology is not None:
        said = [f"--{o}" for o in _TOPOLOGY_SAYS if was_given(context, o.replace("-", "_"))]
        if said:
            raise nonsense("the topology says that", ", ".join(said), "leave it out")
    costs = Costs(
        cores=cores or available_cores().at_once,
        hop_ms=hop_ms,
        turn_ms=turn_ms,
        credits=credits_,
        slots=slots,
        threads=threads,
        replicas=replicas,
        max_rows=max_rows,
        deadline_ms=deadline_ms,
        lanes=lanes,
    )
    check_output(results, "--results")
    check_output(plot_, "--plot", PLOTS)
    chosen = [parse_task(t) for t in task or ()]
    shares = dict(parse_share(s) for s in share or ())
    system = _system(
        example, profile or [], repository, blocks, chosen, shares, topology, costs, apart
    )
    order = Order(
        policies=policy or (),
        from_topology=topology is not None,
        loads=load,
        rates=rate,
        arrivals=arrivals,
        rows=rows,
        lengths=lengths,
        duration_s=duration,
        warmup_s=warmup,
        seeds=seeds,
        first_seed=first_seed,
        bound_ms=bound_ms,
        noisy=not exact,
        check=check,
    )
    experiment, capacity = plan_experiment(system, order)
    try:
        outcomes = _run(experiment, processes or len(os.sched_getaffinity(0)))
    except InvariantBroken as exc:
        where = "; ".join(getattr(exc, "__notes__", ()))
        raise make_error(
            "INTERNAL",
            f"a rule that must always hold does not: {exc}",
            where=where,
            hint="a policy of your own has done what none may (docs/writing-a-policy.md); if it is "
            "one of blockflow's, please report it",
        ) from exc
    entries = compare(experiment, outcomes, capacity)
    about = _about(experiment, capacity, NOTICE if example else "")
    if results is not None:
        with writing(results):
            command = typed_command(context)
            ResultFile(results, "simulate", command).write(figures(entries))
    if plot_ is not None:
        with writing(plot_):
            plot(entries, about, plot_)
    if as_json:
        print_json(_document(experiment, capacity, entries, outcomes, example))
        return
    console = Console(highlight=False)
    for line in (about, *legend(entries)):
        console.print(line, markup=False)
    grids = tables(entries, bound_ms)
    if len(system.tasks) > 1:
        grids += task_tables(entries)
    if batches:
        grids += batch_tables(entries)
    for grid in grids:
        console.print(grid.rich())


def _system(
    example: bool,
    files: list[Path],
    repository: Path,
    blocks: str,
    chosen: list[TaskChoice],
    shares: dict[str, TaskShare],
    topology: Path | None,
    costs: Costs,
    apart: bool,
) -> SystemModel:
    sources = (example, bool(files), topology is not None)
    if sum(sources) > 1:
        raise nonsense("more than one source", "--example, --profile, --topology", "give one")
    if topology is not None:
        return topology_system(topology, repository, chosen, shares, costs)
    path = tuple(commas(blocks))
    if path and chosen:
        raise nonsense("--blocks is one task, --task names them", "--blocks, --task")
    tasks = chosen or ([TaskChoice("task", path, 1.0)] if path else [])
    known: dict[str, Traits] = {}
    if example:
        profiles = {p.block: p for p in example_profiles()}
    elif files:
        profiles = read_profiles(files)
    elif tasks:
        profiles, known = stored_paths(repository, tasks)
    else:
        raise nonsense(
            "nothing to simulate",
            "--blocks, --task, --topology, --profile or --example",
            "blockflow simulate --example shows how it looks",
        )
    return plain_system(profiles, tasks, shares, costs, apart=apart, known=known)


def _run(experiment: Experiment, processes: int) -> dict[Cell, Outcome]:
    with bar(MofNCompleteColumn(), TimeRemainingColumn()) as progress:
        task = progress.add_task("simulating", total=len(experiment.cells()))
        return run_all(experiment, processes, lambda cell, outcome: progress.advance(task))


def _about(experiment: Experiment, capacity: float, notice: str) -> str:
    seeds = len(experiment.seeds)
    return (
        f"{experiment.arrivals}, {seeds} seed{'s' if seeds > 1 else ''} of "
        f"{plain(experiment.duration_s)} s; capacity without batching {plain(capacity)}/s"
        + (f"; {notice}" if notice else "")
    )


def _document(
    experiment: Experiment,
    capacity: float,
    entries: list[Entry],
    outcomes: dict[Cell, Outcome],
    example: bool,
) -> dict[str, Any]:
    plain = experiment.to_dict()
    for worker in plain["system"]["workers"]:
        for stage in worker["stages"]:
            full = stage.pop("profile")
            stage["profile"] = {k: full[k] for k in ("digest", "engine", "precision", "machine")}
    return {
        "made_up": example,
        "experiment": plain,
        "capacity": capacity,
        "queries": sum(o.queries for o in outcomes.values()),
        "machine": fingerprint(),
        "entries": [e.to_dict() for e in entries],
    }
