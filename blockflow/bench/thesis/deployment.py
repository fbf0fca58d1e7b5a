"""Modular and traditional deployment (thesis, section 4.3, tables 4.4 to 4.6) as an experiment.

The measurement, the model and the tables are those of ``make bench-thesis-memory``
(:mod:`blockflow.bench.thesis.memory`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from blockflow.bench.grid import Grid
from blockflow.bench.results import Figure
from blockflow.bench.thesis.beside import THESIS_MODEL
from blockflow.bench.thesis.experiment import (
    CPU,
    THESIS,
    Context,
    Experiment,
    Findings,
    Plot,
    Settings,
    variant,
)
from blockflow.bench.thesis.memory import concluded, fitting, from_thesis
from blockflow.bench.thesis.memory_figures import (
    draw,
    mismatches,
    process_grid,
    remarks,
    saving_grids,
    scenario_grid,
)
from blockflow.bench.thesis.memory_measure import KINDS, ROUNDS, measure
from blockflow.bench.thesis.memory_model import Blocks
from blockflow.bench.thesis.memory_tables import TABLES

NAME = "deployment"
_SMALL = "resnet18"
"""Measured in a quick run, where the call's model does not fit."""


CONSTANTS = "constants"
"""The variant that measures nothing."""


def models_of(settings: Settings) -> list[str]:
    """Which models' blocks are measured; with the thesis's own, all that it has a table of."""
    if settings.quick:
        return [settings.model if settings.model in fitting() else _SMALL]
    return list(TABLES) if settings.model == THESIS_MODEL else [settings.model]


def unfit(settings: Settings) -> str | None:
    """Why the call's model cannot be deployed so; the thesis's constants are of its own models."""
    if settings.constants == THESIS or set(models_of(settings)) <= set(fitting()):
        return None
    return f"{settings.model} is not cut into four blocks; {', '.join(fitting())} are"


def variant_of(settings: Settings) -> str:
    """What is calculated is of the thesis's models, whatever the call's is; what is measured is so
    on the CPU, whatever its device."""
    return CONSTANTS if settings.constants == THESIS else variant(replace(settings, device=CPU))


def run(ctx: Context) -> Findings:
    """From this machine's processes, or from the constants behind the thesis's tables."""
    if ctx.settings.constants == THESIS:
        return conclude([from_thesis(model) for model in TABLES], [])
    found: list[tuple[list[Figure], str]] = []
    for model in models_of(ctx.settings):
        found.append(_measured(ctx, model, [f for figures, _ in found for f in figures]))
        ctx.keep([f for figures, _ in found for f in figures])
    note = (
        "measured on the CPU, where C is what a process takes without a block; the thesis's is a "
        "CUDA context. With its constants: --constants thesis"
    )
    return conclude(found, [note])


def _measured(ctx: Context, model: str, before: Sequence[Figure]) -> tuple[list[Figure], str]:
    """One model's figures; ``before`` are kept with them."""
    rounds = ctx.pick(ROUNDS, 1)
    chain = ctx.chain(model=model)

    def keep(so_far: Mapping[Blocks, Sequence[float]]) -> None:
        ctx.keep([*before, *concluded(model, so_far)[0]])

    with ctx.step(f"{model}: one worker at a time", rounds * len(KINDS)) as advance:
        samples = measure(chain, rounds, ctx.scratch / f"state-{model}", advance, keep)
    return concluded(model, samples)


def conclude(models: Sequence[tuple[list[Figure], str]], notes: Sequence[str]) -> Findings:
    """The tables, what they show, and the cells that did not come out.

    Args:
        models: the figures of each, and how well a fused process is foretold.
        notes: of the measurement.
    """
    figures = [f for found, _ in models for f in found]
    said = [remarks(found) for found, _ in models]
    wrong = [f"not the thesis's: {line}" for line in mismatches(figures)]
    more = [line for lines in said for line in lines[1:]]
    return Findings(
        "; ".join(lines[0] for lines in said),
        figures,
        [scenario_grid(), *(grid for found, _ in models for grid in _grids(found))],
        _plots([found for found, _ in models]),
        notes=list(dict.fromkeys([*more, *(fused for _, fused in models), *notes, *wrong])),
        failed=bool(wrong),
    )


def _grids(found: Sequence[Figure]) -> list[Grid]:
    return [process_grid(found), *saving_grids(found)]


def _plots(models: Sequence[Sequence[Figure]]) -> list[Plot]:
    """Several models have a file each."""
    plots = []
    for found in models:
        model = found[0].labels["model"]
        title = f"Memory saved by modular deployment of {model}, by scenario"
        stem = "savings" if len(models) == 1 else f"savings-{model}"
        plots.append(Plot(title, stem, draw(found)))
    return plots


EXPERIMENT = Experiment(
    NAME,
    ("table 4.4", "table 4.5", "table 4.6"),
    "Memory of modular and of traditional deployment",
    run,
    (unfit,),
    variant_of,
)
