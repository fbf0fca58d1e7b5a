"""The batching benchmark's tables."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from blockflow.bench.batching import figures as f
from blockflow.bench.batching.plan import (
    COST,
    DVABATCH,
    HEADS,
    INPUT,
    LBCI,
    LBCI_ARM,
    LOAD,
    OPERATOR,
    PLAIN,
    SHARED,
    WITH_CLASSES,
)
from blockflow.bench.decisions import DECISION, TURN
from blockflow.bench.grid import Grid, Rows, bounds, digits, ms, with_bounds
from blockflow.bench.results import Figure
from blockflow.bench.statistics import Verdict

_DIVERSITIES = (LOAD, INPUT, OPERATOR)
_TOLD_OF = {
    f.OVER: ("load",),
    f.CLOSED_RATIO: ("base",),
    f.TEST_RATIO: ("load", "base"),
    f.PEAK_RATIO: ("experiment", "base"),
    f.OF_BOUND: ("experiment", "own"),
    f.PEAK_OF_BOUND: ("experiment",),
    f.MEMORY_RATIO: ("experiment",),
    DECISION: (),
    TURN: (),
    f.ALONE_RATIO: (),
}
"""Aims that are one figure each, and which of its labels tell it from others of its name."""


class Index:
    """Figures by name, arm, experiment, load and base."""

    def __init__(self, found: Iterable[Figure]) -> None:
        self.figures = list(found)
        self._by = {
            (
                g.name,
                g.mode,
                g.labels.get("experiment"),
                g.labels.get("load"),
                g.labels.get("base"),
            ): g
            for g in self.figures
        }

    def at(
        self, name: str, arm: str, experiment: str, load: str | None = None, base: str | None = None
    ) -> Figure | None:
        return self._by.get((name, arm, experiment, load, base))

    def of(self, name: str, *experiments: str) -> list[Figure]:
        """All figures of a name, in the order of measuring."""
        return [
            g for g in self.figures if g.name == name and g.labels.get("experiment") in experiments
        ]


def change(ratio: float | None) -> str:
    """A ratio as a person says it: ``-26%``."""
    return "" if ratio is None else f"{100 * (ratio - 1):+.0f}%"


def told(figure: Figure | None) -> float | None:
    """What the paper says of a ratio."""
    return None if figure is None else figure.labels.get("paper")


def _times(found: Iterable[Figure], title: str, experiments: Sequence[str]) -> Grid:
    index = Index(found)
    rows = Rows()
    for g in index.of(f.TIME, *experiments):
        experiment, load = g.labels["experiment"], g.labels["load"]
        rate = index.at(f.RATE, g.mode, experiment, load)
        over = index.at(f.OVER, g.mode, experiment, load)
        simulated = index.at(f.SIMULATED, g.mode, experiment, load)
        over_too = index.at(f.SIMULATED_OVER, g.mode, experiment, load)
        rows.section((experiment, load))
        rows.row(
            experiment,
            load,
            f"{g.labels['x_serial']:.2f}",
            g.mode,
            ms(g.value),
            ms(g.p99_ms),
            digits(rate.value) if rate else "",
            f"{over.value:.1f}" if over else "",
            ms(simulated.value if simulated else None),
            f"{over_too.value:.1f}" if over_too else "",
            str(g.n),
        )
    heads = ("model", "load", "x serial", "policy", "mean ms", "p99 ms", "rows/s", "over, %")
    more = ("simulated", "over ", "n")
    return Grid(title, (*heads, *more), rows, frozenset({"model", "load", "policy"}))


def lbci_grid(found: Iterable[Figure]) -> Grid:
    """Single-sample requests: every policy at every load."""
    return _times(found, "LBCI: AlexNet, single-sample requests", (LBCI,))


def dvabatch_grid(found: Iterable[Figure]) -> Grid:
    """The three diversities: every policy at every load."""
    return _times(found, "DVABatch: load, input and operator diversity", _DIVERSITIES)


def _ratios(found: Iterable[Figure], title: str, experiments: Sequence[str]) -> Grid:
    index = Index(found)
    rows = Rows()
    for g in index.of(f.TIME_RATIO, *experiments):
        experiment, load, base = g.labels["experiment"], g.labels["load"], g.labels["base"]
        tail, rate = (
            index.at(name, g.mode, experiment, load, base) for name in (f.TAIL_RATIO, f.RATE_RATIO)
        )
        rows.row(
            experiment,
            load,
            base,
            change(g.value),
            f"{change(g.low)}..{change(g.high)}",
            change(told(g)),
            str(g.n),
            change(tail.value if tail else None),
            change(told(tail)),
            change(rate.value if rate else None),
            change(rate.labels.get("possible") if rate else None),
            change(told(rate)),
            g.labels.get("verdict", ""),
        )
    heads = ("model", "load", "beside", "mean", "visits", "paper", "n", "p99", "paper ", "rows/s")
    more = ("at most", "paper  ", "verdict")
    left = frozenset({"model", "load", "beside", "verdict"})
    return Grid(title, (*heads, *more), rows, left)


def lbci_ratio_grid(found: Iterable[Figure]) -> Grid:
    """LBCI beside the others, with the paper's change."""
    return _ratios(found, "LBCI beside", (LBCI,))


