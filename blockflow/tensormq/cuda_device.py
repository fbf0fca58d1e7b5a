"""CudaDevice: one device in this process: its stream, what waits for it, copies and their count.

All work of a worker goes into one stream, in the order of the engine thread's calls. The host never
waits for the device on the way of a tensor: what must happen *after* device work (a release mark, a
measured duration) is given to :class:`Completions`, whose thread sleeps in the driver.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from blockflow.tensormq.channel import Landed
from blockflow.tensormq.cuda_api import CudaApi, CudaError, DeviceFacts, EventKind
from blockflow.tensormq.cuda_completions import TEND_S, Completions, DeviceQueue
from blockflow.tensormq.cuda_host import SMALL_BYTES, Pins, Staging, address_of

_LOG = logging.getLogger("blockflow.cuda")


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

        def copy() -> None:
            self.api.copy_h2d(target, address_of(memory), nbytes, self.stream)

        if self.pins.read(memory, copy):
            return False
        if nbytes > SMALL_BYTES and self.staging.upload(target, memory):
            self.ways.h2d_staged_copies += 1
            self.ways.h2d_staged_bytes += nbytes
            return True
        copy()
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
        """Free what was made here; False when the device still works on something after that time,
        or is lost.

        Then everything is left to the end of the process.
        """
        try:
            return self._close(timeout_s)
        except CudaError as exc:  # sticky: whatever is asked of a lost device is answered with it
            _LOG.warning("%s cannot be left in order: %s", self.name, exc)
            return False

    def _close(self, timeout_s: float) -> bool:
        end = time.monotonic() + timeout_s
        if not self.completions.wait_idle(timeout_s):
            return False
        self.pins.close()
        self.staging.close()
        if not self.completions.close(max(0.0, end - time.monotonic()) + 2 * TEND_S):
            return False
        self.queue.close()
        for pair in self._clocks:
            for event in pair:
                self.api.event_destroy(event)
        self.api.stream_destroy(self.stream)
        self.api.close()
        return True


def _let_go(_: object) -> None:
    """The reference ends with the call."""
