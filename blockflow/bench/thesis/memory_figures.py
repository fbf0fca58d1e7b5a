"""From occupancies to figures, tables, the line that says what they show, and the picture. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from blockflow.bench.canvas import new_page
from blockflow.bench.grid import Grid, Rows, bounds, digits, with_bounds
from blockflow.bench.results import MORE_IS_BETTER, Figure, interval_figure
from blockflow.bench.statistics import (
    MIN_PAIRS,
    Interval,
    median_interval,
    noise_of,
    ratio_interval,
)
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

LESS, MORE = "less", "more"
SAME, TOO_FEW = "not told apart", "too few rounds to conclude"
"""Verdicts on a measured deployment beside the traditional one."""

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
    rounds: Sequence[Occupancy], table: ThesisTable | None, *, constants_of_thesis: bool
) -> list[Figure]:
    """Scenario by scenario, the three fusions, for all numbers of tasks.

    Every round of measured processes makes a deployment of each kind: what is said is the median of
    the savings, with its interval. The thesis's constants are one, and exact.

    Beside ours stands the thesis's saving (its table is for 100 tasks and finds "no particular
    differences" for 1000), corrected where the cell is a misprint.
    """
    out: list[Figure] = []
    if constants_of_thesis:
        for s in SCENARIOS:
            counts = table_counts(s.number)
            out += _row(rounds, table, s.number, TASKS, counts, AS_PRINTED)
    for tasks in NUMBERS:
        for s in SCENARIOS:
            out += _row(rounds, table, s.number, tasks, s.counts(tasks), ALL_TASKS)
    return out if constants_of_thesis else [_judged(f, rounds) for f in out]


def _judged(f: Figure, rounds: Sequence[Occupancy]) -> Figure:
    """With the noise and the verdict of what was measured."""
    counts, fusion = SCENARIOS[f.labels["scenario"] - 1].counts(f.labels["tasks"]), Fusion(f.mode)
    modular = [found.modular(counts, fusion) for found in rounds]
    whole = [found.traditional(counts.total) for found in rounds]
    noise = max(repeated(modular), repeated(whole))
    told = verdict(ratio_interval(whole, modular), noise)
    return replace(f, labels={**f.labels, "noise": noise, "verdict": told})


def _row(
    rounds: Sequence[Occupancy],
    table: ThesisTable | None,
    number: int,
    tasks: int,
    counts: Counts,
    counted: str,
) -> Iterable[Figure]:
    whole = [found.traditional(tasks) for found in rounds]
    for fusion in Fusion:
        mine = [found.modular(counts, fusion) for found in rounds]
        labels: dict[str, Any] = {
            "model": rounds[0].model,
            "scenario": number,
            "tasks": tasks,
            "counted": counted,
            "modular": round(median_interval(mine).value, 3),
            "traditional": round(median_interval(whole).value, 3),
            "memory_unit": rounds[0].unit,
        }
        if table is not None:
            labels["table"] = table.label
            printed, meant = table.printed(number, fusion), table.meant(number, fusion)
            labels["thesis"] = meant.saving
            if tasks == TASKS:
                labels["thesis_mb"] = meant.mb
            if printed != meant:
                labels["misprint"] = f"{printed.mb} MB, {printed.saving}%"
        saved = median_interval([saving(m, w) for m, w in zip(mine, whole, strict=True)])
        yield interval_figure(SAVING, str(fusion), None, saved, "%", labels | MORE_IS_BETTER)


def repeated(samples: Sequence[float]) -> float:
    """The noise: how far the same thing was apart from one round to the next, as a share."""
    return noise_of(ratio_interval(samples[:-1], samples[1:])) if len(samples) > 1 else 0.0


def verdict(ratio: Interval, noise: float) -> str:
    """Whether modular deployment takes less memory than traditional, or more.

    Args:
        ratio: modular to traditional.
        noise: a share, :func:`repeated`.
    """
    if ratio.n < MIN_PAIRS:
        return TOO_FEW
    if ratio.high < 1 - noise:
        return LESS
    return MORE if ratio.low > 1 + noise else SAME


def scenario_grid() -> Grid:
    """Table 4.4: how tasks spread over the classes, and how many that makes."""
    rows = []
    for s in SCENARIOS:
        whole = [_tasks(s.counts(tasks)) for tasks in NUMBERS]
        rows.append((str(s.number), *map(str, s.weights), *whole, _tasks(table_counts(s.number))))
    heads = ("scenario", "class A %", "B %", "C %", *(f"of {tasks} tasks" for tasks in NUMBERS))
    title = "Table 4.4: the thesis's shares of the classes, and tasks of A, B and C"
    return Grid(title, (*heads, "as tables 4.5 and 4.6 have them"), rows)


def _tasks(counts: Counts) -> str:
    return f"{counts.a} + {counts.b} + {counts.c}"


def process_grid(found: Iterable[Figure]) -> Grid:
    """What every kind of process takes."""
    mine = [f for f in found if f.name == PROCESS]
    unit = mine[0].unit if mine else ""
    rows = Rows()
    for f in mine:
        low, high = (f.low, f.high) if f.n > 1 else (None, None)
        predicted = f.labels.get("sum_of_blocks")
        rows.row(
            f.mode,
            with_bounds(f.value, low, high, 1),
            "" if predicted is None else digits(predicted),
        )
    heads = ("process", unit, "by the sum of its blocks")
    model = mine[0].labels["model"] if mine else ""
    return Grid(f"Memory of one process, {model}", heads, rows, frozenset({"process"}))


def saving_grids(found: Iterable[Figure]) -> list[Grid]:
    """One table per number of tasks and way of counting, a row per scenario."""
    groups: dict[str, dict[int, list[Figure]]] = {}
    for f in (f for f in found if f.name == SAVING):
        scenarios = groups.setdefault(_title(f), {})
        scenarios.setdefault(f.labels["scenario"], []).append(f)
    return [_saving_grid(title, scenarios) for title, scenarios in groups.items()]


def _title(f: Figure) -> str:
    model, counted = f.labels["model"], f.labels["counted"]
    table = f"Table {f.labels['table']}: " if counted == AS_PRINTED else ""
    return f"{table}{model}, {f.labels['tasks']} tasks, {counted}"


def _saving_grid(title: str, scenarios: Mapping[int, Sequence[Figure]]) -> Grid:
    rows = Rows()
    unit = ""
    measured = any("verdict" in f.labels for figures in scenarios.values() for f in figures)
    for number, figures in scenarios.items():
        rows.section(number)
        for f in figures:
            unit = f.labels["memory_unit"]
            thesis, thesis_mb = f.labels.get("thesis"), f.labels.get("thesis_mb")
            rows.row(
                str(number),
                f.mode,
                f"{f.labels['modular']:.0f}",
                f"{f.labels['traditional']:.0f}",
                f"{f.value:.2f}",
                *((_bounds(f), f.labels["verdict"]) if measured else ()),
                "" if thesis_mb is None else str(thesis_mb),
                "" if thesis is None else f"{thesis:.2f}",
                "*" if "misprint" in f.labels else "",
            )
    judged = ("95%", "memory") if measured else ()
    ours = (f"{unit}, modular", "trad.", "saved %", *judged)
    heads = ("scenario", "deployment", *ours, "thesis MB", "thesis %", "")
    return Grid(title, heads, rows, frozenset({"deployment", "memory", ""}))


def _bounds(f: Figure) -> str:
    """Savings may be negative: no hyphen between them."""
    return f"{f.low:.1f} to {f.high:.1f}"


def remarks(found: Sequence[Figure]) -> list[str]:
    """What the tables show of one model, and what a reader must know beside them."""
    mine = [f for f in found if f.name == SAVING]
    fair = [f for f in mine if f.labels["counted"] == ALL_TASKS and f.labels["tasks"] == TASKS]
    best = max(fair, key=lambda f: f.value)
    worst = min(fair, key=lambda f: f.value)
    model = best.labels["model"]
    out = [
        f"{model}: {_counted(fair)}modular deployment of {TASKS} tasks beside traditional: "
        f"{_told(best)}, {_where(best)}, at best, and {_told(worst)}, {_where(worst)}, at worst"
    ]
    thousand = {
        (f.labels["scenario"], f.mode): f.value
        for f in mine
        if f.labels["tasks"] == NUMBERS[-1] and f.labels["counted"] == ALL_TASKS
    }
    apart = max(abs(thousand[f.labels["scenario"], f.mode] - f.value) for f in fair)
    out.append(f"{model}, {NUMBERS[-1]} tasks: the savings move by {apart:.1f} points at most")
    if "noise" in best.labels:
        most = max(f.labels["noise"] for f in fair)
        out.append(
            f"{best.n} starts of every process; equal deployments of two rounds differed by up to "
            f"{most:.1%} (noise): nothing is concluded from less"
        )
    marked = [f for f in mine if "misprint" in f.labels]
    places = dict.fromkeys((f.labels["scenario"], f.mode, f.labels["misprint"]) for f in marked)
    out += [f"* {model}, scenario {s}, {mode}: printed {cell}" for s, mode, cell in places]
    if any(f.labels["counted"] == AS_PRINTED for f in mine):
        out.append(
            "as printed: scenarios 1 and 5 hold 99 modular tasks beside 100 traditional ones, "
            "which flatters them; 'all tasks' has 100 on both sides"
        )
    return out


def mismatches(found: Iterable[Figure]) -> list[str]:
    """Cells of the as-printed tables that are not the thesis's to its last digit."""
    return [
        f"table {f.labels['table']}, {_where(f)}: {f.labels['modular']:.1f}, {f.value:.3f}%"
        for f in found
        if f.labels.get("counted") == AS_PRINTED
        and (
            round(f.labels["modular"]) != f.labels["thesis_mb"]
            or abs(f.value - f.labels["thesis"]) > 0.006
        )
    ]


