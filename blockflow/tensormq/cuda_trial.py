"""The trial: whether a consumer can open an owner's device memory is found out before any tensor.

Every worker on a device keeps a small piece of device memory and one event for others to try to
open. Who learns of it, from the routes, tries, closes both again, and writes down a verdict
(``cuda_verdict``). The Controller tells all workers the routes before it tells the Dispatcher, so
by the time a request takes a way, it is known whether handles can be sent on it.
"""

from __future__ import annotations

import logging
from collections.abc import Collection
from contextlib import suppress
from pathlib import Path

from blockflow.core.errors import BlockFlowError
from blockflow.tensormq.arena import Arena
from blockflow.tensormq.cuda_api import CudaApi, CudaError, EventKind
from blockflow.tensormq.cuda_book import BookReader, Export, write_trial
from blockflow.tensormq.cuda_verdict import VerdictBook

_LOG = logging.getLogger("blockflow.cuda")

TRIAL_BYTES = 2 << 20
"""A whole block of the driver, as a slab is: nothing else lies in it."""


class TrialPiece:
    """An owner's side: what others try to open. Freed with the slab, by the same rules.

    Without device memory for it there is none; consumers then say so, and all goes over the host.
    """

    def __init__(self, api: CudaApi, uuid: str, book: Arena) -> None:
        self._api = api
        self._pointer = self._event = 0
        try:
            self._pointer = api.mem_alloc(TRIAL_BYTES)
            self._event = api.event_create(EventKind.READY)
            memory, event = api.mem_export(self._pointer), api.event_export(self._event)
        except CudaError as exc:
            _LOG.warning("nobody can try to open this worker's device memory: %s", exc)
            self.free()
            return
        write_trial(book, Export(uuid, TRIAL_BYTES, memory, (event,)))

    def free(self) -> None:
        """Every consumer must have closed it. Raises CudaError."""
        event, self._event = self._event, 0
        pointer, self._pointer = self._pointer, 0
        if event:
            self._api.event_destroy(event)
        if pointer:
            self._api.mem_free(pointer)


def try_owners(api: CudaApi, run_dir: Path, verdicts: VerdictBook, owners: Collection[int]) -> None:
    """Find out whose device memory can be opened here, where that is not known yet, and note it.

    Takes about a millisecond for each new owner. What was known of others than ``owners`` is
    forgotten.
    """
    verdicts.keep(owners)
    for owner in owners:
        if not verdicts.known(owner):
            _try(api, run_dir, verdicts, owner)


def _try(api: CudaApi, run_dir: Path, verdicts: VerdictBook, owner: int) -> None:
    try:
        book = BookReader(run_dir, owner)
    except BlockFlowError:
        return  # it is gone, or cannot share: nobody will send a handle of it
    try:
        trial, slab = book.trial(), book.export()
        if trial is None:
            why = "it has nothing to try"
        else:
            # The slab itself, where it is there already: a large one may fail where a small does
            # not.
            why = _failure(api, (slab or trial).memory, trial.events[0])
    except BlockFlowError as exc:
        why = exc.message
    finally:
        book.unlock()
    if why:
        verdicts.refused(owner, why)
    else:
        verdicts.opened(owner)


def _failure(api: CudaApi, memory: bytes, event: bytes) -> str:
    """Why these cannot be opened here; '' if they can. Both are closed again."""
    pointer = opened = 0
    try:
        pointer = api.mem_import(memory)
        opened = api.event_import(event)
        api.event_query(opened)
    except CudaError as exc:
        return exc.message
    finally:
        with suppress(CudaError):  # a device that fails here says so at the next call
            if opened:
                api.event_destroy(opened)
            if pointer:
                api.mem_close(pointer)
    return ""
