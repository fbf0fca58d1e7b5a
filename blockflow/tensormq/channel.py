"""How a tensor's elements get from one process to the next: the interface of all ways.

A producer reserves memory, the engine writes its result there, ``publish`` yields what goes on the
wire. A consumer opens what came and gets readable memory until it releases it. Implementations:
``inline`` (whole tensors as raw frames) and ``shm`` (slots of an arena); one contract suite runs
for all. None of them sends anything: sockets are the caller's.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, TypeVar

from blockflow.core.errors import WireError
from blockflow.core.model import DTYPE_BYTES, tensor_bytes
from blockflow.core.records import record
from blockflow.tensormq.leases import NEVER_NS
from blockflow.tensormq.views import as_torch
from blockflow.wire.tensor import TensorDesc

if TYPE_CHECKING:
    from torch import Tensor

Landed = Callable[[int], None]
"""``landed(ns)``: a result has come from the device to the host, and the copy itself took so long:
overhead, not compute."""


B = TypeVar("B", bound="OutBuffer")


@record
class Payload:
    """What a message needs: the descriptor for its header, the frame to append (None = none)."""

    desc: TensorDesc
    frame: Any | None

    def rows(self, start: int, stop: int, shape: tuple[int, ...] | None = None) -> Payload:
        """The payload for rows ``start..stop`` alone, not copied: a batch is parted by next hop.

        Each part goes to a consumer of its own: publish to as many consumers as there are parts.

        Args:
            start, stop: which rows.
            shape: dims after the rows that each is cut to (what a padded batch has of one request);
                None: nothing is cut.
        """
        desc = self.desc
        if shape is None:
            shape = desc.dims[1:]
        inside = len(shape) == len(desc.dims) - 1 and all(
            0 < n <= d for n, d in zip(shape, desc.dims[1:], strict=True)
        )
        if not 0 <= start < stop <= desc.dims[0] or not inside:
            raise ValueError(f"rows {start}..{stop}, cut to {list(shape)}, of {desc}")
        dims = (stop - start, *shape)
        first = start * tensor_bytes(desc.dtype, desc.dims[1:])
        handle = desc.handle
        if handle is not None:
            handle = replace(handle, offset=handle.offset + first)
        part = TensorDesc(desc.dtype, dims, handle, _strides_of_cut(dims, desc.dims))
        frame = None if self.frame is None else self.frame[first : first + span_bytes(part)]
        return Payload(part, frame)


@dataclass(frozen=True, slots=True)
class Usage:
    """A producer's memory now, in bytes and buffers; counters since it was opened.

    ``committed`` is what the operating system has really set aside, ``stalls`` how often a reserve
    had to wait, ``stale`` how many releases were not current.
    """

    capacity: int
    used: int
    high_water: int
    committed: int
    slots: int
    slots_used: int
    stalls: int
    stale: int


class OutBuffer(ABC):
    """Memory that a result is written into: writable, contiguous, ``nbytes`` bytes."""

    __slots__ = ("dims", "dtype", "memory", "nbytes")

    dtype: str
    dims: tuple[int, ...]
    memory: memoryview
    nbytes: int

    def tensor(self) -> Tensor:
        """What the engine writes into; asked for once, in the engine thread."""
        return as_torch(self.memory, self.dtype, self.dims)

    def finish(self, landed: Landed) -> bool:
        """The engine has given its last order for this tensor; to be called in the engine thread,
        before it is published.

        Returns:
            False when its messages may leave. True while its bytes are on their way to the host:
            they may leave when ``landed`` is called, once and in another thread. It never is if the
            device is lost before.
        """
        return False


class InBuffer(ABC):
    """A received tensor: ``memory`` is read-only until :meth:`release`, which is idempotent.

    ``memory`` spans the tensor's elements: ``desc.nbytes`` bytes, or more where ``desc.strides``
    says so.
    """

    __slots__ = ("desc", "memory")

    desc: TensorDesc
    memory: memoryview

    def tensor(self) -> Tensor:
        """What the engine reads; asked for once, in the engine thread. Never written."""
        desc = self.desc
        return as_torch(self.memory, desc.dtype, desc.dims, desc.strides)

    def spare(self) -> int | None:
        """How many slots of its owner are to be had, less those that this process holds: below 0
        it has more than its share, and other readers may go without. None: there are none, or it is
        not known."""
        return None

    def bring_home(self) -> bool:
        """Keep a copy of the bytes in this process, and give the slot back; before :meth:`tensor`.
        False: nothing was done, since a copy of the tensor is as good.

        Raises:
            RuntimeError: no memory for it; nothing has changed.
        """
        return False

    @abstractmethod
    def release(self) -> None:
        """Tell the producer that this consumer is done; ``memory`` must not be used afterwards."""


class Producer(ABC):
    """The sending side, owned by one process. Its methods may be called from several threads."""

    by_consumer = False
    """Whether :meth:`reserve` must be told the consumers; working them out is not free."""

    def set_devices(self, devices: Mapping[int, str]) -> None:  # noqa: B027 (few need it)
        """Where consumers compute: incarnation -> ``cpu`` or ``cuda:N``, from the route table."""

    def tell_readers(self, readers: int) -> None:  # noqa: B027 (few have slots)
        """So many receivers get what is published, each at its own pace: none of them is to hold so
        many slots that others go without."""

    def reaches(self, buffer: OutBuffer, consumer: int) -> bool:
        """Whether this buffer can be published to this consumer."""
        return True

    @property
    @abstractmethod
    def max_consumers(self) -> int:
        """How many consumers one buffer can be published to."""

    @abstractmethod
    def reserve(
        self, dtype: str, dims: Sequence[int], consumers: Collection[int] = ()
    ) -> OutBuffer | None:
        """Memory for one tensor, or None when none is free now: wait for releases, then ask again.

        What consumers have released by now is collected first, so there is no need to sweep before.
        ``consumers`` are those that it will be published to, as far as they are known.

        Raises:
            RequestError: TOO_LARGE, the tensor can never fit.
            SystemError_: NO_SPACE, the machine has not the memory, and no release can help.
        """

    @abstractmethod
    def publish(
        self, buffer: OutBuffer, consumers: Sequence[int], until_ns: int = NEVER_NS
    ) -> list[Payload]:
        """Hand the buffer to ``consumers`` (incarnations; one payload each, in order).

        After ``until_ns`` (monotonic) nobody waits for it any more. A handle that was not opened by
        then may be lost, and is void a second later; in another second its lease has ended.

        The buffer is free again when all of them have released it. A consumer may be named twice
        (two branches of a path tree in one process): each payload is released on its own. A held
        buffer may be published again (a re-run from the retained input).
        """

    @abstractmethod
    def revoke(self, payload: Payload) -> None:
        """``payload`` was not sent after all: count its lease as released.

        For messages that are known never to have left this process; a sent one belongs to its
        consumer until that releases it or is proven dead.
        """

    @abstractmethod
    def discard(self, buffer: OutBuffer) -> None:
        """Give back a reserved buffer that will not be published."""

    @abstractmethod
    def hold(self, buffer: OutBuffer) -> None:
        """Keep a buffer past its consumers' release (a retained input) until :meth:`unhold`."""

    @abstractmethod
    def unhold(self, buffer: OutBuffer) -> None:
        """End one :meth:`hold`."""

    @abstractmethod
    def sweep(self) -> int:
        """Collect what consumers have released since; returns the number of buffers freed."""

    def ebb(self, now_ns: int) -> None:  # noqa: B027 (few have anything to give)
        """Give memory back that has not been needed for some seconds; to be called now and then."""

    @abstractmethod
    def peer_gone(self, incarnation: int) -> int:
        """``incarnation`` is proven dead: its leases count as released; returns how many."""

    @abstractmethod
    def outstanding(self) -> int:
        """Buffers reserved or not yet released."""

    @abstractmethod
    def usage(self) -> Usage:
        """Memory figures for the KPIs."""

    @abstractmethod
    def close(self) -> None:
        """Free everything, remove what the file system holds. Idempotent.

        Views that still exist stay readable; their memory goes with the last of them.
        """


