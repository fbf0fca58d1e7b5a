"""From occupancies to figures, tables, the line that says what they show, and the picture. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from blockflow.bench.canvas import new_page
from blockflow.bench.grid import BREAK, Grid, digits, with_bounds
from blockflow.bench.results import Figure, interval_figure
from blockflow.bench.statistics import Interval, median_interval
from blockflow.bench.thesis.memory_model import (
    LAST,
    NOTHING,
    SCENARIOS,
    Blocks,
    Counts,
    Fusion,
    Occupancy,
    saving,
)
from blockflow.bench.thesis.memory_tables import TASKS, ThesisTable, table_counts

PROCESS = "process memory"
SAVING = "memory saving"
AS_PRINTED, ALL_TASKS = "as printed", "all tasks"
"""How tasks are counted: as the thesis's tables do, or so that every task is in a class."""

NUMBERS = (100, 1000)
_COLOURS = ("#17779b", "#6a994e", "#f2b134")


def process_name(blocks: Blocks) -> str:
    """A process as tables call it."""
    if blocks == NOTHING:
        return "without a block (C)"
    return f"block{'s' * (len(blocks) > 1)} {'+'.join(map(str, blocks))}"


def process_figures(
    found: Occupancy, samples: Mapping[Blocks, Sequence[float]] | None = None
) -> list[Figure]:
    """One per kind of process; with an interval where it was measured."""
    values = {NOTHING: found.context, **found.processes}
    out = []
    for blocks, value in values.items():
        interval = median_interval(samples[blocks]) if samples else Interval(value, value, value, 1)
        labels: dict[str, Any] = {"model": found.model}
        if len(blocks) > 1:
            labels["sum_of_blocks"] = round(found.predicted(blocks), 3)
        out.append(
            interval_figure(PROCESS, process_name(blocks), None, interval, found.unit, labels)
        )
    return out


def saving_figures(
    found: Occupancy, table: ThesisTable | None, *, constants_of_thesis: bool
) -> list[Figure]:
    """Scenario by scenario, the three fusions, for all numbers of tasks.

    Beside ours stands the thesis's saving (its table is for 100 tasks and finds "no particular
    differences" for 1000), corrected where the cell is a misprint.
    """
    out: list[Figure] = []
    if constants_of_thesis:
        for s in SCENARIOS:
            counts = table_counts(s.number)
            out += _row(found, table, s.number, TASKS, counts, AS_PRINTED)
    for tasks in NUMBERS:
        for s in SCENARIOS:
            out += _row(found, table, s.number, tasks, s.counts(tasks), ALL_TASKS)
    return out


def _row(
    found: Occupancy,
    table: ThesisTable | None,
    number: int,
    tasks: int,
    counts: Counts,
    counted: str,
) -> Iterable[Figure]:
    whole = found.traditional(tasks)
    for fusion in Fusion:
        mine = found.modular(counts, fusion)
        labels: dict[str, Any] = {
            "model": found.model,
            "scenario": number,
            "tasks": tasks,
            "counted": counted,
            "modular": round(mine, 3),
            "traditional": round(whole, 3),
            "memory_unit": found.unit,
        }
        if table is not None:
            printed, meant = table.printed(number, fusion), table.meant(number, fusion)
            labels["thesis"] = meant.saving
            if tasks == TASKS:
                labels["thesis_mb"] = meant.mb
            if printed != meant:
                labels["misprint"] = f"{printed.mb} MB, {printed.saving}%"
        value = saving(mine, whole)
        yield Figure(SAVING, str(fusion), None, None, None, value, "%", 1, labels=labels)


def process_grid(found: Iterable[Figure]) -> Grid:
    """What every kind of process takes."""
    mine = [f for f in found if f.name == PROCESS]
    unit = mine[0].unit if mine else ""
    rows = []
    for f in mine:
        low, high = (f.low, f.high) if f.n > 1 else (None, None)
        predicted = f.labels.get("sum_of_blocks")
        rows.append(
            (
                f.mode,
                with_bounds(f.value, low, high, 1),
                "" if predicted is None else digits(predicted),
            )
        )
    heads = ("process", unit, "by the sum of its blocks")
    return Grid("Memory of one process", heads, rows, frozenset({"process"}))


def saving_grids(found: Iterable[Figure]) -> list[Grid]:
    """One table per number of tasks and way of counting, a row per scenario."""
    groups: dict[tuple[int, str], dict[int, list[Figure]]] = {}
    for f in (f for f in found if f.name == SAVING):
        key = f.labels["tasks"], f.labels["counted"]
        groups.setdefault(key, {}).setdefault(f.labels["scenario"], []).append(f)
    return [_saving_grid(*key, scenarios) for key, scenarios in groups.items()]


