"""One connection to a Dispatcher: a background thread owns the socket, any thread may call.

Both clients, sync and async, are thin covers of :class:`Connection`.
"""

from __future__ import annotations

import logging
import os
import time
import uuid
import weakref
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager, suppress
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any, Literal

from blockflow.client.address import dispatcher_address, is_local, protection
from blockflow.client.core import ClientCore
from blockflow.client.counters import Counters
from blockflow.client.ends import Owner
from blockflow.client.io import IoThread
from blockflow.client.outcome import Answered, Described, Failed, Outcome
from blockflow.client.pending import PendingRequest
from blockflow.client.request import (
    check_deadline,
    check_retries,
    milliseconds,
    published_names,
    shown,
    task_names,
)
from blockflow.client.result import Result, Trip, make_result
from blockflow.client.sharing import SharedMemory, Sharing, Wish
from blockflow.client.tap import Tap
from blockflow.core.errors import BlockFlowError, RequestError, make_error
from blockflow.core.routing import TaskRoute
from blockflow.wire.client import Place, TaskResult
from blockflow.wire.data import REQUEST_ID_BYTES
from blockflow.wire.tensor import TensorDesc

log = logging.getLogger("blockflow.client")

Errors = Literal["raise", "return"]
Answer = Result | BlockFlowError
RequestId = bytes | str | uuid.UUID | None
Results = Literal["copy", "view"]
Read = Callable[[TensorDesc, Any], Any]


