"""CudaDevice: one device in this process: its stream, what waits for it, copies and their count.

All work of a worker goes into one stream, in the order of the engine thread's calls. The host never
waits for the device on the way of a tensor: what must happen *after* device work (a release mark, a
measured duration) is given to :class:`Completions`, whose thread sleeps in the driver.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass

from blockflow.tensormq.channel import Landed
from blockflow.tensormq.cuda_api import CudaApi, CudaError, DeviceFacts, EventKind
from blockflow.tensormq.cuda_host import SMALL_BYTES, Pins, Staging, address_of

_LOG = logging.getLogger("blockflow.cuda")
_TEND_S = 0.2


@dataclass(slots=True)
class CopyCounts:
    """Copies between host and device, and from peer devices, since the start."""

    h2d_copies: int = 0
    h2d_bytes: int = 0
    d2h_copies: int = 0
    d2h_bytes: int = 0
    d2d_copies: int = 0
    d2d_bytes: int = 0


@dataclass(slots=True)
class UploadWays:
    """Those of the copies to the device that did not come straight from page-locked memory:
    ``staged`` were copied within the host first, into page-locked memory of this process;
    ``pageable`` were left to the driver."""

    h2d_staged_copies: int = 0
    h2d_staged_bytes: int = 0
    h2d_pageable_copies: int = 0
    h2d_pageable_bytes: int = 0


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
        self._queue: queue.SimpleQueue[tuple[int, bool, Callable[[], None]] | None] = (
            queue.SimpleQueue()
        )
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

    def wait_idle(self, timeout_s: float | None = None) -> bool:
        """Whether everything was called within this time; None: however long it takes."""
        with self._idle:
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
        self._queue.put((event, own, call))

    def _run(self) -> None:
        tended = time.monotonic()
        while True:
            if time.monotonic() - tended >= _TEND_S:
                self._guarded(self._tend)
                tended = time.monotonic()
            try:
                job = self._queue.get(timeout=_TEND_S)
            except queue.Empty:
                continue
            if job is None:
                return
            event, own, call = job
            try:
                self._api.event_synchronize(event)
            except CudaError as exc:  # the context is lost, and every later call says the same
                self.lost = True
                self._broken(str(exc))
            self._guarded(call)
            if own:
                self._spare.append(event)
            with self._idle:
                self._pending -= 1
                if not self._pending:
                    self._idle.notify_all()

    def _guarded(self, call: Callable[[], None]) -> None:
        try:
            call()
        except Exception:  # a defect there must not end the thread: slots would never come back
            _LOG.exception("work after the device's failed")


class DeviceQueue:
    """Bounds what the engine thread may put into the stream ahead of the device, and times it.

    Without it a worker would take batch after batch from its queue as fast as it can *order* them:
    they would wait on the device, where no policy can join them any more.

    Args:
        depth: batches ordered and not done: two keep the device busy from one to the next.
    """

    def __init__(self, api: CudaApi, stream: int, completions: Completions, depth: int = 2) -> None:
        self._api = api
        self._stream = stream
        self._completions = completions
        self.depth = depth
        self._open: deque[tuple[int, int]] = deque()
        self._done: deque[tuple[int, int]] = deque()  # filled by the completions' thread
        self._spare: deque[tuple[int, int]] = deque()

    @contextmanager
    def batch(self, record: Callable[[int], None]) -> Iterator[None]:
        """Around the ordering of one batch, in the engine thread.

        Waits first until fewer than ``depth`` are under way. ``record(ns)`` gets the batch's time
        on the device when it is done, in the completions' thread; never if the device is lost
        before, which errors of its kernels are told by.

        Raises:
            CudaError: the device is lost, by this batch or by one before it.
        """
        start, stop = pair = self._begin()
        try:
            yield
        finally:
            self._api.event_record(stop, self._stream)

            def done() -> None:
                if self._completions.lost:
                    return
                record(self._api.event_elapsed_ns(start, stop))
                self._done.append(pair)

            self._completions.when(stop, done)

    def settle(self) -> None:
        """Wait until the device has done all batches, and whoever asked has been told.

        Raises:
            CudaError: the device is lost.
        """
        for _, stop in tuple(self._open):
            self._api.event_synchronize(stop)
        self._completions.wait_idle()

    def _begin(self) -> tuple[int, int]:
        self._recycle()
        while len(self._open) >= self.depth:
            self._api.event_synchronize(self._open.popleft()[1])
        if self._spare:
            pair = self._spare.popleft()
        else:
            create = self._api.event_create
            pair = create(EventKind.CLOCK), create(EventKind.CLOCK)
        self._api.event_record(pair[0], self._stream)
        self._open.append(pair)
        return pair

    def _recycle(self) -> None:
        """What is done is under way no more: recorded anew while it counts as that, it would be
        waited for as the younger batch that it then belongs to."""
        while self._done:
            pair = self._done.popleft()
            if pair in self._open:
                self._open.remove(pair)
            self._spare.append(pair)

    def close(self) -> None:
        self._recycle()
        for pair in self._spare:
            for event in pair:
                self._api.event_destroy(event)
        self._spare.clear()


class CudaDevice:
    """The device of this process.

    Attributes:
        api: its calls. facts: what it is. name: ``cuda:N``. stream: where all work goes.
        copies, ways: counted here and nowhere else.
        completions, pins, staging, queue: see the classes.
        broken: why it cannot be used any more; '' while it can.

    Args:
        on_broken: told that reason once, in any thread: the process has to end.
    """

    def __init__(self, api: CudaApi, on_broken: Callable[[str], None] = lambda _: None) -> None:
        self.api = api
        self.broken = ""
        self._on_broken = on_broken
        self.facts: DeviceFacts = api.facts()
        self.name = f"cuda:{api.ordinal}"
        self.stream = api.stream_create()
        self.copies, self.ways = CopyCounts(), UploadWays()
        self.tend: Callable[[], None] = lambda: None
        self.completions = Completions(api, lambda: self.tend(), self._break)
        self.pins = Pins(api, self.stream)
        self.staging = Staging(api, self.stream)
        self.queue = DeviceQueue(api, self.stream, self.completions)
        self._clocks: deque[tuple[int, int]] = deque()

    def _break(self, why: str) -> None:
        if not self.broken:
            self.broken = why
            _LOG.error("%s cannot be used any more: %s", self.name, why)
            self._on_broken(why)

    def watch(self, after_s: float, stuck: Callable[[], bool], why: str) -> None:
        """Call the device broken, for the reason ``why``, if it is ``stuck`` then."""
        timer = threading.Timer(after_s, lambda: self._break(why) if stuck() else None)
        timer.daemon = True
        timer.start()

    def upload(self, target: int, memory: memoryview) -> bool:
        """Queue a copy from host memory.

        Returns:
            Whether ``memory`` has been read; if not, keep it as it is until the stream is past
            this.
        """
        nbytes = memory.nbytes
        if not nbytes:
            return True
        self.copies.h2d_copies += 1
        self.copies.h2d_bytes += nbytes
        locked = self.pins.hold(memory)
        if not locked and nbytes > SMALL_BYTES and self.staging.upload(target, memory):
            self.ways.h2d_staged_copies += 1
            self.ways.h2d_staged_bytes += nbytes
            return True
        self.api.copy_h2d(target, address_of(memory), nbytes, self.stream)
        if not locked:
            self.ways.h2d_pageable_copies += 1
            self.ways.h2d_pageable_bytes += nbytes
        return False

    def forget_figures(self) -> None:
        """Count copies from here on."""
        self.copies, self.ways = CopyCounts(), UploadWays()

    def keep(self, *things: object) -> None:
        """Keep these alive until the stream is past what it holds now."""
        self.completions.after(self.stream, lambda: _let_go(things))

    def download(self, memory: memoryview, source: int) -> None:
        """Copy to host memory, and wait for it and for all that the stream held before."""
        self._copy_down(memory, source)
        self.api.stream_synchronize(self.stream)

    def fetch(self, memory: memoryview, source: int, landed: Landed) -> None:
        """Queue a copy to host memory; in the engine thread. ``landed`` is called in the
        completions' thread when it is there, and not if the device is lost before."""
        api = self.api
        start, stop = pair = (
            self._clocks.popleft()
            if self._clocks
            else (api.event_create(EventKind.CLOCK), api.event_create(EventKind.CLOCK))
        )
        api.event_record(start, self.stream)
        self._copy_down(memory, source)
        api.event_record(stop, self.stream)

        def there() -> None:
            if not self.completions.lost:
                took_ns = max(0, api.event_elapsed_ns(start, stop))
                self._clocks.append(pair)
                landed(took_ns)

        self.completions.when(stop, there)

    def _copy_down(self, memory: memoryview, source: int) -> None:
        if memory.nbytes:
            self.api.copy_d2h(address_of(memory), source, memory.nbytes, self.stream)
            self.copies.d2h_copies += 1
            self.copies.d2h_bytes += memory.nbytes

    def close(self, timeout_s: float = 2.0) -> bool:
        """Free what was made here; False when the device still works on something after that time.

        Then everything is left to the end of the process.
        """
        end = time.monotonic() + timeout_s
        if not self.completions.wait_idle(timeout_s):
            return False
        self.pins.close()
        self.staging.close()
        if not self.completions.close(max(0.0, end - time.monotonic()) + 2 * _TEND_S):
            return False
        self.queue.close()
        for pair in self._clocks:
            for event in pair:
                self.api.event_destroy(event)
        with suppress(CudaError):
            self.api.stream_destroy(self.stream)
            self.api.close()
        return True


def _let_go(_: object) -> None:
    """The reference ends with the call."""
