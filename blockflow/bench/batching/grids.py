"""The batching benchmark's tables."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from blockflow.bench.batching import figures as f
from blockflow.bench.batching.plan import INPUT, LBCI, LBCI_ARM, LOAD, OPERATOR, SHARED
from blockflow.bench.grid import BREAK, Grid, bounds, digits, ms, with_bounds
from blockflow.bench.results import Figure

_DIVERSITIES = (LOAD, INPUT, OPERATOR)


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
    rows: list[tuple[str, ...]] = []
    last = None
    for g in index.of(f.TIME, *experiments):
        experiment, load = g.labels["experiment"], g.labels["load"]
        rate = index.at(f.RATE, g.mode, experiment, load)
        over = index.at(f.OVER, g.mode, experiment, load)
        simulated = index.at(f.SIMULATED, g.mode, experiment, load)
        if rows and last != (experiment, load):
            rows.append(BREAK)
        last = (experiment, load)
        rows.append(
            (
                experiment,
                load,
                f"{g.labels['x_serial']:.2f}",
                g.mode,
                ms(g.value),
                ms(g.p99_ms),
                digits(rate.value) if rate else "",
                f"{over.value:.1f}" if over else "",
                ms(simulated.value if simulated else None),
                str(g.n),
            )
        )
    heads = ("model", "load", "x serial", "policy", "mean ms", "p99 ms", "rows/s", "over, %")
    return Grid(title, (*heads, "simulated", "n"), rows, frozenset({"model", "load", "policy"}))


def lbci_grid(found: Iterable[Figure]) -> Grid:
    """Single-sample requests: every policy at every load."""
    return _times(found, "LBCI: AlexNet, single-sample requests", (LBCI,))


def dvabatch_grid(found: Iterable[Figure]) -> Grid:
    """The three diversities: every policy at every load."""
    return _times(found, "DVABatch: load, input and operator diversity", _DIVERSITIES)


def _ratios(found: Iterable[Figure], title: str, experiments: Sequence[str]) -> Grid:
    index = Index(found)
    rows: list[tuple[str, ...]] = []
    for g in index.of(f.TIME_RATIO, *experiments):
        experiment, load, base = g.labels["experiment"], g.labels["load"], g.labels["base"]
        row = [experiment, load, base]
        for name in (f.TIME_RATIO, f.TAIL_RATIO, f.RATE_RATIO):
            one = index.at(name, g.mode, experiment, load, base)
            row += [change(one.value if one else None), change(told(one))]
            if name == f.TIME_RATIO:
                row.insert(-1, f"{change(g.low)}..{change(g.high)}")
        rows.append((*row, g.labels.get("verdict", "")))
    heads = (
        "model",
        "load",
        "beside",
        "mean",
        "visits",
        "paper",
        "p99",
        "paper ",
        "rows/s",
        "paper  ",
    )
    return Grid(title, (*heads, "verdict"), rows, frozenset({"model", "load", "beside", "verdict"}))


def lbci_ratio_grid(found: Iterable[Figure]) -> Grid:
    """LBCI beside the others, with the paper's change."""
    return _ratios(found, "LBCI beside", (LBCI,))


def dvabatch_ratio_grid(found: Iterable[Figure]) -> Grid:
    """DVABatch beside the others, with the paper's change."""
    return _ratios(found, "DVABatch beside", _DIVERSITIES)


def size_grid(found: Iterable[Figure]) -> Grid:
    """Multi-sample requests: the time of a test, LBCI beside serial."""
    index = Index(found)
    rows = []
    for g in index.of(f.TEST_RATIO, LBCI):
        load, base = g.labels["load"], g.labels["base"]
        times = [index.at(f.TEST, arm, LBCI, load) for arm in (base, g.mode)]
        rows.append(
            (
                load,
                f"1-{g.labels['largest']}",
                *(ms(t.value / 1e3 if t else None) for t in times),
                with_bounds(g.value, g.low, g.high, 2),
                change(told(g)),
                g.labels.get("verdict", ""),
                str(g.n),
            )
        )
    heads = ("data", "rows", "serial s", "LBCI s", "ratio", "paper's", "verdict", "n")
    return Grid("LBCI: multi-sample requests", heads, rows, frozenset({"data", "verdict"}))


