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
from blockflow.tensormq.cuda_device import CudaDevice
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


def try_owners(
    device: CudaDevice, run_dir: Path, verdicts: VerdictBook, owners: Collection[int]
) -> None:
    """Find out whose device memory can be opened here, where that is not known yet, and note it.

    Takes about a millisecond for each new owner, whatever the device is at. What was known of
    others than ``owners`` is forgotten.
    """
    verdicts.keep(owners)
    for owner in owners:
        if not verdicts.known(owner):
            _try(device, run_dir, verdicts, owner)


def _try(device: CudaDevice, run_dir: Path, verdicts: VerdictBook, owner: int) -> None:
    try:
        book = BookReader(run_dir, owner)
    except BlockFlowError:
        return  # it is gone, or cannot share: nobody will send a handle of it
    pointer = 0
    try:
        trial, slab = book.trial(), book.export()
        if trial is None:
            why = "it has nothing to try"
        else:
            # The slab itself, where it is there already: a large one may fail where a small does
            # not.
            pointer = device.api.mem_import((slab or trial).memory)
            why = _failure(device.api, trial.events[0])
    except BlockFlowError as exc:
        why = exc.message
    finally:
        _close(device, book, pointer)
    if why:
        verdicts.refused(owner, why)
    else:
        verdicts.opened(owner)


def _failure(api: CudaApi, event: bytes) -> str:
    """Why this cannot be opened here; '' if it can. It is closed again."""
    opened = 0
    try:
        opened = api.event_import(event)
        api.event_query(opened)
    except CudaError as exc:
        return exc.message
    finally:
        with suppress(CudaError):  # a device that fails here says so at the next call
            if opened:
                api.event_destroy(opened)
    return ""


def _close(device: CudaDevice, book: BookReader, pointer: int) -> None:
    """Memory is closed by the thread that may wait: the driver closes when the device has nothing
    more to do. Until then its owner sees it open."""

    def close() -> None:
        try:
            device.api.mem_close(pointer)
        finally:
            book.unlock()

    if not pointer:
        book.unlock()
        return
    with suppress(CudaError):  # of a lost device: it goes with the process
        device.completions.after(device.stream, close)
