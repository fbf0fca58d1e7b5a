"""Each block by itself, in three forms of its artifact (table 4.2), and its size (figure 4.2).

The thesis calls each block a thousand times on the idle machine, scripted and traced. Here a
process per form has all blocks and calls them in turn, with nothing in between; the forms take
turns, and the first one takes part twice.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any

from blockflow.bench.grid import Grid, digits, with_bounds
from blockflow.bench.in_process import Chain, InProcess
from blockflow.bench.results import Figure, interval_figure, latency_figure
from blockflow.bench.statistics import median_interval
from blockflow.bench.thesis.bars import draw_bars
from blockflow.bench.thesis.beside import AGAIN, Rounds, compared, in_turn, thesis
from blockflow.bench.thesis.experiment import Context, Data, Experiment, Findings, Plot, Settings
from blockflow.repository.repository import BlockRepository

SCRIPTED, TRACED, EXPORTED = "scripted", "traced", "exported"
FORMS: Mapping[str, str] = {
    SCRIPTED: "torchscript-scripted",
    TRACED: "torchscript",
    EXPORTED: "exported",
}
"""Form -> label of the contender that runs it."""

TIME, SHARE, SIZE, ALLOCATED = "forward", "share of the sum", "parameters", "memory of the block"
SUM = "sum of the blocks"

_SOURCE = "table 4.2"
_BLOCKS = ("block1", "block2", "block3", "block4")
_MS: Mapping[str, tuple[float, ...]] = {
    SCRIPTED: (2.401, 2.718, 4.021, 2.276 + 0.287),
    TRACED: (2.254, 2.641, 3.914, 2.233 + 0.287),
}
"""The thesis's classifier (``class_h``) is a block of its own in this table, and elsewhere a part
of the fourth, as it is here: the sum of both."""

_MB = (4.858, 9.689, 29.755, 59.612 + 16.328)
"""What torch had allocated on the GPU, scripted."""

THESIS_MODEL = "resnet50"
OFFLINE_SUM_MS = 11.703

Samples = Mapping[str, Sequence[tuple[float, ...]]]
"""Form -> milliseconds of each block, one tuple per round."""


def run(context: Context) -> Findings:
    """Measure."""
    chains = {form: context.chain(label) for form, label in FORMS.items()}
    rounds = context.pick(100, 6)
    ways = {**chains, SCRIPTED + AGAIN: chains[SCRIPTED]}
    with ExitStack() as stack:
        with context.step("loading the blocks", None):
            others = {w: stack.enter_context(InProcess(chain)) for w, chain in ways.items()}
        advance = stack.enter_context(context.step("each block by itself", rounds + 1))
        calls = {way: partial(other.run, 1) for way, other in others.items()}
        done = partial(findings, megabytes=sizes(chains[SCRIPTED]), settings=context.settings)
        return done(
            in_turn(calls, rounds, advance, 1, lambda so_far: context.keep(done(so_far).figures))
        )


def sizes(chain: Chain) -> list[float]:
    """MB of each block's parameters and buffers, as stored."""
    repository = BlockRepository(chain.repository)
    return [repository.info(name).state_bytes / 1e6 for name in chain.blocks]


def findings(samples: Samples, megabytes: Sequence[float], settings: Settings) -> Findings:
    """Figures, tables, plots and the line. Pure."""
    sums = Rounds({way: [sum(one) for one in found] for way, found in samples.items()})
    printed = settings.model == THESIS_MODEL
    blocks = _BLOCKS if printed else tuple(f"block{i + 1}" for i in range(len(megabytes)))
    figures: list[Figure] = []
    for form in FORMS:
        kept = samples[form][sums.cut :]
        for i, block in enumerate(blocks):
            times = [one[i] for one in kept]
            theirs = _MS[form][i] if printed and form in _MS else None
            labels = {**settings.labels, "block": block}
            made = latency_figure(TIME, form, 1, times, labels)
            figures.append(thesis(made, theirs, _SOURCE))
            share = median_interval([one[i] / sum(one) * 100 for one in kept])
            theirs = None if theirs is None else theirs / sum(_MS[form]) * 100
            made = interval_figure(SHARE, form, 1, share, "%", labels)
            figures.append(thesis(made, theirs, _SOURCE))
        made = latency_figure(SUM, form, 1, sums.of(form), settings.labels)
        theirs = sum(_MS[form]) if printed and form in _MS else None
        figures.append(thesis(made, theirs, _SOURCE))
    for i, (block, mb) in enumerate(zip(blocks, megabytes, strict=True)):
        labels = {**settings.labels, "block": block}
        made = Figure(ALLOCATED, block, None, None, None, mb, "MB", 1, labels=labels)
        figures.append(thesis(made, _MB[i] if printed else None, _SOURCE))
        millions = mb / 4  # fp32: four bytes each
        made = Figure(SIZE, block, None, None, None, millions, "million", 1, labels=labels)
        figures.append(thesis(made, None, "figure 4.2"))
    return Findings(
        says=_says(sums, megabytes, blocks),
        figures=figures,
        tables=[_time_grid(figures, blocks), _size_grid(figures)],
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
        ],
    )


def _says(sums: Rounds, megabytes: Sequence[float], blocks: Sequence[str]) -> str:
    def beside(form: str) -> str:
        return compared(sums.ratio(SCRIPTED, form), sums.noise)

    times = f"beside scripted blocks, traced ones are {beside(TRACED)}, exported ones "
    times += beside(EXPORTED)
    total = sum(megabytes)
    if not total:
        return times
    most, block = max(zip(megabytes, blocks, strict=True))
    return f"{times}; {block} holds {most / total:.0%} of the parameters"


def _time_grid(figures: Sequence[Figure], blocks: Sequence[str]) -> Grid:
    by = {(f.name, f.mode, f.labels.get("block")): f for f in figures}
    rows: list[tuple[str, ...]] = []
    for form in FORMS:
        for block in (*blocks, None):
            time = by[SUM if block is None else TIME, form, block]
            share = None if block is None else by[SHARE, form, block]
            rows.append(
                (
                    form,
                    block or SUM,
                    with_bounds(time.value, time.low, time.high, 2),
                    _theirs(time),
                    "" if share is None else f"{share.value:.1f}",
                    "" if share is None else _theirs(share),
                )
            )
        if form != EXPORTED:
            rows.append(())
    heads = ("form", "block", "ms (95%)", "thesis ms", "share %", "thesis %")
    return Grid("Table 4.2: each block by itself", heads, rows, frozenset({"form", "block"}))


def _size_grid(figures: Sequence[Figure]) -> Grid:
    by = {(f.name, f.mode): f for f in figures}
    blocks = [f.mode for f in figures if f.name == SIZE]
    rows = []
    for block in blocks:
        memory = by[ALLOCATED, block]
        rows.append(
            (block, digits(by[SIZE, block].value), digits(memory.value), _theirs(memory)),
        )
    heads = ("block", "million parameters", "MB", "thesis: MB allocated")
    return Grid("Figure 4.2: parameters per block", heads, rows, frozenset({"block"}))


def _theirs(figure: Figure) -> str:
    value = figure.labels.get("thesis")
    return "" if value is None else digits(value)


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
    (_SOURCE, "figure 4.2"),
    "Each block by itself: scripted, traced and exported",
    run,
)
