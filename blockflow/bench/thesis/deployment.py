"""The memory of modular and of traditional deployment (thesis, section 4.3, tables 4.4 to 4.6).

Eight scenarios of tasks in three classes, three degrees of fusion, 100 and 1000 tasks. What a
process takes is measured here, a worker at a time; the deployments are sums over it. With
``--constants thesis`` it is taken from the thesis, and the tables come out cell by cell.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from blockflow.bench.contenders import Model
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
from blockflow.bench.thesis.memory_figures import (
    draw,
    fusion_note,
    mismatches,
    process_figures,
    process_grid,
    remarks,
    saving_figures,
    saving_grids,
    scenario_grid,
)
from blockflow.bench.thesis.memory_measure import KINDS, ROUNDS, by_rounds, measure, occupancy
from blockflow.bench.thesis.memory_model import FULL, Blocks
from blockflow.bench.thesis.memory_tables import TABLES
from blockflow.repository.zoo.catalog import ZOO

NAME = "deployment"
_SMALL = "resnet18"
"""Measured in a quick run, where the call's model does not fit."""

CONSTANTS = "constants"
"""The variant that measures nothing."""


def fitting() -> list[str]:
    """Models of the zoo in as many blocks as the thesis's."""
    return [name for name, model in ZOO.items() if len(model.cuts) + 1 == len(FULL)]


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


def concluded(model: str, samples: Mapping[Blocks, Sequence[float]]) -> tuple[list[Figure], str]:
    """From the memory of this machine's processes; figures, and how well sums of blocks foretell a
    fused one."""
    rounds = by_rounds(Model(model), samples)
    figures = [
        *process_figures(occupancy(Model(model), samples), samples),
        *saving_figures(rounds, TABLES.get(model), constants_of_thesis=False),
    ]
    return figures, fusion_note(rounds)


def from_thesis(model: str) -> tuple[list[Figure], str]:
    """The same from the constants behind the thesis's table of this model."""
    found = TABLES[model].occupancy
    figures = [
        *process_figures(found),
        *saving_figures([found], TABLES[model], constants_of_thesis=True),
    ]
    return figures, fusion_note([found])


def conclude(models: Sequence[tuple[list[Figure], str]], notes: Sequence[str]) -> Findings:
    """The tables, what they show, and the cells that did not come out.

    Args:
        models: the figures of each, and how well a fused process is foretold.
    """
    figures = [f for found, _ in models for f in found]
    tables = [scenario_grid()]
    for found, _ in models:
        tables += [process_grid(found), *saving_grids(found)]
    said = [remarks(found) for found, _ in models]
    wrong = [f"not the thesis's: {line}" for line in mismatches(figures)]
    more = [line for lines in said for line in lines[1:]]
    return Findings(
        "; ".join(lines[0] for lines in said),
        figures,
        tables,
        _plots([found for found, _ in models]),
        notes=list(dict.fromkeys([*more, *(fused for _, fused in models), *notes, *wrong])),
        failed=bool(wrong),
    )


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
