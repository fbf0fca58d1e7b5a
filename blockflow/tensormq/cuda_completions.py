"""What follows device work: called when the device is past a point, by a thread that sleeps in the
driver; and the bound on what the host may order ahead of the device.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from blockflow.tensormq.cuda_api import CudaApi, CudaError, EventKind

_LOG = logging.getLogger("blockflow.cuda")
_Job = tuple[int, bool, Callable[[], None]]
"""An event, whether it is of the thread's own, and what to call."""

TEND_S = 0.2
"""How often the thread looks after other things, at least."""


class Completions:
    """Calls functions when the device has come to a point of a stream.

    Args:
        tend: called a few times per second while nothing else is to do.
        broken: called with the reason when the device will not come to any point any more.

    Attributes:
        lost: it will not. What is called from then on says nothing of what the device has done.
    """

    def __init__(
        self, api: CudaApi, tend: Callable[[], None], broken: Callable[[str], None]
    ) -> None:
        self._api = api
        self._tend = tend
        self._broken = broken
        self.lost = False
        self._queue: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._kept: deque[_Job] = deque()
        self._spare: deque[int] = deque()
        self._lock = threading.Lock()
        self._pending = 0
        self._idle = threading.Condition(self._lock)
        self._thread = threading.Thread(target=self._run, name="bf-device", daemon=True)
        self._thread.start()

    @property
    def pending(self) -> int:
        """Functions that have not been called yet."""
        return self._pending

    def after(self, stream: int, call: Callable[[], None]) -> None:
        """``call()`` when all that ``stream`` holds now is done; in the thread of this object."""
        try:
            event = self._spare.popleft()
        except IndexError:
            event = self._api.event_create(EventKind.DONE)
        self._api.event_record(event, stream)
        self._put(event, True, call)

    def when(self, event: int, call: Callable[[], None]) -> None:
        """``call()`` when ``event`` (the caller's) has come."""
        self._put(event, False, call)

    def later(self, event: int, call: Callable[[], None]) -> None:
        """As :meth:`when`, for who has something more urgent to do: the thread, which would want
        the interpreter meanwhile, is woken by :meth:`go_on`, or by what comes behind."""
        with self._lock:
            self._pending += 1
            self._kept.append((event, False, call))

    def go_on(self) -> None:
        """What :meth:`later` was told is looked after now."""
        if self._kept:
            with self._lock:
                self._take_up()

    def _take_up(self) -> None:
        while self._kept:
            self._queue.put(self._kept.popleft())

    def wait_idle(self, timeout_s: float | None = None) -> bool:
        """Whether everything was called within this time; None: however long it takes."""
        with self._idle:
            self._take_up()
            return self._idle.wait_for(lambda: not self._pending, timeout_s)

    def close(self, timeout_s: float) -> bool:
        """End the thread and free the events; False when the device does not come along."""
        self._queue.put(None)
        self._thread.join(timeout_s)
        if self._thread.is_alive():
            return False
        while self._spare:
            self._api.event_destroy(self._spare.popleft())
        return True

    def _put(self, event: int, own: bool, call: Callable[[], None]) -> None:
        with self._lock:
            self._pending += 1
            self._take_up()
            self._queue.put((event, own, call))

    def _run(self) -> None:
        tended = time.monotonic()
        while True:
            if time.monotonic() - tended >= TEND_S:
                self.guarded(self._tend)
                tended = time.monotonic()
            try:
                job = self._queue.get(timeout=TEND_S)
            except queue.Empty:
                self.go_on()
                continue
            if job is None:
                return
            event, own, call = job
            try:
                self._api.event_synchronize(event)
            except CudaError as exc:  # the context is lost, and every later call says the same
                self.lost = True
                self._broken(str(exc))
            self.guarded(call)
            if own:
                self._spare.append(event)
            with self._idle:
                self._pending -= 1
                if not self._pending:
                    self._idle.notify_all()

    def guarded(self, call: Callable[[], None]) -> None:
        """``call()``; what it raises is logged."""
        try:
            call()
        except Exception:  # a defect there must not end the thread: slots would never come back
            _LOG.exception("work after the device's failed")


@dataclass(slots=True, eq=False)
class _Ordered:
    """A batch on the device.

    Attributes:
        start, stop: events around its forward. began: called when the device comes to it.
        calls: what is to follow it.
        begun: ``start`` is recorded. open: more of it may be ordered still. over: its calls are
            being made.
    """

    start: int
    stop: int
    began: Callable[[], None] | None
    calls: list[Callable[[], None]] = field(default_factory=list)
    begun: bool = False
    open: bool = True
    over: bool = False