def _saving_grid(tasks: int, counted: str, scenarios: Mapping[int, Sequence[Figure]]) -> Grid:
    rows: list[tuple[str, ...]] = []
    unit = ""
    for number, figures in scenarios.items():
        if rows:
            rows.append(BREAK)
        for f in figures:
            unit = f.labels["memory_unit"]
            thesis, thesis_mb = f.labels.get("thesis"), f.labels.get("thesis_mb")
            rows.append(
                (
                    str(number),
                    f.mode,
                    f"{f.labels['modular']:.0f}",
                    f"{f.labels['traditional']:.0f}",
                    f"{f.value:.2f}",
                    "" if thesis_mb is None else str(thesis_mb),
                    "" if thesis is None else f"{thesis:.2f}",
                    "*" if "misprint" in f.labels else "",
                )
            )
    ours = (f"{unit}, modular", "trad.", "saved %")
    heads = ("scenario", "deployment", *ours, "thesis MB", "thesis %", "")
    title = f"{tasks} tasks, {counted}"
    return Grid(title, heads, rows, frozenset({"deployment", ""}))


def remarks(found: Sequence[Figure]) -> list[str]:
    """What the tables show, and what a reader must know beside them."""
    mine = [f for f in found if f.name == SAVING]
    fair = [f for f in mine if f.labels["counted"] == ALL_TASKS and f.labels["tasks"] == TASKS]
    best = max(fair, key=lambda f: f.value)
    worst = min(fair, key=lambda f: f.value)
    out = [
        f"{best.labels['model']}: modular deployment of {TASKS} tasks takes {_change(best)}, "
        f"{_where(best)}, at best, and {_change(worst)}, {_where(worst)}, at worst"
    ]
    thousand = {
        (f.labels["scenario"], f.mode): f.value
        for f in mine
        if f.labels["tasks"] == NUMBERS[-1] and f.labels["counted"] == ALL_TASKS
    }
    apart = max(abs(thousand[f.labels["scenario"], f.mode] - f.value) for f in fair)
    out.append(f"{NUMBERS[-1]} tasks: the savings move by {apart:.1f} points at most")
    marked = [f for f in mine if "misprint" in f.labels]
    places = dict.fromkeys((f.labels["scenario"], f.mode, f.labels["misprint"]) for f in marked)
    out += [f"* scenario {s}, {mode}: printed {cell}" for s, mode, cell in places]
    if any(f.labels["counted"] == AS_PRINTED for f in mine):
        out.append(
            "as printed: scenarios 1 and 5 hold 99 modular tasks beside 100 traditional ones, "
            "which flatters them; 'all tasks' has 100 on both sides"
        )
    return out


def mismatches(found: Iterable[Figure]) -> list[str]:
    """Cells of the as-printed tables that are not the thesis's to its last digit."""
    return [
        f"scenario {f.labels['scenario']}, {f.mode}: {f.labels['modular']:.1f}, {f.value:.3f}%"
        for f in found
        if f.labels.get("counted") == AS_PRINTED
        and (
            round(f.labels["modular"]) != f.labels["thesis_mb"]
            or abs(f.value - f.labels["thesis"]) > 0.006
        )
    ]


def _change(f: Figure) -> str:
    return f"{abs(f.value):.1f}% {'less' if f.value >= 0 else 'more'} memory than traditional"


def _where(f: Figure) -> str:
    return f"scenario {f.labels['scenario']} ({f.mode})"


def draw(found: Sequence[Figure]) -> Any:
    """Savings at 100 tasks as bars; the thesis's as marks on them.

    Raises:
        SystemError_: MISSING_EXTRA without matplotlib.
    """
    page = new_page(10, 3.8)
    ax = page.subplots()
    fair = [
        f
        for f in found
        if f.name == SAVING and f.labels["counted"] == ALL_TASKS and f.labels["tasks"] == TASKS
    ]
    for i, (fusion, colour) in enumerate(zip(Fusion, _COLOURS, strict=True)):
        mine = [f for f in fair if f.mode == fusion]
        xs = [f.labels["scenario"] + (i - 1) * 0.26 for f in mine]
        ax.bar(xs, [f.value for f in mine], 0.24, color=colour, label=str(fusion))
        marks = [(x, f.labels["thesis"]) for x, f in zip(xs, mine, strict=True) if _known(f)]
        if marks:
            label = "the thesis's" if i == len(Fusion) - 1 else None
            ax.plot([x for x, _ in marks], [y for _, y in marks], "k_", ms=9, label=label)
    ax.axhline(0, color="black", linewidth=0.8)
    ax.set_xticks([s.number for s in SCENARIOS])
    ax.set(xlabel="scenario", ylabel="memory saved, %", title=fair[0].labels["model"])
    ax.legend(fontsize=8, frameon=False, ncols=4)
    ax.spines[["top", "right"]].set_visible(False)
    return page


def _known(f: Figure) -> bool:
    return "thesis" in f.labels


def fusion_note(found: Occupancy) -> str:
    """How well eq. 4.13's idea holds here: a fused process beside the sum of its blocks."""
    measured, predicted = found.processes[LAST], found.predicted(LAST)
    return (
        f"{process_name(LAST)} in one process: {digits(measured)} {found.unit}, by the sum of "
        f"its blocks {digits(predicted)} (C = {digits(found.context)} {found.unit})"
    )
