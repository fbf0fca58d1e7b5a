"""Update: one change of what runs, from its acceptance to its end, as a transition table.

A system update, the way back to an earlier epoch, the deployment of the stored topology at start,
and the restart, drain, undrain and stop of one block all take this course, one at a time; and so
does what a Manager has to do that follows on a dead one:

preparing (new replicas load) -> committing (the epoch goes to disk) -> publishing (routes, the
flip) -> draining (requests on the old routes end, the unneeded stops) -> done

The epoch is stored *before* the flip: a full disk then fails the update while the old epoch still
serves, and after the flip nothing can fail any more.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from blockflow.core.errors import BlockFlowError
from blockflow.core.topology import Topology


class Kind(StrEnum):
    SYSTEM = "system-update"
    ROLLBACK = "rollback"
    RESTORE = "restore"
    READOPTION = "re-adoption"
    RESTART = "restart"
    DRAIN = "drain"
    UNDRAIN = "undrain"
    STOP = "stop"


class Phase(StrEnum):
    PREPARING = "preparing"
    COMMITTING = "committing"
    PUBLISHING = "publishing"
    DRAINING = "draining"
    DONE = "done"
    UNCHANGED = "unchanged"
    FAILED = "failed"


P = Phase

MOVES: Mapping[Phase, frozenset[Phase]] = {
    P.PREPARING: frozenset({P.COMMITTING, P.PUBLISHING, P.UNCHANGED, P.FAILED}),
    P.COMMITTING: frozenset({P.PUBLISHING, P.FAILED}),
    P.PUBLISHING: frozenset({P.DRAINING, P.DONE}),
    P.DRAINING: frozenset({P.DONE}),
    P.DONE: frozenset(),
    P.UNCHANGED: frozenset(),
    P.FAILED: frozenset(),
}
"""What is being published is done at once only where the whole system shuts down."""

FINAL = frozenset({P.DONE, P.UNCHANGED, P.FAILED})


@dataclass(slots=True)
class Update:
    """One change under way or past.

    Attributes:
        update_id: of an increasing sequence with gaps; no other update of this state directory has
            it, neither before a restart nor after.
        kind: what was asked.
        epoch: the epoch once it is done.
        block: the block for the kinds that concern one.
        posted, target: body and topology of a system update or rollback.
        plan: what starts, stays and stops, for people (Plan.to_dict()).
        waiting: incarnations that must be ready before it goes on.
        candidates: incarnations launched for this update, which stop if it fails.
        leaving: replicas (by name) that are not part of what comes.
        retiring: incarnations to stop once nothing in flight needs them.
        version: the route version that makes it true.
        phase_ns: how long each phase took that it has left.
        notes: what did not go as hoped but did not fail it, and what was decided for people.
    """

    update_id: int
    kind: Kind
    epoch: int
    started_ns: int
    block: str = ""
    posted: Mapping[str, Any] | None = None
    target: Topology | None = None
    plan: Mapping[str, Any] = field(default_factory=dict)
    phase: Phase = Phase.PREPARING
    waiting: set[int] = field(default_factory=set)
    candidates: set[int] = field(default_factory=set)
    leaving: set[str] = field(default_factory=set)
    retiring: set[int] = field(default_factory=set)
    version: int = 0
    drain_deadline_ns: int | None = None
    finished_ns: int | None = None
    error: BlockFlowError | None = None
    notes: list[str] = field(default_factory=list)
    phase_ns: dict[Phase, int] = field(default_factory=dict)

    @property
    def stores(self) -> bool:
        """It makes a new epoch."""
        return self.kind in (Kind.SYSTEM, Kind.ROLLBACK)

    @property
    def restores(self) -> bool:
        """It brings what is stored to life; what cannot start does not fail it."""
        return self.kind in (Kind.RESTORE, Kind.READOPTION)

    @property
    def final(self) -> bool:
        return self.phase in FINAL

    def move(self, phase: Phase, now_ns: int) -> None:
        """Go to ``phase``. An illegal move is a defect and raises RuntimeError."""
        if phase not in MOVES[self.phase]:
            raise RuntimeError(f"update {self.update_id}: {self.phase} -> {phase}")
        self.phase_ns[self.phase] = now_ns - self.started_ns - sum(self.phase_ns.values())
        self.phase = phase
        if phase in FINAL:
            self.finished_ns = now_ns

    def to_dict(self, now_ns: int) -> dict[str, Any]:
        """Plain JSON form; durations in milliseconds."""
        end = self.finished_ns if self.finished_ns is not None else now_ns
        out: dict[str, Any] = {
            "id": self.update_id,
            "kind": str(self.kind),
            "state": str(self.phase),
            "epoch": self.epoch,
            "plan": dict(self.plan),
            "duration_ms": round((end - self.started_ns) / 1e6, 3),
            "phases_ms": {str(p): round(ns / 1e6, 3) for p, ns in self.phase_ns.items()},
        }
        if self.block:
            out["block"] = self.block
        if self.notes:
            out["notes"] = list(self.notes)
        if self.error is not None:
            out["error"] = self.error.to_dict()
        return out
