"""Stewardship: what a Manager's process does with what its guardian hands it."""

from __future__ import annotations

import logging
import os
import time
from datetime import UTC, datetime
from typing import Any

from blockflow.batching.registry import policy_problems
from blockflow.control.accept import stored_lookup
from blockflow.control.adoption import Inheritance, running_lookup
from blockflow.control.disk import Disk
from blockflow.control.journal import Journal, JournalFile
from blockflow.control.policies import with_fitting
from blockflow.control.profiles import ProfileShelf
from blockflow.control.settings import ControlSettings
from blockflow.control.store import StateStore
from blockflow.control.stored import StoredState
from blockflow.control.succession import Outcome
from blockflow.core.errors import BlockFlowError, SystemError_
from blockflow.core.model import BlockInfo
from blockflow.core.topology import Topology, parse_topology
from blockflow.launch.ward import Ward, awaited
from blockflow.repository.repository import BlockRepository

log = logging.getLogger("blockflow.control")


def inherit(settings: ControlSettings, store: StateStore, ward: Ward) -> Inheritance:
    """What the dead Manager has left: its journal, and the stored topology. From here on the store
    gives no number that the journal holds, however old the state is that could be read.

    Raises:
        SystemError_: INTERNAL when nothing can be taken over (NO_SPACE: there was no room for the
            journal); the guardian is told, and begins anew from the stored state.
        BlockFlowError: what is :func:`awaited`: there is no room to read at present, or the
            repository is away, of which something has to be known. The guardian is not told.
    """
    file = JournalFile(ward.run_dir)
    try:
        journal = file.read()
        store.skip(**journal.highest())
        state = store.state
        topology, notes = None, tuple[str, ...]()
        if state.epoch != journal.epoch:
            topology, notes = _looked_up(settings, state, journal)
        elif state.topology is not None and journal.standing is not None:
            topology, notes = journal.standing.topology(state.topology), journal.standing.notes
    except (LookupError, TypeError, ValueError, BlockFlowError) as e:
        if isinstance(e, BlockFlowError) and awaited(e):
            raise
        ward.line.anew(str(e))
        code = "NO_SPACE" if file.given_up else "INTERNAL"
        raise SystemError_(code, f"what runs cannot be taken over: {e}") from e
    for note in notes:
        log.warning("%s", note)
    return Inheritance(journal, state.epoch, topology, state.posted, state.digests, notes)


def _looked_up(
    settings: ControlSettings, state: StoredState, journal: Journal
) -> tuple[Topology | None, tuple[str, ...]]:
    """The stored topology, and what is otherwise than it means, where the journal is of another
    epoch: its Manager died between storing the one and putting it in force, or the state could not
    be read and the former one is. Raises BlockFlowError."""
    if state.topology is None:
        return None, ()
    Disk(settings.repository).is_there()
    notes = list[str]()
    stored = stored_lookup(BlockRepository(settings.repository), state.digests, notes)
    known = running_lookup(journal, state.digests, stored)
    lacking: list[BlockFlowError] = []

    def lookup(name: str) -> BlockInfo:
        try:
            return known(name)
        except BlockFlowError as e:
            if awaited(e):
                lacking.append(e)
            raise

    try:
        topology = parse_topology(state.topology, lookup, policy_problems)
    except BlockFlowError as e:
        raise (lacking or [e])[0] from None
    shelf = ProfileShelf(settings.repository)
    topology, unfit = with_fitting(
        shelf.with_costs(topology), settings.cores, shelf, journal.with_policies()
    )
    return topology, (*notes, *unfit)


class Biography:
    """What status tells of the Managers of this instance.

    Args:
        ward: of the guardian, None without.

    Attributes:
        pid: of the process to signal, which ends last: the guardian's, if there is one.
    """

    def __init__(self, ward: Ward | None) -> None:
        self.pid = os.getpid() if ward is None else ward.guardian
        self._deaths = 0 if ward is None else ward.deaths
        self._died_ns = 0 if ward is None else ward.died_ns
        self._cause = "" if ward is None else ward.cause
        self._started_ns = time.monotonic_ns()
        self._began_ns = self._started_ns if ward is None else ward.began_ns
        self._since = datetime.now(UTC).isoformat(timespec="seconds")
        self._away_ms: float | None = None

    def serving(self) -> None:
        """REST answers."""
        if self._deaths:
            self._away_ms = round((time.monotonic_ns() - self._died_ns) / 1e6, 3)

    def uptime_s(self) -> float:
        """Of the system, whichever Manager it has."""
        return round((time.monotonic_ns() - self._began_ns) / 1e9, 3)

    def to_dict(self, outcome: Outcome | None) -> dict[str, Any]:
        """Plain JSON form: this Manager's process, since when and how long it runs, how many died
        before it and how the last one did, for how long nobody was there, and who was taken over.

        Args:
            outcome: of the succession, None when nothing was taken over.
        """
        return {
            "pid": os.getpid(),
            "since": self._since,
            "uptime_s": round((time.monotonic_ns() - self._started_ns) / 1e9, 3),
            "restarts": self._deaths,
            "cause": self._cause,
            "away_ms": self._away_ms,
            "adopted": list(outcome.adopted) if outcome is not None else [],
        }
