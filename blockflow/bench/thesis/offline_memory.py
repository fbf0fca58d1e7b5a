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

from blockflow.bench.grid import Grid, bounds, digits
from blockflow.bench.in_process import Chain, InProcess
from blockflow.bench.results import Figure, interval_figure
from blockflow.bench.statistics import median_interval
from blockflow.bench.thesis.beside import in_turn, thesis, thesis_cell
from blockflow.bench.thesis.memory_measure import EMPTY, private_mib, save_empty

PROCESS = "private memory of a process with the block"
OWN = "private memory beyond a process without a block"

_SOURCE = "table 4.2"
_UNIT = "MB"
ALLOCATED: Mapping[str, tuple[float, ...]] = {
    "scripted": (4.858, 9.689, 29.755, 59.612 + 16.328),
    "traced": (4.896, 9.536, 29.746, 59.442 + 16.339),
}
RESERVED = (26.0, 26.0, 56.0, 110.0 + 22.0)
"""MB of a GPU's memory that torch has allocated, and reserved in either form. The thesis has the
classifier as a block of its own; here it is a part of the fourth."""

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


def figures_of(found: Found, labels: Mapping[str, Any], known: bool) -> Iterator[Figure]:
    """Per form and block its process, and what of that is the block's own, by rounds; then the
    process without a block.

    Args:
        found: by :func:`measure`.
        labels: of every figure.
        known: it is the thesis's own model, and its figures stand beside.
    """
    for (form, block), whole in found.items():
        mine = {**labels, "device": "cpu", "block": block}
        yield interval_figure(PROCESS, form, 1, median_interval(whole), "MiB", mine)
        if (form, block) == NOTHING:
            continue
        own = [mib - base for mib, base in zip(whole, found[NOTHING], strict=True)]
        figure = interval_figure(OWN, form, 1, median_interval(own), "MiB", mine)
        number = int(block.removeprefix("block")) - 1
        printed = ALLOCATED[form][number] if known and form in ALLOCATED else None
        yield thesis(figure, printed, _SOURCE, "VRAM that torch allocated", _UNIT)


def grid(figures: Sequence[Figure]) -> Grid:
    """A row per form and block; the thesis's VRAM beside it, called what it is."""
    by = {(f.name, f.mode, f.labels.get("block")): f for f in figures}
    rows: list[tuple[str, ...]] = []
    for f in (f for f in figures if f.name == OWN):
        process = by[PROCESS, f.mode, f.labels["block"]]
        known = "thesis" in f.labels
        reserved = RESERVED[int(f.labels["block"].removeprefix("block")) - 1]
        rows.append(
            (
                *(f.mode, f.labels["block"], digits(process.value)),
                *(digits(f.value), bounds(f.low, f.high), str(f.n)),
                *(thesis_cell(f), f"{digits(reserved)} {_UNIT}" if known else ""),
            )
        )
    base = by[PROCESS, "", ""]
    rows.append(("", "none (C)", digits(base.value), "", "", str(base.n), "", ""))
    heads = ("form", "block", "process", "beyond C", "95%", "n", "allocated", "reserved")
    title = (
        "Table 4.2: private memory on the CPU, MiB, C without a block; "
        "the thesis's VRAM that torch allocated and reserved"
    )
    return Grid(title, heads, rows, frozenset({"form", "block"}))