def dvabatch_ratio_grid(found: Iterable[Figure]) -> Grid:
    """DVABatch beside the others, with the paper's change."""
    return _ratios(found, "DVABatch beside", _DIVERSITIES)


def closed_grid(found: Iterable[Figure]) -> Grid:
    """What each arm serves with always the same number under way."""
    index = Index(found)
    rows = Rows()
    for g in index.of(f.CLOSED, LBCI):
        ratio = next(
            (r for r in index.of(f.CLOSED_RATIO, LBCI) if r.labels["base"] == g.mode), None
        )
        rows.row(
            g.mode,
            digits(g.value),
            bounds(g.low, g.high),
            str(g.n),
            with_bounds(ratio.value, ratio.low, ratio.high, 2) if ratio else "",
            change(told(ratio)),
            ratio.labels.get("verdict", "") if ratio else "",
        )
    heads = ("policy", "rows/s", "95%", "n", "LBCI, x this", "paper", "verdict")
    return Grid("LBCI: closed loop", heads, rows, frozenset({"policy", "verdict"}))


def delay_grid(found: Iterable[Figure]) -> Grid:
    """The delays that were tried for the windows."""
    index = Index(found)
    rows = Rows()
    for g in index.of(f.CANDIDATE, *_DIVERSITIES):
        labels = g.labels
        rows.row(
            labels["experiment"],
            g.mode,
            digits(labels["delay_ms"]),
            digits(labels["rate"]),
            f"{labels['over']:.1f}",
            ms(g.value),
            str(g.n),
            "chosen" if labels["chosen"] else "",
        )
    heads = ("model", "policy", "delay ms", "at, 1/s", "over, %", "mean ms", "n", "")
    left = frozenset({"model", "policy", ""})
    return Grid("Delays that were tried", heads, rows, left)


def served_grid(found: Iterable[Figure]) -> Grid:
    """A row's time in the running system beside its profiles."""
    index = Index(found)
    all_of = index.of(f.SERVED, LBCI, *_DIVERSITIES, COST)
    ways = list(dict.fromkeys(g.mode for g in all_of))
    by = {(g.labels["experiment"], g.mode): g for g in all_of}
    rows = [
        (
            experiment,
            *(f"{by[experiment, w].value:.2f}" if (experiment, w) in by else "" for w in ways),
        )
        for experiment in dict.fromkeys(g.labels["experiment"] for g in all_of)
    ]
    title = "A row's time, one by one, beside its profiles"
    return Grid(title, ("model", *ways), rows, frozenset({"model"}))


def size_grid(found: Iterable[Figure]) -> Grid:
    """Multi-sample requests: the time of a test, LBCI beside serial."""
    index = Index(found)
    rows = Rows()
    for g in index.of(f.TEST_RATIO, LBCI):
        load, base = g.labels["load"], g.labels["base"]
        times = [index.at(f.TEST, arm, LBCI, load) for arm in (base, g.mode)]
        rows.row(
            load,
            f"1-{g.labels['largest']}",
            *(ms(t.value / 1e3 if t else None) for t in times),
            with_bounds(g.value, g.low, g.high, 2),
            change(told(g)),
            g.labels.get("verdict", ""),
            str(g.n),
        )
    heads = ("data", "rows", "serial s", "LBCI s", "ratio", "paper's", "verdict", "n")
    return Grid("LBCI: multi-sample requests", heads, rows, frozenset({"data", "verdict"}))


def peak_grid(found: Iterable[Figure]) -> Grid:
    """The highest rate whose 99th percentile stays within the bound."""
    index = Index(found)
    rows = Rows()
    for g in index.of(f.PEAK, *_DIVERSITIES, SHARED, HEADS):
        experiment = g.labels["experiment"]
        ratios = [r for r in index.of(f.PEAK_RATIO, experiment) if r.mode == g.mode]
        rows.row(
            experiment,
            g.mode,
            digits(g.labels["bound_ms"]),
            digits(g.value),
            bounds(g.low, g.high),
            f"{g.n}" if g.labels.get("confirmed", True) else f"{g.n}, unconfirmed",
            ", ".join(_beside(r) for r in ratios),
        )
    heads = ("model", "policy", "bound ms", "rows/s", "between", "probes", "beside")
    left = frozenset({"model", "policy", "beside"})
    return Grid("Peak within the bound", heads, rows, left)


def _beside(ratio: Figure) -> str:
    """A ratio of peaks with its bracket and, where there is an aim, what became of it."""
    verdict = ratio.labels.get("verdict")
    text = f"{ratio.value:.2f} ({bounds(ratio.low, ratio.high)}) x {ratio.labels['base']}"
    return f"{text}: {verdict}" if verdict else text


def shared_grid(found: Iterable[Figure]) -> Grid:
    """The tasks of one trunk, saturated; memory of the worker processes."""
    return _trunk_grid("Tasks on one trunk", found, SHARED)


def heads_grid(found: Iterable[Figure]) -> Grid:
    """The same where the tasks part at the classifier."""
    return _trunk_grid("Tasks on one trunk, each with a classifier of its own", found, HEADS)


