"""What a request gives back: the value, where its time went, and who served it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from blockflow.wire.client import TaskResult


@dataclass(frozen=True, slots=True)
class BlockTiming:
    """A request's time at one block of its path, in milliseconds (thesis, eq. 4.1).

    ``transit_ms`` is the way to the block, ``wait_ms`` in its queue, ``overhead_ms`` everything
    there that is neither waiting nor the model, ``compute_ms`` the model's forward. ``node`` is the
    visit's number in the request: tasks of one request share visits of their common blocks.
    """

    block: str
    transit_ms: float
    wait_ms: float
    overhead_ms: float
    compute_ms: float
    node: int = 0

    @property
    def total_ms(self) -> float:
        return self.transit_ms + self.wait_ms + self.overhead_ms + self.compute_ms

    def to_dict(self) -> dict[str, Any]:
        return {
            "block": self.block,
            "transit_ms": self.transit_ms,
            "wait_ms": self.wait_ms,
            "overhead_ms": self.overhead_ms,
            "compute_ms": self.compute_ms,
        }


@dataclass(frozen=True, slots=True, eq=False)
class Result:
    """The answer of one task.

    Attributes:
        task: its name.
        value: numpy array, or torch tensor when the input was one; dim 0 is rows. A bfloat16
            result without torch is an array of uint16 bit patterns: see ``dtype``.
        dtype: element type as the block gave it.
        timings: the blocks of the path, in order.
        total_ms: at the Dispatcher, from receipt of the request to the encoding of the reply.
        ingress_ms: the Dispatcher's share before the first block.
        egress_ms: the Dispatcher's share after the last block.
        rtt_ms: at the client, from the call to the receipt of the reply.
        epoch: of the topology that served the request.
        request_id: 16 bytes.
    """

    task: str
    value: Any
    dtype: str
    timings: tuple[BlockTiming, ...]
    total_ms: float
    ingress_ms: float
    egress_ms: float
    rtt_ms: float
    epoch: int
    request_id: bytes

    @property
    def compute_ms(self) -> float:
        """All blocks' forwards together."""
        return sum(t.compute_ms for t in self.timings)


def block_timings(result: TaskResult) -> tuple[BlockTiming, ...]:
    """Nanoseconds of the wire to milliseconds."""
    return tuple(
        [
            BlockTiming(
                t.block,
                t.hop.transit / 1e6,
                t.hop.wait / 1e6,
                t.hop.overhead / 1e6,
                t.hop.compute / 1e6,
                t.hop.node,
            )
            for t in result.timings
        ]
    )