def _counted(fair: Sequence[Figure]) -> str:
    """How many deployments came out how; '' where nothing was measured."""
    verdicts = Counter(f.labels["verdict"] for f in fair if "verdict" in f.labels)
    if not verdicts:
        return ""
    parts = [f"{n} {verdict}" for verdict, n in verdicts.most_common()]
    return f"memory of {verdicts.total()} deployments: {', '.join(parts)}; "


def _told(f: Figure) -> str:
    """A saving, and whether this run can tell it from none."""
    change = f"{abs(f.value):.1f}% {LESS if f.value >= 0 else MORE} memory"
    if "verdict" not in f.labels:
        return change
    inside = f"95% {_bounds(f)} saved, n = {f.n}"
    if f.labels["verdict"] in (LESS, MORE):
        return f"{change} ({inside})"
    return f"{f.labels['verdict']} ({change}, {inside}, noise {f.labels['noise']:.1%})"


def _where(f: Figure) -> str:
    return f"scenario {f.labels['scenario']} ({f.mode})"


def draw(found: Sequence[Figure]) -> Any:
    """Savings at 100 tasks as bars; the thesis's as marks on them."""
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
        values = [f.value for f in mine]
        ax.bar(xs, values, 0.24, color=colour, label=str(fusion))
        lows = [f.value if f.low is None else f.low for f in mine]
        highs = [f.value if f.high is None else f.high for f in mine]
        ax.vlines(xs, lows, highs, color="#444", linewidth=1)
        marks = [(x, f.labels["thesis"]) for x, f in zip(xs, mine, strict=True) if _known(f)]
        if marks:
            label = "the thesis's" if i == len(Fusion) - 1 else None
            ax.plot([x for x, _ in marks], [y for _, y in marks], "k_", ms=9, label=label)
    ax.axhline(0, color="black", linewidth=0.8)
    ax.set_xticks([s.number for s in SCENARIOS])
    ax.set(xlabel="scenario", ylabel="memory saved, %", title=fair[0].labels["model"])
    page.legend(loc="outside upper center", fontsize=8, frameon=False, ncols=4)
    return page


def _known(f: Figure) -> bool:
    return "thesis" in f.labels


def fusion_note(rounds: Sequence[Occupancy]) -> str:
    """How well eq. 4.13's idea holds here: a fused process beside the sum of its blocks."""
    measured = _interval([found.processes[LAST] for found in rounds])
    predicted = _interval([found.predicted(LAST) for found in rounds])
    context, unit = _interval([found.context for found in rounds]), rounds[0].unit
    return (
        f"{rounds[0].model}: {process_name(LAST)} in one process: {measured} {unit}, by the sum of "
        f"its blocks {predicted} (C = {context} {unit})"
    )


def _interval(samples: Sequence[float]) -> str:
    found = median_interval(samples)
    if found.n == 1:
        return digits(found.value)
    return f"{digits(found.value)} (95% {bounds(found.low, found.high)})"
