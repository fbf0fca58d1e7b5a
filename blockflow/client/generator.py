"""The TaskGenerator of the thesis (section 4.2): a simulated client that sends tasks.

N different clients are N generators, each in its own thread, on one Client or on several.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from functools import partial
from itertools import count as counter
from itertools import takewhile
from math import inf
from numbers import Integral, Real
from queue import SimpleQueue
from typing import Any, Literal

from blockflow.client.collector import OK, Collector, Record
from blockflow.client.request import check_deadline, milliseconds, shown, task_names
from blockflow.client.result import BlockTiming, Result
from blockflow.client.sync import Client
from blockflow.core.errors import BlockFlowError, RequestError

Mode = Literal["sync", "poisson"]
Inputs = Sequence[Any] | Callable[[int], Any]

_FINAL = ("CANCELLED", "INTERNAL")
"""So is every request refused once the client is closed, or its thread has failed."""


_REFUSED_S = 0.01
"""What the client refuses by itself takes no time: a run that only ``duration_s`` ends would do
nothing else, and record it, as often as a processor can."""


class _Refused(Future[Any]):
    """Of a request that was refused before it was sent."""


class TaskGenerator:
    """Sends inputs of one task (or of several tasks at once) and records every outcome.

    Args:
        client: whose connection is used.
        tasks: a task, or several that share their first block (one request names them all, and
            is recorded as ``one+two``).
        inputs: arrays to send in turn, again from the start when they are used up, or a function
            from the request's number to its array.
        mode: ``"sync"``: the next request leaves after the answer to the last one; ``"poisson"``:
            an open loop with exponentially distributed gaps, which waits for no answer.
        rate: lambda, the mean number of requests per second of the poisson mode.
        count: stop after so many requests.
        duration_s: stop sending after so long, also what was due before and is late; give
            ``count``, ``duration_s`` or both.
        seed: of the gaps, so that a run can be repeated.
        deadline_s: of each request; None leaves it to the topology.
        collector: gets the records; a new one by default.
        on_progress: called with the number of the run's finished requests; in the poisson mode from
            the connection's thread, so it must be quick and cannot wait for the client.

    Raises:
        RequestError: INVALID_REQUEST, the arguments do not fit together.
    """

    def __init__(
        self,
        client: Client,
        tasks: str | Sequence[str],
        inputs: Inputs,
        *,
        mode: Mode = "sync",
        rate: float | None = None,
        count: int | None = None,
        duration_s: float | None = None,
        seed: int = 0,
        deadline_s: float | None = None,
        collector: Collector | None = None,
        on_progress: Callable[[int], None] | None = None,
    ) -> None:
        _check(mode, rate, count, duration_s, inputs)
        if deadline_s is not None:
            check_deadline(deadline_s, milliseconds(deadline_s))
        self._client = client
        self._tasks = task_names(tasks)
        self._inputs = inputs
        self._mode = mode
        self._rate = rate
        self._count = count
        self._duration_s = duration_s
        self._seed = seed
        self._deadline_s = deadline_s
        self.collector = Collector() if collector is None else collector
        self._on_progress = on_progress
        self._stop = threading.Event()
        self._finished = counter(1)
        self._began_ms = 0.0

    def run(self) -> Collector:
        """Send everything, wait for the last answer, and return the collector.

        Errors of single requests are outcomes in the records, not exceptions; what ``on_progress``
        raises ends the run, and so does the client's end.
        """
        self._began_ms = self.collector.now_ms()
        self._finished = counter(1)
        try:
            if self._mode == "sync":
                self._run_sync()
            else:
                self._run_poisson()
        finally:
            self._stop.clear()
        return self.collector

    def stop(self) -> None:
        """Send no more; :meth:`run` returns when what is in flight has ended. From any thread.

        A stop between two runs, or before the first, ends the next one at its start: the thread
        that is to run may not have come to it yet.
        """
        self._stop.set()

    # --- the two modes ---------------------------------------------------------------------------

    def _run_sync(self) -> None:
        for i in range(self._count) if self._count is not None else counter():
            if self._stop.is_set() or self._is_over():
                return
            x = self._input(i)
            start_ms = self.collector.now_ms()
            future = self._submit(x)
            future.exception()  # waits; the outcome is looked at in _finish
            self._finish(future, _rows(x), start_ms, start_ms)
            if self._count is None and isinstance(future, _Refused):
                self._stop.wait(_REFUSED_S)

    def _run_poisson(self) -> None:
        times = poisson_times(self._rate or 1.0, self._seed)
        if self._duration_s is not None:
            end = self._duration_s
            times = takewhile(lambda t: t < end, times)
        failed: list[BaseException] = []
        # Needs no lock that a signal's handler, which closes the client, could find taken.
        ended: SimpleQueue[None] = SimpleQueue()
        sent = 0

        def done(future: Future[Any], rows: int, intended_ms: float, sent_ms: float) -> None:
            try:
                self._finish(future, rows, intended_ms, sent_ms)
            except BaseException as exc:  # of ``on_progress``: :meth:`run` raises it
                failed.append(exc)
                self.stop()
            ended.put(None)

        numbers = range(self._count) if self._count is not None else counter()
        for i, at_s in zip(numbers, times, strict=False):
            x = self._input(i)
            if self._stop.wait(max(0.0, at_s - self._elapsed_s())) or self._is_over():
                break
            sent_ms = self.collector.now_ms()
            future = self._submit(x)
            sent += 1
            due_ms = self._began_ms + at_s * 1e3
            future.add_done_callback(
                partial(done, rows=_rows(x), intended_ms=due_ms, sent_ms=sent_ms)
            )
        for _ in range(sent):
            ended.get()
        if failed:
            raise failed[0]

    # --- one request -----------------------------------------------------------------------------

    def _submit(self, x: Any) -> Future[Any]:
        try:
            return self._client.submit(self._tasks, x, deadline_s=self._deadline_s, errors="return")
        except BlockFlowError as exc:  # refused before it was sent: an outcome like any other
            if exc.code in _FINAL:
                self.stop()
            refused = _Refused()
            refused.set_exception(exc)
            return refused

    def _finish(self, future: Future[Any], rows: int, intended_ms: float, sent_ms: float) -> None:
        done_ms = self.collector.now_ms()
        outcome, timings, total_ms = _judge(future)
        name = "+".join(self._tasks)
        self.collector.add(
            Record(name, rows, intended_ms, sent_ms, done_ms, outcome, timings, total_ms)
        )
        if self._on_progress is not None:
            self._on_progress(next(self._finished))

    def _input(self, i: int) -> Any:
        return self._inputs(i) if callable(self._inputs) else self._inputs[i % len(self._inputs)]

    def _elapsed_s(self) -> float:
        return (self.collector.now_ms() - self._began_ms) / 1e3

    def _is_over(self) -> bool:
        return self._duration_s is not None and self._elapsed_s() >= self._duration_s


def poisson_times(rate: float, seed: int) -> Iterator[float]:
    """Arrival times in seconds of a Poisson process with ``rate`` arrivals per second; endless."""
    gaps = random.Random(seed)
    at = 0.0
    while True:
        at += gaps.expovariate(rate)
        yield at


def _judge(future: Future[Any]) -> tuple[str, tuple[BlockTiming, ...], float]:
    """Outcome, hops (a block that several tasks share counts once) and total of a request."""
    error = future.exception()
    if error is not None:
        return (error.code if isinstance(error, BlockFlowError) else "INTERNAL"), (), 0.0
    answers = list(future.result().values())
    for answer in answers:
        if not isinstance(answer, Result):
            return answer.code, (), 0.0
    hops: dict[int, BlockTiming] = {}
    for t in (t for a in answers for t in a.timings):
        # A shared block hands its output on branch by branch: the last hand-over has all of the
        # overhead.
        if t.node not in hops or t.overhead_ms > hops[t.node].overhead_ms:
            hops[t.node] = t
    return OK, tuple(hops.values()), max(a.total_ms for a in answers)


def _rows(x: Any) -> int:
    """The size of dim 0; 0 where there is none, which the client refuses."""
    shape = getattr(x, "shape", None)
    if isinstance(shape, tuple):
        return int(shape[0]) if shape else 0
    return len(x) if hasattr(x, "__len__") else 0


def _is_positive(value: Any, kind: Any = Real) -> bool:
    return isinstance(value, kind) and bool(value > 0)


def _has_items(inputs: Any) -> bool:
    try:
        return len(inputs) > 0
    except TypeError:  # None, a generator, an array without dims
        return False


def _check(
    mode: str, rate: float | None, count: int | None, duration_s: float | None, inputs: Inputs
) -> None:
    if mode not in ("sync", "poisson"):
        why = f"mode is 'sync' or 'poisson', not {shown(mode)}"
    elif mode == "poisson" and (not _is_positive(rate) or rate == inf):
        why = f"the poisson mode needs a finite rate above 0, not {shown(rate)}"
    elif mode == "sync" and rate is not None:
        why = "a rate has no meaning in the sync mode"
    elif count is None and duration_s is None:
        why = "give count, duration_s or both"
    elif count is not None and not _is_positive(count, Integral):
        why = f"count is a whole number above 0, not {shown(count)}"
    elif duration_s is not None and not _is_positive(duration_s):
        why = f"duration_s is a number above 0, not {shown(duration_s)}"
    elif not callable(inputs) and not _has_items(inputs):
        why = "inputs is a sequence with something in it, or a function of the request's number"
    else:
        return
    raise RequestError("INVALID_REQUEST", why, where="TaskGenerator")