class Consumer(ABC):
    """The receiving side. Buffers may be released from another thread than opened them."""

    @abstractmethod
    def open(self, desc: TensorDesc, frame: Any | None) -> InBuffer:
        """Readable memory for a received descriptor (and its frame, if one came).

        Raises:
            WireError: MALFORMED_MESSAGE: the handle points outside the arena, is stale, or frame
            and
                descriptor differ in size.
            RequestError: WORKER_LOST: the owner's arena is gone.
            SystemError_: NO_SPACE: nothing is left to map it with.
        """

    @abstractmethod
    def peer_gone(self, incarnation: int) -> None:
        """Drop the mapping of a dead producer's arena."""

    @abstractmethod
    def close(self) -> None:
        """Drop all mappings. Idempotent."""


def _strides_of_cut(dims: Sequence[int], whole: Sequence[int]) -> tuple[int, ...] | None:
    """Strides of ``dims`` at the beginning of a contiguous tensor of dims ``whole``; None where
    they are those of a tensor of its own."""
    strides: list[int] = []
    step = own = 1
    contiguous = True
    for n, d in zip(reversed(dims), reversed(whole), strict=True):
        contiguous = contiguous and (n == 1 or step == own)
        strides.insert(0, step)
        step *= d
        own *= n
    return None if contiguous else tuple(strides)


def span_bytes(desc: TensorDesc) -> int:
    """Bytes from a tensor's first element to the end of its last one."""
    if desc.strides is None:
        return desc.nbytes
    if 0 in desc.dims:
        return 0
    last = sum((d - 1) * s for d, s in zip(desc.dims, desc.strides, strict=True))
    return (last + 1) * DTYPE_BYTES[desc.dtype]


def own_buffer(buffer: OutBuffer, kind: type[B]) -> B:
    """``buffer`` as one of its producer's kind. Raises TypeError where another one made it."""
    if not isinstance(buffer, kind):
        raise TypeError(f"{type(buffer).__name__} is not a buffer of this producer")
    return buffer


def bad_handle(desc: TensorDesc, why: str) -> WireError:
    """What is told of a handle that names nothing that could be opened."""
    return WireError("MALFORMED_MESSAGE", f"{why}: {desc} at {desc.handle}", where="tensor handle")
