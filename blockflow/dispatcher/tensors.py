"""TensorDesk: inputs that are kept until the terminal reply, results that are copied out."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from blockflow.core.errors import (
    BlockError,
    BlockFlowError,
    RequestError,
    WireError,
    make_error,
)
from blockflow.core.model import tensor_bytes
from blockflow.core.routing import StageRoute
from blockflow.tensormq.channel import Consumer, InBuffer, OutBuffer, Payload, Producer, Usage
from blockflow.wire.data import Data
from blockflow.wire.tensor import TensorDesc

MODE_HANDLES = "tensormq"


@dataclass(slots=True)
class RetainedInput:
    """A request's input for as long as the request lives.

    ``buffer`` is its slot (None where it travels as a whole tensor: then ``payload`` has the frame,
    and keeping that is all the retaining there is).
    """

    payload: Payload
    buffer: OutBuffer | None


class TensorDesk:
    """Moves tensors between client frames and slots.

    Args:
        producer: the arena of the inputs.
        consumer: opens what the workers send.
    """

    def __init__(self, producer: Producer, consumer: Consumer) -> None:
        self._producer = producer
        self._consumer = consumer

    def retain(
        self, tensor: TensorDesc, frame: memoryview, root: StageRoute
    ) -> RetainedInput | None:
        """Keep the input and make it ready for the first stage: one copy into a slot, or none.

        Returns:
            None when no slot is free now.

        Raises:
            RequestError: TOO_LARGE.
            SystemError_: NO_SPACE.
        """
        if root.mode != MODE_HANDLES:
            return RetainedInput(Payload(tensor, frame), None)
        try:
            buffer = self._producer.reserve(tensor.dtype, tensor.dims)
        except BlockFlowError as exc:
            # Clients learn nothing of arenas and paths.
            raise make_error(exc.code, f"no memory for an input of {tensor.nbytes} bytes") from exc
        if buffer is None:
            return None
        buffer.memory[:] = frame
        self._producer.hold(buffer)
        return RetainedInput(self._producer.publish(buffer, (root.incarnation,))[0], buffer)

    def unsent(self, retained: RetainedInput) -> None:
        """The message with the input's handle never left: nobody will release it."""
        if retained.payload.desc.handle is not None:
            self._producer.revoke(retained.payload)

    def release(self, retained: RetainedInput) -> None:
        """The request has ended; the slot is free once the first stage has let go of it, too."""
        if retained.buffer is not None:
            self._producer.unhold(retained.buffer)
            retained.buffer = None

    def open(self, msg: Data, frame: Any | None) -> InBuffer:
        """Map a result.

        Raises:
            BlockError: OUTPUT_MISMATCH: it cannot be read, or it is not contiguous.
            RequestError: WORKER_LOST: its arena is gone.
        """
        if msg.tensor.strides is not None:
            raise BlockError("OUTPUT_MISMATCH", "the last block's result is not contiguous")
        try:
            return self._consumer.open(msg.tensor, frame)
        except RequestError as exc:
            raise RequestError("WORKER_LOST", "the worker died with its result") from exc
        except WireError as exc:
            raise BlockError("OUTPUT_MISMATCH", "the last block's result cannot be read") from exc

    def cut(self, buffer: InBuffer, start: int, rows: int) -> tuple[TensorDesc, Any]:
        """Rows ``start..start+rows`` of a result as (descriptor, frame) for a reply.

        What lies in a slot is copied (once), so that the slot is free at once even when the request
        waits for its other tasks; a frame is ours already.
        """
        desc = buffer.desc
        dims = (rows, *desc.dims[1:])
        row_bytes = tensor_bytes(desc.dtype, dims[1:])
        part = buffer.memory[start * row_bytes : (start + rows) * row_bytes]
        return TensorDesc(desc.dtype, dims), bytes(part) if desc.handle is not None else part

    def peer_gone(self, incarnation: int) -> None:
        """A worker is proven dead: its leases are void and its arena is unmapped."""
        self._producer.peer_gone(incarnation)
        self._consumer.peer_gone(incarnation)

    def sweep(self) -> None:
        self._producer.sweep()

    def usage(self) -> Usage:
        return self._producer.usage()

    def close(self) -> None:
        self._consumer.close()
        self._producer.close()