class Connection:
    """Connects at once and reconnects for ever, in the background.

    The arguments are those of :class:`~blockflow.client.base.BaseClient`.
    A connection belongs to the process that made it; after a fork the child makes its own.
    """

    def __init__(
        self,
        address: str | None = None,
        *,
        connect_timeout_s: float = 5.0,
        max_pending: int = 4096,
        shared_memory: Wish = "auto",
        client_keys: str | Path | None = None,
        server_key: str | None = None,
        tap: Tap | None = None,
    ) -> None:
        self.address = dispatcher_address(address)
        protect = protection(self.address, client_keys, server_key)
        connect_timeout_ms = milliseconds(connect_timeout_s)
        if connect_timeout_ms < 1 or type(max_pending) is not int or max_pending < 1:
            why = "connect_timeout_s is a number above 0, and max_pending a whole one"
            raise RequestError("INVALID_REQUEST", why, where="Client")
        if shared_memory not in ("auto", "off"):
            raise RequestError(
                "INVALID_REQUEST", f"shared_memory is 'auto' or 'off', not {shown(shared_memory)}"
            )
        core = ClientCore(
            self.address,
            connect_timeout_ns=connect_timeout_ms * 1_000_000,
            max_pending=max_pending,
            now_ns=time.monotonic_ns(),
            sharing=Sharing(shared_memory),
        )
        # numpy is most of the SDK's import time: paid by who connects, not by who imports.
        self._tensors = import_module("blockflow.client.tensors")
        self._core = core
        self._local = is_local(self.address)
        self._io = IoThread(core, protect, tap)
        self._pid = os.getpid()
        # Also ends the thread of a client that its program forgot to close.
        self._finalizer = weakref.finalize(self, self._io.abandon)
        self._finalizer.atexit = False  # the thread itself sees to that

    # --- calls -----------------------------------------------------------------------------------

    def submit(
        self,
        tasks: str | Sequence[str],
        x: Any,
        *,
        deadline_s: float | None,
        request_id: RequestId,
        dtype: str | None,
        errors: Errors,
        results: Results,
        retries: int,
    ) -> PendingRequest[Any]:
        """Send one request. The future gives a Result for one name, a map name -> Result for a
        sequence of names; with ``errors="return"`` an error stands where its Result would.

        Raises:
            RequestError: what can be known to be wrong here is raised here.
        """
        self._check_process()
        rid = _request_id(request_id)
        names = task_names(tasks)
        deadline_ms = None if deadline_s is None else milliseconds(deadline_s)
        check_deadline(deadline_s, deadline_ms)
        check_retries(retries)
        if errors not in ("raise", "return"):
            why = f"errors is 'raise' or 'return', not {shown(errors)}"
            raise RequestError("INVALID_REQUEST", why)
        if results not in ("copy", "view"):
            why = f"results is 'copy' or 'view', not {shown(results)}"
            raise RequestError("INVALID_REQUEST", why)
        desc, body, kind = self._tensors.to_wire(x, dtype)
        future: PendingRequest[Any] = self._new_pending(rid)
        core, now, from_wire = self._core, time.monotonic_ns(), self._tensors.from_wire
        side = self._io.side
        trip = Trip(desc.nbytes, results == "view", self._local)

        def read(desc: TensorDesc, frame: Any) -> Any:
            if isinstance(frame, Place):
                take = side.view if results == "view" else side.read
                frame = take(frame, desc.nbytes)
            return from_wire(desc, frame, kind)

        def call() -> list[Outcome]:
            core.submit(rid, names, desc, body, deadline_ms, now, retries)
            return []

        def end(outcome: Outcome) -> None:
            if isinstance(outcome, Described):
                return
            try:
                answers = _answers(outcome, names, read, errors, trip)
            except BlockFlowError as exc:
                # Without the way it came: its frames refer to the future, and so to the error.
                future.set_exception(exc.with_traceback(None))
            except Exception as exc:  # a defect: it must not leave its caller waiting
                log.exception("an answer could not be read")
                future.set_exception(make_error("INTERNAL", f"the answer cannot be read: {exc!r}"))
            else:
                future.set_result(answers[tasks] if isinstance(tasks, str) else answers)

        self._io.post(call, rid, Owner(end, future.is_free))
        return future

    def tasks(self, timeout_s: float) -> Future[dict[str, TaskRoute]]:
        """The published tasks, asked now."""
        return self._ask(None, timeout_s)

    def wait_ready(
        self, wanted: str | Iterable[str], timeout_s: float
    ) -> Future[dict[str, TaskRoute]]:
        """Ends when all ``wanted`` tasks are published (any, when empty).

        Raises:
            RequestError: INVALID_REQUEST, what is wanted are no names.
        """
        return self._ask(published_names(wanted), timeout_s)

    def counters(self) -> Counters:
        """A copy of the core's counters."""
        return replace(self._core.counters)

    def shared_memory(self) -> SharedMemory:
        """Whether tensors go through granted memory now, and if not, why."""
        return self._core.sharing.info()

    def close(self) -> Future[None]:
        """Cancel what is in flight, end the thread; the future is done when it has ended, or at
        once where its end cannot be seen: in a forked child, and in the thread itself.
        """
        if os.getpid() == self._pid:
            self._finalizer.detach()
            self._io.stop()
            if not self._io.is_current():
                return self._io.ended
        done: Future[None] = Future()
        done.set_result(None)
        return done

    def join(self) -> None:
        """Wait for the end of the thread after :meth:`close`."""
        if os.getpid() == self._pid:
            self._io.join()

    def waiting(self) -> AbstractContextManager[None]:
        """As :meth:`check_may_wait`, while the caller waits; it refuses also where callbacks of
        several clients would wait for one another."""
        self.check_may_wait()
        return self._io.awaited()

    def check_may_wait(self) -> None:
        """Refuse to wait where the answer could never come.

        Raises:
            RequestError: INVALID_REQUEST: this is the connection's own thread, which would have to
                receive the answer, or another process than the connection's.
        """
        self._check_process()
        if self._io.is_current():
            raise RequestError(
                "INVALID_REQUEST",
                "a callback cannot wait for this client: it runs in the thread that receives the "
                "answers",
                where=self.address,
                hint="use submit there, with a callback of its own, or wait in another thread",
            )

    # --- inside ----------------------------------------------------------------------------------

    def _ask(
        self, wanted: tuple[str, ...] | None, timeout_s: float
    ) -> Future[dict[str, TaskRoute]]:
        self.check_may_wait()  # both clients wait for these
        rid = os.urandom(REQUEST_ID_BYTES)
        core, now, timeout_ms = self._core, time.monotonic_ns(), milliseconds(timeout_s)
        future: PendingRequest[dict[str, TaskRoute]] = self._new_pending(rid)

        def call() -> list[Outcome]:
            core.ask(rid, wanted, timeout_ms, now)
            return []

        def end(outcome: Outcome) -> None:
            if isinstance(outcome, Described):
                future.set_result(outcome.tasks)
            elif isinstance(outcome, Failed):
                future.set_exception(outcome.error)

        self._io.post(call, rid, Owner(end, future.is_free))
        return future

    def _new_pending(self, request_id: bytes) -> PendingRequest[Any]:
        return PendingRequest(request_id, self._cancel, self.waiting, self._io.new_lock())

    def _cancel(self, request_id: bytes) -> None:
        self._check_process()
        core = self._core
        self._io.post(lambda: core.cancel(request_id), None, None)

    def _check_process(self) -> None:
        if os.getpid() != self._pid:
            raise RequestError(
                "INVALID_REQUEST",
                f"this client belongs to process {self._pid}",
                where=self.address,
                hint="make a new client after a fork",
            )