def _trunk_grid(title: str, found: Iterable[Figure], experiment: str) -> Grid:
    index = Index(found)
    rows = Rows()
    for g in index.of(f.SATURATED, experiment):
        share = next((r for r in index.of(f.OF_BOUND, experiment) if r.mode == g.mode), None)
        sizes = index.of(f.MEMORY, experiment)
        memory = {m.labels["kind"]: m for m in sizes if m.mode == g.labels["home"]}
        rows.row(
            g.mode,
            digits(g.value),
            bounds(g.low, g.high),
            f"{share.value:.2f}" if share else "",
            str(memory["pss"].n) if memory else "",
            *(digits(memory[k].value) if memory else "" for k in ("weights", "uss", "pss")),
        )
    heads = ("deployment", "rows/s", "95%", "of bound", "processes")
    kinds = ("weights", "private", "PSS MiB")
    return Grid(title, heads + kinds, rows, frozenset({"deployment"}))


def cost_grid(found: Iterable[Figure]) -> Grid:
    """What scheduling costs: CPU time per decision, and the time of a request that is alone."""
    index = Index(found)
    alone = {g.mode: g for g in index.of(f.ALONE_RATIO, COST)}
    spent = {g.mode: g for g in index.of(DECISION, COST)}
    turns = {g.mode: g for g in index.of(TURN, COST)}
    rows = Rows()
    for name in dict.fromkeys([*spent, *alone]):
        ratio = alone.get(name)
        rows.row(
            name,
            *_cost_cells(spent.get(name)),
            *_cost_cells(turns.get(name)),
            with_bounds(ratio.value, ratio.low, ratio.high) if ratio else "",
            str(ratio.n) if ratio else "",
            ratio.labels.get("verdict", "") if ratio else "",
        )
    us, turn = "decision us (p99)", "turn us (p99)"
    heads = ("policy", us, "<= 50", turn, "<= 50 ", "alone, x none", "n", "<= 1.02")
    left = frozenset({"policy", "<= 50", "<= 50 ", "<= 1.02"})
    return Grid("Cost of scheduling", heads, rows, left)


def _cost_cells(figure: Figure | None) -> tuple[str, str]:
    """The mean is judged: what a clock or an interrupt adds to one decision is in the p99, too."""
    if figure is None:
        return "", ""
    return f"{digits(figure.value)} ({digits(figure.labels['p99_us'])})", figure.labels["verdict"]


def aim_grid(found: Iterable[Figure]) -> Grid:
    """The aims and what this run says of them."""
    figures = list(found)
    rows = Rows()
    rows += _load_aim("LBCI as good as in its paper", figures, LBCI, LBCI_ARM, (), 3)
    for name in _DIVERSITIES:
        for bases, what in ((PLAIN, "the windows"), (WITH_CLASSES, "windows with its classes")):
            for ratio, how in ((f.TIME_RATIO, "no slower"), (f.TAIL_RATIO, "p99 no longer")):
                text = f"{name}: DVABatch {how} than {what}"
                rows += _load_aim(text, figures, name, DVABATCH, bases, 3, ratio)
    for g in figures:
        if "verdict" not in g.labels or g.name not in _TOLD_OF:
            continue
        sign = ">=" if g.labels.get("at_least") else "<="
        told_of = "".join(f" {g.labels[x]}" for x in _TOLD_OF[g.name] if x in g.labels)
        unit = "" if g.unit == "x" else f", {g.unit}"
        rows.row(
            f"{g.mode}: {g.name}{told_of}{unit}",
            digits(g.value),
            bounds(g.low, g.high),
            f"{sign} {g.labels['goal']:g}",
            g.labels["verdict"],
        )
    heads = ("aim", "measured", "95%", "goal", "verdict")
    return Grid("Aims", heads, rows, frozenset({"aim", "verdict"}))


def _load_aim(
    text: str,
    found: Sequence[Figure],
    experiment: str,
    arm: str,
    bases: Sequence[str],
    wanted: int,
    name: str = f.TIME_RATIO,
) -> list[tuple[str, ...]]:
    """A row of the aims: at how many loads; none where nothing was measured."""
    verdicts = f.load_verdicts(found, experiment, arm, bases, name)
    if not verdicts:
        return []
    met = sum(v == Verdict.MET for v in verdicts.values())
    undecided = sum(v == Verdict.NOISE for v in verdicts.values())
    open_ = f", {undecided} undecided" if undecided else ""
    verdict = f.enough(list(verdicts.values()), wanted)
    return [(text, f"{met} of {len(verdicts)} loads{open_}", "", f">= {wanted}", verdict.value)]


def note_grid(found: Iterable[Figure]) -> Grid:
    """What a reader must know beside the tables."""
    rows = [(g.labels["experiment"], g.mode) for g in found if g.name == f.NOTE]
    return Grid("Notes", ("model", "note"), rows, frozenset({"model", "note"}))


def remarks(found: Iterable[Figure]) -> list[str]:
    """The same for a terminal, which breaks long lines."""
    return [f"{model}: {text}" for model, text in note_grid(found).rows]
