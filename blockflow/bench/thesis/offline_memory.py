"""Memory of each block in each form of its artifact (table 4.2), in a process of its own.

The thesis reads on a GPU what torch has allocated and reserved, and what the process takes. Here it
is private memory on the CPU (USS): of a process that has loaded one block and run it, and what of
that is beyond a process with a block that holds nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from blockflow.bench.grid import Grid, Rows, bounds, digits
from blockflow.bench.in_process import Chain, InProcess
from blockflow.bench.results import Figure, interval_figure
from blockflow.bench.thesis.beside import thesis
from blockflow.bench.thesis.memory_measure import EMPTY, private_mib, save_empty
from blockflow.bench.thesis.offline_table import CLASSIFIER, LAST, PRINTED, SOURCE, Row, cut
from blockflow.bench.turns import in_turn

PROCESS = "private memory of a process with the block"
OWN = "private memory beyond a process without a block"

_UNIT = "MB"
_STD, _RESERVED, _CLASSIFIER = "thesis_std", "thesis_reserved", "thesis_classifier"
"""Labels: further columns of the thesis's table."""

_RUNS = 3

Key = tuple[str, str]
"""Form and block; of the process without a block two times nothing."""

NOTHING: Key = ("", "")
Found = Mapping[Key, Sequence[float]]
"""MiB, one number per round."""


def measure(
    chains: Mapping[str, Chain],
    rounds: int,
    advance: Callable[[], None],
    broken: Callable[[Found], None],
) -> Found:
    """Start a process for every block of every form, and one without a block, in turns.

    Args:
        chains: by form.
        rounds: how often each is started anew.
        advance: called after every round.
        broken: gets the whole rounds so far, if there are any, when one fails.

    Raises:
        BlockFlowError: a block cannot be loaded here.
    """
    some = next(iter(chains.values()))
    save_empty(some.repository)
    empty = Chain(some.repository, (EMPTY,))
    starts = {
        (form, f"block{i + 1}"): partial(_one, replace(chain, blocks=(name,), device="cpu"))
        for form, chain in chains.items()
        for i, name in enumerate(chain.blocks)
    }
    # One more that stays: pages of libraries that two processes have count for neither of them.
    with InProcess(empty):
        return in_turn({**starts, NOTHING: partial(_one, empty)}, rounds, advance, broken=broken)


def _one(chain: Chain) -> float:
    """Private MiB of a process that has run these blocks."""
    with InProcess(chain) as process:
        for _ in range(_RUNS):
            process.run(1)
        return private_mib(process.pid)


def figures_of(found: Found, labels: Mapping[str, Any]) -> Iterator[Figure]:
    """Per form and block its process, and what of that is the block's own, by rounds; then the
    process without a block.

    Args:
        found: by :func:`measure`.
        labels: of every figure.
    """
    for (form, block), whole in found.items():
        mine = {**labels, "device": "cpu", "block": block}
        row = cut(form).get(block)
        process = interval_figure(PROCESS, form, 1, whole, "MiB", mine)
        yield _of_process(process, row)
        if (form, block) == NOTHING:
            continue
        own = [mib - base for mib, base in zip(whole, found[NOTHING], strict=True)]
        yield _of_torch(interval_figure(OWN, form, 1, own, "MiB", mine), row)


def _of_process(figure: Figure, row: Row | None) -> Figure:
    """With what the thesis's process occupies; the classifier's is another one there."""
    if row is None:
        return figure
    made = thesis(figure, row.process, SOURCE, "VRAM of the process", _UNIT)
    if figure.labels["block"] != LAST:
        return made
    return _more(made, {_CLASSIFIER: PRINTED[figure.mode][CLASSIFIER].process})


def _of_torch(figure: Figure, row: Row | None) -> Figure:
    """With what torch allocated and reserved."""
    if row is None:
        return figure
    made = thesis(figure, row.allocated, SOURCE, "VRAM that torch allocated", _UNIT)
    return _more(made, {_STD: row.allocated_std, _RESERVED: row.reserved})


def _more(figure: Figure, labels: Mapping[str, float]) -> Figure:
    """Further labels, where the thesis's figure stands there at all."""
    if "thesis" not in figure.labels:
        return figure
    return replace(figure, labels={**figure.labels, **labels})


def grid(figures: Sequence[Figure]) -> Grid:
    """A row per form and block; the thesis's VRAM beside it, called what it is."""
    by = {(f.name, f.mode, f.labels.get("block")): f for f in figures}
    rows = Rows()
    for f in (f for f in figures if f.name == OWN):
        process = by[PROCESS, f.mode, f.labels["block"]]
        rows.row(
            *(f.mode, f.labels["block"], digits(process.value), _process_cell(process)),
            *(digits(f.value), bounds(f.low, f.high), str(f.n)),
            *(_allocated_cell(f), _cell(f.labels.get(_RESERVED))),
        )
    base = by[PROCESS, "", ""]
    rows.row("", "none (C)", digits(base.value), "", "", "", str(base.n), "", "")
    ours = ("process", "thesis's", "beyond C", "95%", "n")
    heads = ("form", "block", *ours, "allocated (std)", "reserved")
    title = (
        "Table 4.2: private memory on the CPU, MiB, C without a block; the thesis's VRAM in "
        f"{_UNIT}: of the process ({LAST} + {CLASSIFIER}), and what torch allocated and reserved"
    )
    return Grid(title, heads, rows, frozenset({"form", "block"}))


def _process_cell(f: Figure) -> str:
    """Two numbers where the thesis has two processes."""
    both = _cell(f.labels.get("thesis")), _cell(f.labels.get(_CLASSIFIER))
    return " + ".join(filter(None, both))


def _allocated_cell(f: Figure) -> str:
    if "thesis" not in f.labels:
        return ""
    return f"{_cell(f.labels['thesis'])} ({_cell(f.labels[_STD])})"


def _cell(value: float | None) -> str:
    return "" if value is None else digits(value)