def _answers(
    outcome: Answered | Failed, tasks: Sequence[str], read: Read, errors: Errors, trip: Trip
) -> dict[str, Answer]:
    """Results by task.

    Raises:
        BlockFlowError: the request's or the first task's, unless they are to be returned.
    """
    if isinstance(outcome, Failed):
        answers: dict[str, Answer] = dict.fromkeys(tasks, outcome.error)
    else:
        # All are read, also when one of them fails: reading frees their slots.
        values = [
            _value(r, frame, read) for r, frame in zip(outcome.results, outcome.frames, strict=True)
        ]
        now_ns = time.monotonic_ns()
        answers = {}
        for r, frame, value in zip(outcome.results, outcome.frames, values, strict=True):
            if r.tensor is None or isinstance(value, BlockFlowError):
                answers[r.task] = value
            else:
                answers[r.task] = make_result(outcome, r, r.tensor, frame, value, trip, now_ns)
    if errors == "raise":
        for answer in answers.values():
            if isinstance(answer, BlockFlowError):
                raise answer
    return answers


def _value(r: TaskResult, frame: Any, read: Read) -> Any:
    """A task's tensor, or its error."""
    if r.error is not None:
        return r.error
    if r.tensor is None:
        return RequestError("MALFORMED_MESSAGE", "a result without a tensor", where=r.task)
    try:
        return read(r.tensor, frame)
    except BlockFlowError as exc:
        return exc
    except MemoryError:  # this result's alone: others may fit
        text = f"this process has no memory for a result of {r.tensor.nbytes} bytes"
        return make_error("NO_SPACE", text, where=r.task, hint="ask for less at once")


def _request_id(given: RequestId) -> bytes:
    if given is None:
        return os.urandom(REQUEST_ID_BYTES)
    raw = b""
    if isinstance(given, uuid.UUID):
        raw = given.bytes
    elif isinstance(given, str):
        with suppress(ValueError):
            raw = uuid.UUID(given).bytes
    elif isinstance(given, bytes | bytearray | memoryview):  # bytes(n) of a number makes n zeros
        raw = bytes(given)
    if len(raw) != REQUEST_ID_BYTES or raw == bytes(REQUEST_ID_BYTES):
        shown = repr(given) if isinstance(given, str | bytes) else type(given).__name__
        raise RequestError(
            "INVALID_REQUEST",
            f"a request id is {REQUEST_ID_BYTES} bytes, their hex form or a UUID, not {shown}",
            where="request_id",
            hint="all zeros is no id; of a number: uuid.UUID(int=...)",
        )
    return raw
