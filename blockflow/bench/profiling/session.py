"""Session: goes through the cells of a block or chain, all candidates side by side.

For each cell the candidates take turns, visit by visit, so that a machine that slows down slows all
of them. Whatever a cell has come to is stored at once: an interrupted session goes on where it was.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from typing import Protocol

from blockflow.bench.profiling.candidates import Candidate, told
from blockflow.bench.profiling.measurer import Measurer
from blockflow.bench.profiling.plan import Cell, Effort, expected_s, next_visit, point_of
from blockflow.core.errors import BlockFlowError, RepositoryError
from blockflow.core.model import BlockInfo
from blockflow.core.profile import Point, StageProfile
from blockflow.repository.profile_record import (
    ProfileKey,
    ProfileRecord,
    chain_digest,
    ran_by,
    staleness,
)
from blockflow.repository.profiles import ProfileStore

Open = Callable[[Candidate, int], Measurer]
"""Start a measurer of a candidate on so many threads."""


class Watcher(Protocol):
    """Is told how far a session is."""

    def start(self, seconds: float) -> None:
        """About so many seconds of measuring are ahead."""

    def step(self, candidate: Candidate, cell: Cell, left_s: float) -> None:
        """This is measured now; about ``left_s`` seconds are left."""


@dataclass(slots=True)
class Outcome:
    """What is known of one candidate.

    Attributes:
        points: cell -> figures, of the block or the whole chain.
        parts: of a chain: the same for each block in it.
        error: largest relative difference to the reference; None: not compared.
        reason: why it was not measured, or not to the end; '' if it was.
        reused: cells that a former session had measured.
        owed: cells of a former table that are measured anew, too: that table was made with less
            effort, or a session that was to replace it was interrupted.
        complete: every cell that was ever asked for is there.
    """

    candidate: Candidate
    points: dict[Cell, Point] = field(default_factory=dict)
    parts: list[dict[Cell, Point]] = field(default_factory=list)
    error: float | None = None
    reason: str = ""
    reused: int = 0
    owed: tuple[Cell, ...] = ()
    complete: bool = False


@dataclass(slots=True)
class Session:
    """Measures one block or chain.

    Args:
        infos: the block, or the chain's blocks.
        store: where profiles are kept.
        open_: starts measurers.
        effort: how long each cell is measured.
        watcher: is told how far it is.
        again: measure also what a former session measured already.
    """

    infos: Sequence[BlockInfo]
    store: ProfileStore
    open_: Open
    effort: Effort
    watcher: Watcher
    again: bool = field(default=False, kw_only=True)
    _row_ms: dict[str, float] = field(default_factory=dict, init=False)

    def run(
        self,
        candidates: Sequence[Candidate],
        cells: Sequence[Cell],
        check: Sequence[Cell] = (),
    ) -> list[Outcome]:
        """Measure every candidate in every cell.

        Args:
            candidates: those that cannot run come back with their reason.
            check: cells whose outputs are compared with the first candidate's, the reference;
                none: nothing is compared.

        Returns:
            One outcome per candidate, in their order.
        """
        outcomes = [self._resume(c, cells) for c in candidates]
        cells = list(dict.fromkeys([*cells, *(c for o in outcomes for c in o.owed)]))
        self.watcher.start(self._ahead(outcomes, cells))
        unchecked = bool(check)
        for threads in dict.fromkeys(c.threads for c in cells):
            here = [c for c in cells if c.threads == threads]
            able = [o for o in outcomes if not o.reason]
            todo = [o for o in able if any(c not in o.points for c in here)]
            if check and (unchecked or todo):
                todo = able
            with ExitStack() as stack:
                opened = self._opened(todo, threads, stack)
                if unchecked:
                    unchecked = False
                    if opened and opened[0][0] is outcomes[0]:
                        self._compare(opened, check)
                if check:
                    _side_by_side([o for o, _ in opened], here)
                for cell in here:
                    self._cell(opened, outcomes, cell, cells)
        for outcome in outcomes:
            if not outcome.complete and all(c in outcome.points for c in cells):
                outcome.complete = True
                self._save(outcome)
        return outcomes

    # --- what is there already ------------------------------------------------------------------

    def _resume(self, candidate: Candidate, cells: Sequence[Cell]) -> Outcome:
        outcome = Outcome(candidate, reason=candidate.reason)
        if candidate.reason:
            return outcome
        outcome.parts = [{} for _ in self.infos] if len(self.infos) > 1 else []
        records = self._stored(candidate)
        if not records:
            return outcome
        record = records[0]
        known = dict.fromkeys(
            Cell(p.threads, p.rows, p.length) for r in records for p in r.profile.points
        )
        tables = [(outcome.points, record.profile)]
        tables += zip(outcome.parts, record.parts, strict=True)
        if not self.effort.covered_by(record.settings):
            # One record, one effort: all of it is measured anew, lest it knows less than before.
            outcome.owed = tuple(known)
            return outcome
        for points, profile in tables:
            points.update({Cell(p.threads, p.rows, p.length): p for p in profile.points})
        if self.again:
            for points, _ in tables:
                for cell in cells:
                    points.pop(cell, None)
        # What replaces a table knows no less: an interrupted session's cells are due, asked or not.
        outcome.owed = tuple(c for c in known if c not in outcome.points)
        outcome.complete = record.complete and not self.again
        outcome.reused = sum(c in outcome.points for c in cells)
        return outcome

    def _stored(self, candidate: Candidate) -> list[ProfileRecord]:
        """This machine's records that hold, first of all an interrupted one to go on with; what
        does not hold is measured anew."""
        key = self._key(candidate)
        digest, ran = chain_digest(self.infos), ran_by(self.infos, candidate.selections)
        found = []
        for find in (self.store.unfinished, self.store.load):
            with suppress(RepositoryError):
                record = find(key)
                if record and not staleness(record, digest, ran, self.store.facts):
                    found.append(record)
        return found

    def _key(self, candidate: Candidate) -> ProfileKey:
        return ProfileKey.of([i.name for i in self.infos], candidate.selections)

    # --- measuring ------------------------------------------------------------------------------

    def _opened(
        self, outcomes: Sequence[Outcome], threads: int, stack: ExitStack
    ) -> list[tuple[Outcome, Measurer]]:
        opened = []
        for outcome in outcomes:
            try:
                measurer = self.open_(outcome.candidate, threads)
            except BlockFlowError as e:
                outcome.reason = told(e)
                continue
            stack.callback(measurer.close)
            opened.append((outcome, measurer))
        return opened

    def _compare(self, opened: Sequence[tuple[Outcome, Measurer]], check: Sequence[Cell]) -> None:
        """The worst error of each over all cells; the first of ``opened`` is the reference."""
        for i, (outcome, measurer) in enumerate(opened):
            try:
                outcome.error = max(measurer.errors(check, store=i == 0))
            except BlockFlowError as e:
                outcome.reason = told(e)
                if i == 0:
                    return  # nothing to compare with

    def _cell(
        self,
        opened: Sequence[tuple[Outcome, Measurer]],
        outcomes: Sequence[Outcome],
        cell: Cell,
        cells: Sequence[Cell],
    ) -> None:
        visits: dict[str, list[list[list[float]]]] = {}  # label -> visit -> forward -> blocks
        active = [(o, m) for o, m in opened if not o.reason and cell not in o.points]
        while active:
            for outcome, measurer in list(active):
                label = outcome.candidate.label
                made = visits.setdefault(label, [])
                n = next_visit([[sum(r) for r in runs] for runs in made], self.effort)
                if n == 0:
                    self._done(outcome, cell, made)
                    active.remove((outcome, measurer))
                    continue
                self.watcher.step(outcome.candidate, cell, self._ahead(outcomes, cells))
                try:
                    limit_s = self.effort.seconds
                    made.append(measurer.measure(cell, n, limit_s, first=not made))
                except BlockFlowError as e:
                    outcome.reason = f"at {cell.rows} rows: {told(e)}"
                    active.remove((outcome, measurer))

    def _done(
        self, outcome: Outcome, cell: Cell, visits: Sequence[Sequence[Sequence[float]]]
    ) -> None:
        totals = [[sum(r) for r in runs] for runs in visits]
        outcome.points[cell] = point = point_of(cell, totals)
        for i, points in enumerate(outcome.parts):
            points[cell] = point_of(cell, [[r[i] for r in runs] for runs in visits])
        self._row_ms[outcome.candidate.label] = point.row_ms
        self._save(outcome)

    def _save(self, outcome: Outcome) -> None:
        candidate, infos = outcome.candidate, self.infos
        key = self._key(candidate)
        machine = self.store.machine

        def profile(name: str, digest: str, points: Mapping[Cell, Point]) -> StageProfile:
            table = tuple(points.values())
            return StageProfile(name, digest, key.engine, key.precision, machine, table)

        record = ProfileRecord(
            key,
            profile(key.name, chain_digest(infos), outcome.points),
            tuple(
                profile(i.name, i.digest, p)
                for i, p in zip(infos if outcome.parts else (), outcome.parts, strict=True)
            ),
            ran_by(infos, candidate.selections),
            dict(self.store.facts),
            asdict(self.effort),
            outcome.complete,
            now_utc(),
        )
        self.store.save(record)

    # --- how long it takes ----------------------------------------------------------------------

    def _ahead(self, outcomes: Sequence[Outcome], cells: Sequence[Cell]) -> float:
        """About how many seconds are left: by the time per row seen last, or by any other's."""
        seen = list(self._row_ms.values())
        middle = sum(seen) / len(seen) if seen else 0.0
        total = 0.0
        for outcome in outcomes:
            if outcome.reason:
                continue
            row_ms = self._row_ms.get(outcome.candidate.label, middle)
            for cell in cells:
                if cell not in outcome.points:
                    effort = self.effort
                    total += expected_s(cell, row_ms, effort) if row_ms else effort.seconds
        return total


def _side_by_side(outcomes: Sequence[Outcome], cells: Sequence[Cell]) -> None:
    """What is compared is measured in the same minutes: a cell that one lacks is forgotten by all.

    A cell that a former session went through with all of them stays.
    """
    able = [o for o in outcomes if not o.reason]
    for cell in cells:
        if all(cell in o.points for o in able):
            continue
        for outcome in able:
            if outcome.points.pop(cell, None) is not None:
                outcome.reused -= 1
                outcome.complete = False


def now_utc() -> str:
    """For people who ask how old a figure is; durations are never taken from it."""
    return datetime.now(UTC).isoformat(timespec="seconds")
