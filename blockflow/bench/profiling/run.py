"""Run: one ``blockflow profile`` from the names of blocks to tables and a recorded choice."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from blockflow.bench.calibration import Steadiness, calibrate, compare
from blockflow.bench.options import nonsense
from blockflow.bench.profiling.candidates import Candidate, candidates, reference, unique
from blockflow.bench.profiling.choice import Judged, choose
from blockflow.bench.profiling.measurer import Workshop
from blockflow.bench.profiling.plan import Cell, Effort, cells_of, doubling, lengths_of
from blockflow.bench.profiling.session import Outcome, Session, Watcher, now_utc
from blockflow.core.errors import BlockError
from blockflow.core.fitting import most_rows
from blockflow.core.measuring import refuse_gaps
from blockflow.core.model import BlockInfo, TensorSpec
from blockflow.launch.cgroup import available_cores
from blockflow.repository.manifest import Choice
from blockflow.repository.profiles import ProfileStore
from blockflow.repository.repository import BlockRepository

MOST_ROWS = 32
CHECK_ROWS = (1, 3, 8)
"""Batch sizes whose outputs are compared with the reference."""
TOLERANCE = 1e-2
_CALIBRATE_S = 0.3


@dataclass(frozen=True, slots=True)
class Wish:
    """What is to be measured.

    Attributes:
        engines, precisions: see :func:`candidates`.
        options: for every candidate; None tries what is worth trying.
        threads, rows, lengths: the table's axes; None: 1, 2, 4.. up to the cores, up to 32 rows,
            and up to four lengths.
        effort: how long each cell is measured.
        again: measure also what is there already.
        choose: compare outputs and record what ``auto`` shall mean.
        tolerance: largest allowed relative error of the choice.
    """

    engines: Sequence[str] = ("auto",)
    precisions: Sequence[str] = ("all",)
    options: Mapping[str, Any] | None = None
    threads: Sequence[int] | None = None
    rows: Sequence[int] | None = None
    lengths: Sequence[int] | None = None
    effort: Effort = field(default_factory=Effort)
    again: bool = False
    choose: bool = False
    tolerance: float = TOLERANCE


@dataclass(frozen=True, slots=True)
class Measured:
    """What came out for one block or chain.

    Attributes:
        infos: the block, or the chain's blocks.
        cells: that were asked for.
        outcomes: per candidate.
        judged: verdicts, with ``choose``.
        steadiness: of the machine meanwhile.
    """

    infos: tuple[BlockInfo, ...]
    cells: tuple[Cell, ...]
    outcomes: tuple[Outcome, ...]
    judged: tuple[Judged, ...]
    steadiness: Steadiness

    @property
    def name(self) -> str:
        return "+".join(i.name for i in self.infos)


def axes(infos: Sequence[BlockInfo], wish: Wish) -> list[Cell]:
    """The cells of a wish, checked against the block and the machine.

    Raises:
        RequestError: INVALID_REQUEST.
    """
    cores = available_cores().at_once
    narrowest = min(infos, key=most_rows)
    most = most_rows(narrowest)
    threads = wish.threads or doubling(cores)
    rows = wish.rows or doubling(min(MOST_ROWS, most))
    for values, limit, what in (
        (threads, cores, f"threads: this process may use {cores} cores"),
        (rows, most, f"rows: {narrowest.name} takes up to {most}"),
    ):
        for n in values:
            if not 1 <= n <= limit:
                raise nonsense(f"{n} {what}")
    return cells_of(threads, rows, _lengths(infos[0].name, infos[0].contract.input, wish.lengths))


def _lengths(block: str, spec: TensorSpec, asked: Sequence[int] | None) -> list[int | None]:
    if asked is None:
        return lengths_of(spec)
    if not spec.dynamic:
        raise nonsense(f"{block} takes {spec}: it has no lengths")
    lo, hi = spec.ranges.get(spec.dynamic[0], (1, 1024))
    for n in asked:
        if not lo <= n <= hi:
            raise nonsense(f"length {n} is outside {block}'s {lo}..{hi}")
    return [*sorted(set(asked))]


def contenders(infos: Sequence[BlockInfo], wish: Wish, machine: str) -> list[Candidate]:
    """The candidates of a wish; for a choice the reference is the first of them.

    Raises:
        RequestError: INVALID_REQUEST.
        BlockError: UNSUPPORTED_ENGINE when none can run, with each one's reason.
    """
    found = candidates(infos, wish.engines, wish.precisions, machine, wish.options)
    if wish.choose:
        found = [reference(infos[0], machine), *found]
    found = unique(found)
    if all(c.reason for c in found):
        reasons = "; ".join(f"{c.label}: {c.reason}" for c in found)
        raise BlockError("UNSUPPORTED_ENGINE", f"nothing can run {infos[0].name}: {reasons}")
    return found


def measure(
    repository: BlockRepository, names: Sequence[str], wish: Wish, watcher: Watcher
) -> Measured:
    """Profile one block, or several as a chain, and record the choice if one is wished.

    Raises:
        RepositoryError: a block cannot be read, or was replaced meanwhile.
        RequestError: the wish does not fit.
        BlockError: nothing can run it, or every candidate failed.
    """
    if wish.choose and len(names) > 1:
        raise nonsense("an engine is chosen per block, not per chain")
    infos = tuple(repository.verify(n).to_info() for n in names)
    refuse_gaps(infos)
    store = ProfileStore(repository.root)
    cells = axes(infos, wish)
    found = contenders(infos, wish, store.machine)
    check: list[Cell] = []
    if wish.choose:
        ends = [cells[0].length, cells[-1].length]
        rows = [r for r in CHECK_ROWS if r <= most_rows(infos[0])]
        check = cells_of([cells[0].threads], rows, list(dict.fromkeys(ends)))
    begin = calibrate(_CALIBRATE_S)
    with Workshop(infos, Path(repository.root)) as shop:
        session = Session(infos, store, shop.open, wish.effort, watcher, again=wish.again)
        outcomes = session.run(found, cells, check)
    steadiness = compare(begin, calibrate(_CALIBRATE_S))
    if all(o.reason for o in outcomes):
        reasons = "; ".join(f"{o.candidate.label}: {o.reason}" for o in outcomes)
        raise BlockError("BLOCK_FAILED", f"{infos[0].name} could not be measured: {reasons}")
    judged = choose(outcomes, cells, wish.tolerance) if wish.choose else []
    for verdict in judged:
        if verdict.chosen:
            record(repository, infos[0], store.machine, judged[0], verdict, wish.tolerance)
    return Measured(infos, tuple(cells), tuple(outcomes), tuple(judged), steadiness)


def record(
    repository: BlockRepository,
    info: BlockInfo,
    machine: str,
    base: Judged,
    chosen: Judged,
    tolerance: float,
) -> None:
    """Write a choice into the block's manifest."""
    (selection,) = chosen.outcome.candidate.selections
    choice = Choice(
        engine=selection.engine,
        precision=selection.precision,
        options=dict(selection.options),
        ms=chosen.row_ms or 0.0,
        reference_ms=base.row_ms or 0.0,
        error=chosen.outcome.error or 0.0,
        tolerance=tolerance,
        when=now_utc(),
    )
    repository.save_choice(info, machine, choice)
