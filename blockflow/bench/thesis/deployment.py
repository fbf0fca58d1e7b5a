"""Modular and traditional deployment (thesis, section 4.3, tables 4.5 and 4.6) as an experiment.

The measurement, the model and the tables are those of ``make bench-thesis-memory``
(:mod:`blockflow.bench.thesis.memory`).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from blockflow.bench.contenders import Model
from blockflow.bench.results import Figure
from blockflow.bench.thesis.experiment import (
    THESIS,
    Context,
    Experiment,
    Findings,
    Plot,
    Settings,
)
from blockflow.bench.thesis.memory import concluded, fitting, from_thesis
from blockflow.bench.thesis.memory_figures import (
    draw,
    mismatches,
    process_grid,
    remarks,
    saving_figures,
    saving_grids,
)
from blockflow.bench.thesis.memory_measure import KINDS, measure, occupancy
from blockflow.bench.thesis.memory_model import Blocks
from blockflow.bench.thesis.memory_tables import TABLES

NAME = "deployment"
_SMALL, _FIRST = "resnet18", "resnet50"
"""In a quick run, where the call's model does not fit: to be measured, and of the thesis's tables.
"""


def model_of(settings: Settings) -> str:
    """Which model's blocks are deployed."""
    fits: Collection[str] = TABLES if settings.constants == THESIS else fitting()
    if settings.model in fits or not settings.quick:
        return settings.model
    return _FIRST if settings.constants == THESIS else _SMALL


def unfit(settings: Settings) -> str | None:
    """Why the call's model or device cannot be deployed so."""
    model = model_of(settings)
    if settings.constants == THESIS:
        if model not in TABLES:
            return f"the thesis has tables for {' and '.join(TABLES)}, not for {model}"
    elif model not in fitting():
        return f"{model} is not cut into four blocks; {', '.join(fitting())} are"
    return None


def run(ctx: Context) -> Findings:
    """From this machine's processes, or from the constants behind the thesis's table."""
    model = model_of(ctx.settings)
    if ctx.settings.constants == THESIS:
        return conclude(*from_thesis(model), [])
    rounds = ctx.pick(3, 1)
    chain = ctx.chain(model=model)
    with ctx.step(f"{model}: one worker at a time", rounds * len(KINDS)) as advance:
        samples = measure(chain, rounds, ctx.scratch / "state", advance)
    notes = [
        "measured on the CPU, where C is what a process takes without a block; the thesis's is a "
        "CUDA context. With its constants: --constants thesis",
        f"by single starts the savings differ by up to {spread(Model(model), samples):.1f} points "
        f"({rounds} of each process): read nothing into less"
        if rounds > 1
        else "one start of each process: nothing is known of how much the savings vary",
    ]
    return conclude(*concluded(model, samples), notes)


def spread(model: Model, samples: Mapping[Blocks, Sequence[float]]) -> float:
    """How far apart the savings by single rounds of starts are, in points: the worst cell."""
    rounds = [
        saving_figures(
            occupancy(model, {blocks: [values[n]] for blocks, values in samples.items()}),
            None,
            constants_of_thesis=False,
        )
        for n in range(min(len(values) for values in samples.values()))
    ]
    cells = zip(*([f.value for f in found] for found in rounds), strict=True)
    return max(max(cell) - min(cell) for cell in cells)


def conclude(found: list[Figure], fused: str, notes: list[str]) -> Findings:
    """The tables, what they show, and the cells that did not come out."""
    said, *more = remarks(found)
    wrong = [f"not the thesis's: {line}" for line in mismatches(found)]
    return Findings(
        said,
        found,
        [process_grid(found), *saving_grids(found)],
        [Plot("Memory saved by modular deployment, by scenario", "savings", draw(found))],
        notes=[*more, fused, *notes, *wrong],
        failed=bool(wrong),
    )


EXPERIMENT = Experiment(
    NAME,
    ("table 4.4", "table 4.5", "table 4.6"),
    "Memory of modular and of traditional deployment",
    run,
    (unfit,),
)
