"""What a request gives back: the value, where its time went, and who served it."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from blockflow.client.outcome import Answered
from blockflow.core.records import record
from blockflow.wire.client import Place, TaskResult
from blockflow.wire.tensor import TensorDesc


@record
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
        told = asdict(self)
        del told["node"]
        return told


@record
class Leg:
    """How a tensor got between the client and the Dispatcher.

    Attributes:
        way: ``message``, ``slot`` (through granted memory) or ``view`` (a result that was not
            copied out of it).
        nbytes: of the tensor.
        copies: of the elements, between the caller's memory and the Dispatcher's or worker's slot.
        ms: there: from the call to the Dispatcher's receipt. Back: from the encoding of the reply
            until the value was ready. None when the two clocks cannot be compared (other hosts).
    """

    way: str
    nbytes: int
    copies: int
    ms: float | None

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


_COPIES = {"message": 3, "slot": 2, "view": 1}
"""A message: into the socket, out of it, and into (out of) a slot. A slot: into it, out of it."""


@record
class Trip:
    """What the caller's side knows of a request: input bytes, asked for views, same host."""

    nbytes: int
    as_views: bool
    local: bool


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
        rtt_ms: at the client, from the call until the value was ready:
            ``upload.ms + total_ms + download.ms``, where these are known.
        epoch: of the topology that served the request.
        request_id: 16 bytes.
        upload, download: the ways of the input and of this result.
        canary: the request took the path that is being tried for this task.
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
    upload: Leg
    download: Leg
    canary: bool = False

    @property
    def compute_ms(self) -> float:
        """All blocks' forwards together."""
        return sum(t.compute_ms for t in self.timings)


def make_result(
    outcome: Answered,
    r: TaskResult,
    tensor: TensorDesc,
    frame: Any,
    value: Any,
    trip: Trip,
    now_ns: int,
) -> Result:
    """The answer of one task from what came for it; ``now_ns`` is when ``value`` was ready."""
    there_ns = outcome.received_ns - outcome.submitted_ns
    back_ns = now_ns - outcome.received_ns - r.total_ns
    known = trip.local and outcome.received_ns > 0 and there_ns >= 0 and back_ns >= 0
    back = "message" if not isinstance(frame, Place) else "view" if trip.as_views else "slot"
    there = "slot" if outcome.by_slot else "message"
    return Result(
        task=r.task,
        value=value,
        dtype=tensor.dtype,
        timings=block_timings(r),
        total_ms=r.total_ns / 1e6,
        ingress_ms=r.ingress_ns / 1e6,
        egress_ms=r.egress_ns / 1e6,
        rtt_ms=(now_ns - outcome.submitted_ns) / 1e6,
        epoch=outcome.epoch,
        request_id=outcome.request_id,
        upload=Leg(there, trip.nbytes, _COPIES[there], there_ns / 1e6 if known else None),
        download=Leg(back, tensor.nbytes, _COPIES[back], back_ns / 1e6 if known else None),
        canary=r.canary,
    )


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
