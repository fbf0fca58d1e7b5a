"""Each block by itself, in three forms of its artifact (table 4.2), and its size (figure 4.2).

The thesis calls each block a thousand times on the idle machine, scripted and traced. Here a
process per form has all blocks and calls them in turn, with nothing in between; the forms take
turns, and the first one takes part twice.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from statistics import stdev
from typing import Any

from blockflow.bench.grid import Grid, Rows, digits, with_bounds
from blockflow.bench.in_process import Chain, InProcess
from blockflow.bench.results import Figure, interval_figure, latency_figure
from blockflow.bench.thesis import offline_memory
from blockflow.bench.thesis.bars import draw_bars
from blockflow.bench.thesis.beside import AGAIN, Rounds, compared, thesis, thesis_cell
from blockflow.bench.thesis.experiment import Context, Data, Experiment, Findings, Plot, Settings
from blockflow.bench.thesis.offline_table import SCRIPTED, SOURCE, TRACED, cut
from blockflow.bench.turns import in_turn
from blockflow.repository.repository import BlockRepository

EXPORTED = "exported"
FORMS: Mapping[str, str] = {
    SCRIPTED: "torchscript-scripted",
    TRACED: "torchscript",
    EXPORTED: "exported",
}
"""Form -> label of the contender that runs it."""

TIME, SHARE, SIZE, ALLOCATED = "forward", "share of the sum", "parameters", "memory of the block"
STD = "forward, standard deviation"
SUM = "sum of the blocks"

Samples = Mapping[str, Sequence[tuple[float, ...]]]
"""Form -> milliseconds of each block, one tuple per round."""


def run(context: Context) -> Findings:
    chains = {form: context.chain(label) for form, label in FORMS.items()}
    rounds, starts = context.pick((100, 5), (6, 1))
    done = partial(findings, sizes=sizes(chains[SCRIPTED]), settings=context.settings)
    times = _times(context, chains, rounds, lambda found: context.keep(done(found).figures))
    context.keep(done(times).figures)
    # Not beside the processes of the times: they would share the artifacts' pages.
    with context.step("the memory of each block", starts) as advance:
        memory = offline_memory.measure(
            *(chains, starts, advance),
            lambda so_far: context.keep(done(times, memory=so_far).figures),
        )
    return done(times, memory=memory)


def _times(
    context: Context,
    chains: Mapping[str, Chain],
    rounds: int,
    broken: Callable[[Samples], None],
) -> Samples:
    """Milliseconds of each block in each form, called in turns; the first form twice."""
    ways = {**chains, SCRIPTED + AGAIN: chains[SCRIPTED]}
    with ExitStack() as stack:
        with context.step("loading the blocks", None):
            others = {w: stack.enter_context(InProcess(chain)) for w, chain in ways.items()}
        advance = stack.enter_context(context.step("each block by itself", rounds + 1))
        calls = {way: partial(other.run, 1) for way, other in others.items()}
        return in_turn(calls, rounds, advance, broken=broken, warm_up=1)


@dataclass(frozen=True, slots=True)
class Size:
    """Of a block: MB of its parameters and buffers, as stored, and the number of parameters."""

    megabytes: float
    parameters: int


def sizes(chain: Chain) -> list[Size]:
    """Of each block."""
    infos = [BlockRepository(chain.repository).info(name) for name in chain.blocks]
    return [Size(info.state_bytes / 1e6, info.parameters) for info in infos]


def findings(
    samples: Samples,
    sizes: Sequence[Size],
    settings: Settings,
    memory: offline_memory.Found | None = None,
) -> Findings:
    """Figures, tables, plots and the line. Pure.

    Args:
        sizes: of each block.
        settings: of the call.
        memory: of each block's process; None while it is not measured yet.
    """
    sums = Rounds({way: [sum(one) for one in found] for way, found in samples.items()})
    blocks = tuple(f"block{i + 1}" for i in range(len(sizes)))
    figures: list[Figure] = []
    for form in FORMS:
        kept, rows = samples[form][sums.cut :], cut(form)
        whole = sum(row.ms for row in rows.values())
        for i, block in enumerate(blocks):
            times = [one[i] for one in kept]
            row = rows.get(block)
            labels = {**settings.labels, "block": block}
            made = latency_figure(TIME, form, 1, times, labels)
            figures.append(thesis(made, row.ms if row else None, SOURCE))
            spread = stdev(times) if len(times) > 1 else 0.0
            made = Figure.of(STD, form, spread, "ms", len(times), labels, batch=1)
            figures.append(thesis(made, row.std_ms if row else None, SOURCE))
            share = [one[i] / sum(one) * 100 for one in kept]
            made = interval_figure(SHARE, form, 1, share, "%", labels)
            figures.append(thesis(made, row.ms / whole * 100 if row else None, SOURCE))
        made = latency_figure(SUM, form, 1, sums.of(form), settings.labels)
        figures.append(thesis(made, whole or None, SOURCE))
    scripted = cut(SCRIPTED)
    for block, size in zip(blocks, sizes, strict=True):
        labels = {**settings.labels, "block": block}
        made = Figure.of(ALLOCATED, block, size.megabytes, "MB", 1, labels)
        row = scripted.get(block)
        figures.append(thesis(made, row.allocated if row else None, SOURCE))
        millions = size.parameters / 1e6
        made = Figure.of(SIZE, block, millions, "million", 1, labels)
        figures.append(thesis(made, None, "figure 4.2"))
    tables = [_time_grid(figures, blocks), _size_grid(figures)]
    if memory is not None:
        taken = list(offline_memory.figures_of(memory, settings.labels))
        tables.append(offline_memory.grid(taken))
        figures += taken
    return Findings(
        says=_says(sums, sizes, blocks),
        figures=figures,
        tables=tables,
        plots=_plots(figures),
        data=[
            Data(
                "blocks",
                ("form", "round", *blocks),
                [(w, i, *one) for w, found in samples.items() for i, one in enumerate(found)],
            )
        ],
        notes=[
            "The thesis's times are a GPU's: the shares of the blocks are what can be compared. "
            "What torch allocates there holds activations beside the parameters.",
            "Memory by form is measured on the CPU, whatever the device: a process's private "
            "pages, with what the form's own runtime takes. The thesis's is a GPU's, of tensors.",
        ],
    )


def _says(sums: Rounds, sizes: Sequence[Size], blocks: Sequence[str]) -> str:
    def beside(form: str) -> str:
        return compared(sums.ratio(SCRIPTED, form), sums.noise)

    times = f"beside scripted blocks, traced ones are {beside(TRACED)}, exported ones "
    times += beside(EXPORTED)
    total = sum(size.parameters for size in sizes)
    if not total:
        return times
    most, block = max((s.parameters, b) for s, b in zip(sizes, blocks, strict=True))
    return f"{times}; {block} holds {most / total:.0%} of the parameters"


def _time_grid(figures: Sequence[Figure], blocks: Sequence[str]) -> Grid:
    by = {(f.name, f.mode, f.labels.get("block")): f for f in figures}
    rows = Rows()
    for form in FORMS:
        rows.section(form)
        for block in (*blocks, None):
            time = by[SUM if block is None else TIME, form, block]
            share = None if block is None else by[SHARE, form, block]
            spread = None if block is None else by[STD, form, block]
            rows.row(
                form,
                block or SUM,
                with_bounds(time.value, time.low, time.high, 2),
                "" if spread is None else digits(spread.value),
                thesis_cell(time),
                "" if spread is None else thesis_cell(spread),
                "" if share is None else f"{share.value:.1f}",
                "" if share is None else thesis_cell(share),
            )
    times = ("ms (95%)", "std", "thesis ms", "its std")
    heads = ("form", "block", *times, "share %", "thesis %")
    return Grid("Table 4.2: each block by itself", heads, rows, frozenset({"form", "block"}))


def _size_grid(figures: Sequence[Figure]) -> Grid:
    by = {(f.name, f.mode): f for f in figures}
    blocks = [f.mode for f in figures if f.name == SIZE]
    rows = []
    for block in blocks:
        memory = by[ALLOCATED, block]
        rows.append(
            (block, digits(by[SIZE, block].value), digits(memory.value), thesis_cell(memory)),
        )
    heads = ("block", "million parameters", "MB", "thesis: MB allocated")
    return Grid("Figure 4.2: parameters per block", heads, rows, frozenset({"block"}))


def _plots(figures: Sequence[Figure]) -> list[Plot]:
    def block(figure: Figure) -> str:
        return str(figure.labels["block"])

    times: list[Any] = [f for f in figures if f.name == SHARE]
    millions = [f for f in figures if f.name == SIZE]
    return [
        Plot("Table 4.2: share of each block", "share", draw_bars(times, "%", group=block)),
        Plot(
            "Figure 4.2: parameters per block",
            "parameters",
            draw_bars(millions, "million parameters", group=block),
        ),
    ]


EXPERIMENT = Experiment(
    "offline",
    (SOURCE, "figure 4.2"),
    "Each block by itself: scripted, traced and exported",
    run,
)