def peak_grid(found: Iterable[Figure]) -> Grid:
    """The highest rate whose 99th percentile stays within the bound."""
    index = Index(found)
    rows = []
    for g in index.of(f.PEAK, *_DIVERSITIES, SHARED):
        experiment = g.labels["experiment"]
        ratios = [r for r in index.of(f.PEAK_RATIO, experiment) if r.mode == g.mode]
        rows.append(
            (
                experiment,
                g.mode,
                digits(g.labels["bound_ms"]),
                digits(g.value),
                bounds(g.low, g.high),
                ", ".join(f"{r.value:.2f} x {r.labels['base']}" for r in ratios),
            )
        )
    heads = ("model", "policy", "bound ms", "rows/s", "between", "beside")
    return Grid("Peak within the bound", heads, rows, frozenset({"model", "policy", "beside"}))


def shared_grid(found: Iterable[Figure]) -> Grid:
    """The tasks of one trunk, saturated; memory of the worker processes."""
    index = Index(found)
    rows = []
    for g in index.of(f.SATURATED, SHARED):
        share = next((r for r in index.of(f.OF_BOUND, SHARED) if r.mode == g.mode), None)
        memory = {
            m.labels["kind"]: m for m in index.of(f.MEMORY, SHARED) if m.mode == g.labels["home"]
        }
        rows.append(
            (
                g.mode,
                digits(g.value),
                bounds(g.low, g.high),
                f"{share.value:.2f}" if share else "",
                str(memory["pss"].n) if memory else "",
                *(digits(memory[k].value) if memory else "" for k in ("weights", "uss", "pss")),
            )
        )
    heads = ("deployment", "rows/s", "95%", "of bound", "processes")
    sizes = ("weights", "private", "PSS MiB")
    return Grid("Tasks on one trunk", heads + sizes, rows, frozenset({"deployment"}))


def cost_grid(found: Iterable[Figure]) -> Grid:
    """What scheduling costs: CPU time per decision, and the time of a request that is alone."""
    index = Index(found)
    alone = {g.mode: g for g in index.of(f.ALONE_RATIO, "cost")}
    spent = {g.mode: g for g in index.of(f.DECISION, "cost")}
    rows = []
    for name in dict.fromkeys([*spent, *alone]):
        cost, ratio = spent.get(name), alone.get(name)
        rows.append(
            (
                name,
                digits(cost.value) if cost else "",
                cost.labels["verdict"] if cost else "",
                with_bounds(ratio.value, ratio.low, ratio.high) if ratio else "",
                ratio.labels["verdict"] if ratio else "",
            )
        )
    heads = ("policy", "us", "<= 50", "alone, x none", "<= 1.02")
    return Grid("Cost of scheduling", heads, rows, frozenset({"policy", "<= 50", "<= 1.02"}))


def aim_grid(found: Iterable[Figure]) -> Grid:
    """The aims and what this run says of them."""
    figures = list(found)
    rows = []
    verdicts = f.load_verdicts(figures, LBCI, LBCI_ARM)
    if verdicts:
        met = sum(v == "met" for v in verdicts.values())
        rows.append(
            (
                "LBCI as good as in its paper",
                f"{met} of {len(verdicts)} loads",
                "",
                ">= 3",
                "met" if met >= 3 else "missed",
            )
        )
    for g in figures:
        if "verdict" not in g.labels or g.name not in (f.OF_BOUND, f.PEAK_OF_BOUND, f.MEMORY_RATIO):
            continue
        sign = ">=" if g.labels.get("at_least") else "<="
        rows.append(
            (
                f"{g.mode}: {g.name}",
                digits(g.value),
                bounds(g.low, g.high),
                f"{sign} {g.labels['goal']:g}",
                g.labels["verdict"],
            )
        )
    heads = ("aim", "measured", "95%", "goal", "verdict")
    return Grid("Aims", heads, rows, frozenset({"aim", "verdict"}))


def note_grid(found: Iterable[Figure]) -> Grid:
    """What a reader must know beside the tables."""
    rows = [(g.labels["experiment"], g.mode) for g in found if g.name == f.NOTE]
    return Grid("Notes", ("model", "note"), rows, frozenset({"model", "note"}))


def remarks(found: Iterable[Figure]) -> list[str]:
    """The same for a terminal, which breaks long lines."""
    return [f"{model}: {text}" for model, text in note_grid(found).rows]
