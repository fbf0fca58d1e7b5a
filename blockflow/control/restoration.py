"""Restoration: the stored topology is deployed again at a start.

Where that fails because the repository is away (a mount that comes late, a folder that is being
exchanged, a server that does not answer) or there is no room to read it (no descriptor, say), it is
tried again until it can be read, or somebody has put another topology in force.
"""

from __future__ import annotations

import logging
import threading
import time

from blockflow.batching.registry import policy_problems
from blockflow.control.accept import stored_lookup
from blockflow.control.disk import Disk
from blockflow.control.manager import Manager
from blockflow.control.policies import with_fitting
from blockflow.control.profiles import ProfileShelf, passing
from blockflow.control.stored import StoredState
from blockflow.control.update import Update
from blockflow.core.errors import BlockFlowError
from blockflow.core.model import BlockInfo
from blockflow.core.topology import Topology, parse_topology
from blockflow.repository.repository import BlockRepository

log = logging.getLogger("blockflow.control")

FIRST_S = 0.25
CAP_S = 5.0
"""Pauses double, as those of a worker that cannot start for want of room."""

_JOIN_S = 5.0


class Restoration:
    """Of one start.

    Args:
        manager: started.
        state: what is stored; it has a topology.
    """

    def __init__(self, manager: Manager, state: StoredState) -> None:
        self._manager = manager
        self._state = state
        self._ended = threading.Event()
        self._thread: threading.Thread | None = None
        self._disk = Disk(manager.settings.repository)

    def begin(self) -> Update:
        """Deploy it. The update has failed already where that cannot be done."""
        try:
            topology, told = self._read()
        except BlockFlowError as e:
            error = e
            failed = self._manager.call(lambda: self._failed(error))
            if self._away:
                self._thread = threading.Thread(target=self._again, name="bf-restore", daemon=True)
                self._thread.start()
            return failed
        return self._manager.call(lambda: self._deploy(topology, told))

    def close(self) -> None:
        """Try no more. Idempotent."""
        self._ended.set()
        if self._thread is not None:
            self._thread.join(_JOIN_S)  # one that waits for a file system ends with the process

    def _again(self) -> None:
        pause_s = FIRST_S
        while not self._ended.wait(pause_s):
            pause_s = min(2 * pause_s, CAP_S)
            try:
                if self._try():
                    return
            except BlockFlowError as e:  # the Manager has ended, or is busy
                log.debug("the stored topology waits: %s", e)

    def _try(self) -> bool:
        """Once more; True when nothing is left to be done."""
        if not self._manager.call(self._wanted):
            return True
        try:
            topology, told = self._read()
        except BlockFlowError as e:
            if not self._away:
                error = e  # it is there, and does not fit
                self._manager.call(lambda: self._failed(error))
            return not self._away
        return self._manager.call(lambda: self._deploy_late(topology, told))

    def _deploy_late(self, topology: Topology, told: tuple[str, ...]) -> bool:
        if not self._wanted():
            return True
        if self._manager.brain.runner.in_the_way is not None:
            return False
        log.warning("the repository can be read again: epoch %d is deployed", self._state.epoch)
        self._deploy(topology, told)
        return True

    def _wanted(self) -> bool:
        brain = self._manager.brain
        return (
            brain.realm.topology is None
            and brain.realm.unrestored is not None
            and not brain.stopping
        )

    def _read(self) -> tuple[Topology, tuple[str, ...]]:
        """The stored topology with what is stored of its blocks now, and notes of what is
        otherwise than it means. Raises BlockFlowError."""
        settings, state, notes = self._manager.settings, self._state, list[str]()
        repository, shelf = BlockRepository(settings.repository), ProfileShelf(settings.repository)
        stored = stored_lookup(repository, state.digests, notes)
        self._away = True  # as good as that, if it does not answer
        self._disk.is_there()
        self._away = False

        def lookup(name: str) -> BlockInfo:
            try:
                return stored(name)
            except BlockFlowError as e:
                self._away |= passing(e)
                raise

        topology = parse_topology(state.topology, lookup, policy_problems)
        try:
            topology, unfit = with_fitting(shelf.with_costs(topology), settings.cores, shelf)
        except BlockFlowError as e:
            self._away |= passing(e)
            raise
        return topology, (*notes, *unfit)

    def _deploy(self, topology: Topology, told: tuple[str, ...]) -> Update:
        for note in told:
            log.warning("%s", note)
        state, now, brain = self._state, time.monotonic_ns(), self._manager.brain
        try:
            return brain.restore(topology, state.epoch, state.posted, now, state.digests, told)
        except BlockFlowError as e:
            return self._failed(e)

    def _failed(self, error: BlockFlowError) -> Update:
        epoch = self._state.epoch
        log.error("the stored topology (epoch %d) cannot be deployed: %s", epoch, error)
        return self._manager.brain.restore_failed(epoch, error, time.monotonic_ns())