class DeviceQueue:
    """Bounds what the engine thread may put into the stream ahead of the device, and times it.

    Without it a worker would take batch after batch from its queue as fast as it can *order* them:
    they would wait on the device, where no policy can join them any more.

    What is to follow a batch shares one event and one waking of the completions' thread: each of
    its own would cost as much as a hop's other steps together (docs/cuda-ipc.md).

    Args:
        depth: batches ordered and not done: two keep the device busy from one to the next.
    """

    def __init__(self, api: CudaApi, stream: int, completions: Completions, depth: int = 2) -> None:
        self._api = api
        self._stream = stream
        self._completions = completions
        self.depth = depth
        self._lock = threading.Lock()
        self._last: _Ordered | None = None
        self._open: deque[_Ordered] = deque()
        self._done: deque[_Ordered] = deque()  # filled by the completions' thread
        self._spare: deque[tuple[int, int]] = deque()

    @contextmanager
    def batch(
        self, record: Callable[[int], None], began: Callable[[], None] | None = None
    ) -> Iterator[None]:
        """Around the ordering of one batch, in the engine thread.

        Waits first until fewer than ``depth`` are under way. ``record(ns)`` gets the batch's time
        on the device, from :meth:`begins` on, when it is done, in the completions' thread; never if
        the device is lost before, which errors of its kernels are told by. That thread is not woken
        before :meth:`Completions.go_on`: first the batch's messages leave. ``began()`` is called
        there, too, when that time begins; that is a waking more.

        Raises:
            CudaError: the device is lost, by this batch or by one before it.
        """
        batch = self._begin(began)
        try:
            yield
        finally:
            self.begins()
            with self._lock:
                batch.open = False
            self._api.event_record(batch.stop, self._stream)
            self._completions.later(batch.stop, lambda: self._end(batch, record))

    def begins(self) -> None:
        """What the batch reads is ordered: its time begins behind what that waits for, which may be
        another process's work. The first call counts."""
        batch = self._last
        if batch is not None and batch.open and not batch.begun:
            batch.begun = True
            self._api.event_record(batch.start, self._stream)
            if batch.began is not None:
                self._completions.later(batch.start, batch.began)

    def within(self, call: Callable[[], None]) -> None:
        """``call()`` in the completions' thread when the device is past all that the stream holds
        now, or somewhat later: past the batch that is being ordered."""
        self._follow(call, closed_too=False)

    def behind(self, call: Callable[[], None]) -> None:
        """The same, and no later than that, where only batches have used what it is about and none
        will again: the last one need not be open any more."""
        self._follow(call, closed_too=True)

    def settle(self) -> None:
        """Wait until the device has done all batches, and whoever asked has been told.

        Raises:
            CudaError: the device is lost.
        """
        for batch in tuple(self._open):
            self._api.event_synchronize(batch.stop)
        self._completions.wait_idle()

    def _follow(self, call: Callable[[], None], closed_too: bool) -> None:
        with self._lock:
            last = self._last
            if last is not None and not last.over and (last.open or closed_too):
                last.calls.append(call)
                return
        self._completions.after(self._stream, call)

    def _end(self, batch: _Ordered, record: Callable[[int], None]) -> None:
        with self._lock:
            batch.over = True
        if not self._completions.lost:
            self._completions.guarded(
                lambda: record(self._api.event_elapsed_ns(batch.start, batch.stop))
            )
            self._done.append(batch)
        for call in batch.calls:
            self._completions.guarded(call)

    def _begin(self, began: Callable[[], None] | None) -> _Ordered:
        self._recycle()
        while len(self._open) >= self.depth:
            self._api.event_synchronize(self._open.popleft().stop)
        create = self._api.event_create
        pair = (
            self._spare.popleft()
            if self._spare
            else (create(EventKind.CLOCK), create(EventKind.CLOCK))
        )
        batch = _Ordered(*pair, began)
        self._open.append(batch)
        with self._lock:
            self._last = batch
        return batch

    def _recycle(self) -> None:
        """What is done is under way no more: recorded anew while it counts as that, it would be
        waited for as the younger batch that it then belongs to."""
        while self._done:
            batch = self._done.popleft()
            if batch in self._open:
                self._open.remove(batch)
            self._spare.append((batch.start, batch.stop))

    def close(self) -> None:
        self._recycle()
        for pair in self._spare:
            for event in pair:
                self._api.event_destroy(event)
        self._spare.clear()
