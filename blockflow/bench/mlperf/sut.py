"""Sut: the client SDK as LoadGen's system under test. Every sample gets its answer.

LoadGen waits for each response without a time-out, so a request that fails is completed like one
that succeeded, and counted: a run with a single failure is INVALID (verdict.py).
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from blockflow.bench.mlperf.library import Library
from blockflow.bench.mlperf.settings import RunSettings, Scenario
from blockflow.bench.mlperf.tally import Tally
from blockflow.core.errors import BlockFlowError

MAX_TRIES = 50
"""Offline, how often a request is sent that the system refuses for want of room."""

PAUSE_S = 0.02
"""Until such a request is sent again, unless the system names a time."""

Array = NDArray[Any]
Complete = Callable[[Sequence[int], Sequence[Array | None]], None]
"""Takes response ids and each one's output row, None where there is none."""


class Sender(Protocol):
    """What is used of a client."""

    def submit(
        self, tasks: str, x: Any, *, deadline_s: float, dtype: str | None
    ) -> Future[Any]: ...  # fmt: skip


@dataclass(slots=True)
class TaskData:
    """A task's rows, each [1, ...]; ``kinds`` numbers their dims, ``most`` rows fit a request."""

    rows: Sequence[Array]
    dtype: str
    most: int
    kinds: Sequence[int] = field(init=False)

    def __post_init__(self) -> None:
        known: dict[tuple[int, ...], int] = {}
        self.kinds = [known.setdefault(r.shape, len(known)) for r in self.rows]

    def tensor(self, rows: Sequence[int]) -> Array:
        """Some rows as one tensor [n, ...]."""
        if len(rows) == 1:
            return self.rows[rows[0]]
        return np.concatenate([self.rows[r] for r in rows])


@dataclass(slots=True)
class _Query:
    """Of LoadGen: ``left`` of its requests have no outcome yet."""

    begun_ns: int
    left: int


@dataclass(slots=True)
class _Request:
    task: str
    ids: list[int]
    rows: list[int]
    query: _Query
    tries: int = 0
    not_before: float = 0.0


class Sut:
    """Turns LoadGen's samples into requests and their outcomes into responses.

    Args:
        library: what the sample numbers stand for.
        data: per task.
    """

    def __init__(
        self,
        client: Sender,
        library: Library,
        data: Mapping[str, TaskData],
        settings: RunSettings,
        tally: Tally,
        complete: Complete,
    ) -> None:
        self._client = client
        self._library = library
        self._data = data
        self._kinds = {task: d.kinds for task, d in data.items()}
        self._most = {task: d.most for task, d in data.items()}
        self._settings = settings
        self._tally = tally
        self._complete = complete
        self._change = threading.Condition()
        self._under_way = 0
        self._refused: deque[_Request] = deque()

    def issue(self, ids: Sequence[int], indices: Sequence[int]) -> None:
        """Send these samples; never raises, for LoadGen could not catch it.

        Offline, this returns when all are answered: no more than ``in_flight`` requests are under
        way at once. Otherwise it returns when they are sent.
        """
        query = _Query(time.monotonic_ns(), 0)
        requests = [
            _Request(
                task,
                [ids[p] for p in positions],
                [self._library.row[indices[p]] for p in positions],
                query,
            )
            for task, positions in self._library.groups(indices, self._most, self._kinds)
        ]
        query.left = len(requests)
        self._tally.issued(len(ids), {r.task for r in requests})
        if self._settings.scenario is Scenario.OFFLINE:
            self._send_within_window(deque(requests))
        else:
            for request in requests:
                self._send(request)

    def _send_within_window(self, todo: deque[_Request]) -> None:
        while True:
            with self._change:
                self._change.wait_for(
                    lambda: (
                        self._under_way < self._settings.in_flight
                        and (todo or self._refused or not self._under_way)
                    )
                )
                request = self._refused.popleft() if self._refused else None
            if request is None:
                if not todo:
                    return
                request = todo.popleft()
            pause = request.not_before - time.monotonic()
            if pause > 0:
                time.sleep(pause)
            self._send(request)

    def _send(self, request: _Request) -> None:
        request.tries += 1
        data = self._data[request.task]
        with self._change:
            self._under_way += 1
        try:
            future = self._client.submit(
                request.task,
                data.tensor(request.rows),
                deadline_s=self._settings.deadline_s,
                dtype="bfloat16" if data.dtype == "bfloat16" else None,
            )
        except Exception as error:  # refused before it was sent: an outcome like any other
            self._end(request, error, None)
        else:
            future.add_done_callback(partial(self._done, request))

    def _done(self, request: _Request, future: Future[Any]) -> None:
        error = future.exception()
        self._end(request, error, None if error is not None else future.result())

    def _end(self, request: _Request, error: BaseException | None, result: Any) -> None:
        if error is None and len(result.value) != len(request.ids):
            error = ValueError(f"{len(result.value)} rows for {len(request.ids)} samples")
        if isinstance(error, BlockFlowError) and self._again(request, error):
            return
        outputs: list[Array | None] = [None] * len(request.ids)
        if error is None:
            outputs = [np.ascontiguousarray(result.value[i]) for i in range(len(request.ids))]
        now = time.monotonic_ns()
        self._complete(request.ids, outputs)
        latency_ms = (now - request.query.begun_ns) / 1e6
        if error is None:
            self._tally.answered(request.task, len(request.ids), latency_ms, result.timings)
        else:
            told = error if isinstance(error, BlockFlowError) else None
            code, why = ("INTERNAL", repr(error)) if told is None else (told.code, told.message)
            self._tally.failed(request.task, len(request.ids), latency_ms, code, why)
        with self._change:
            request.query.left -= 1
            if not request.query.left and self._settings.per_query > 1:
                self._tally.ended(latency_ms)
            self._under_way -= 1
            self._change.notify_all()

    def _again(self, request: _Request, error: BlockFlowError) -> bool:
        """Whether a refused request goes again: offline nobody is late, the system is only full."""
        offline = self._settings.scenario is Scenario.OFFLINE
        if not offline or error.code != "OVERLOADED" or request.tries >= MAX_TRIES:
            return False
        pause_s = PAUSE_S if error.retry_after_ms is None else error.retry_after_ms / 1e3
        request.not_before = time.monotonic() + min(pause_s, 1.0)
        self._tally.refused()
        with self._change:
            self._under_way -= 1
            self._refused.append(request)
            self._change.notify_all()
        return True
