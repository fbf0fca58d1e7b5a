"""How a tensor's elements get from one process to the next: the interface of all ways.

A producer reserves memory, the engine writes its result there, ``publish`` yields what goes on the
wire. A consumer opens what came and gets readable memory until it releases it. Implementations:
``inline`` (whole tensors as raw frames) and ``shm`` (slots of an arena); one contract suite runs for
all. None of them sends anything: sockets are the caller's.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from blockflow.wire.tensor import TensorDesc


@dataclass(frozen=True, slots=True)
class Payload:
    """What a message needs: the descriptor for its header and the frame to append (None = no frame)."""

    desc: TensorDesc
    frame: Any | None


class OutBuffer(ABC):
    """Memory that a result is written into. ``memory`` is writable, contiguous, of ``nbytes`` bytes."""

    __slots__ = ("dims", "dtype", "memory", "nbytes")

    dtype: str
    dims: tuple[int, ...]
    memory: memoryview
    nbytes: int


class InBuffer(ABC):
    """A received tensor: ``memory`` is read-only until :meth:`release`, which is idempotent."""

    __slots__ = ("desc", "memory")

    desc: TensorDesc
    memory: memoryview

    @abstractmethod
    def release(self) -> None:
        """Tell the producer that this consumer is done; ``memory`` must not be used afterwards."""


class Producer(ABC):
    """The sending side, owned by one process and used from one thread."""

    @abstractmethod
    def reserve(self, dtype: str, dims: Sequence[int]) -> OutBuffer | None:
        """Memory for one tensor, or None when none is free now: wait for releases, then ask again.

        Raises:
            RequestError: TOO_LARGE, the tensor can never fit.
        """

    @abstractmethod
    def publish(self, buffer: OutBuffer, consumers: Sequence[int]) -> list[Payload]:
        """Hand the buffer to ``consumers`` (incarnations; one payload each, in order).

        The buffer is free again when all of them have released it. A consumer may be named twice
        (two branches of a path tree in one process): each payload is released on its own.
        """

    @abstractmethod
    def discard(self, buffer: OutBuffer) -> None:
        """Give back a reserved buffer that will not be published."""

    @abstractmethod
    def hold(self, buffer: OutBuffer) -> None:
        """Keep a buffer past its consumers' release (a retained input) until :meth:`unhold`."""

    @abstractmethod
    def unhold(self, buffer: OutBuffer) -> None:
        """End :meth:`hold`."""

    @abstractmethod
    def sweep(self) -> int:
        """Collect what consumers have released since; returns the number of buffers freed."""

    @abstractmethod
    def peer_gone(self, incarnation: int) -> int:
        """``incarnation`` is proven dead: count its leases as released; returns how many there were."""

    @abstractmethod
    def outstanding(self) -> int:
        """Buffers reserved or not yet released."""

    @abstractmethod
    def close(self) -> None:
        """Free everything, remove what the file system holds. Idempotent."""


class Consumer(ABC):
    """The receiving side, used from one thread."""

    @abstractmethod
    def open(self, desc: TensorDesc, frame: Any | None) -> InBuffer:
        """Readable memory for a received descriptor (and its frame, if one came).

        Raises:
            WireError: MALFORMED_MESSAGE: the handle points outside the arena, is stale, or frame and
                descriptor differ in size.
            RequestError: WORKER_LOST: the owner's arena is gone.
        """

    @abstractmethod
    def peer_gone(self, incarnation: int) -> None:
        """Drop the mapping of a dead producer's arena."""

    @abstractmethod
    def close(self) -> None:
        """Drop all mappings. Idempotent."""
