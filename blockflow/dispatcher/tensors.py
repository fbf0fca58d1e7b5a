"""TensorDesk: inputs that are kept until the terminal reply, results that are copied out."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from blockflow.core.errors import (
    BlockError,
    BlockFlowError,
    RequestError,
    SystemError_,
    WireError,
    make_error,
)
from blockflow.core.model import tensor_bytes
from blockflow.core.records import record
from blockflow.core.routing import StageRoute
from blockflow.dispatcher.entry import Answer, Entry
from blockflow.dispatcher.grants import GrantDesk
from blockflow.dispatcher.stats import Legs
from blockflow.dispatcher.validate import check_frame, check_values
from blockflow.tensormq.channel import Consumer, InBuffer, OutBuffer, Payload, Producer
from blockflow.tensormq.inline import Living
from blockflow.tensormq.leases import LeaseError
from blockflow.tensormq.views import as_numpy
from blockflow.wire.client import Place, Request
from blockflow.wire.data import Data
from blockflow.wire.tensor import TensorDesc

MODE_HANDLES = "tensormq"


@record
class Result:
    """A task's result for its client: a frame for the message, or the place of it."""

    tensor: TensorDesc
    frame: Any | None
    place: Place | None


@dataclass(slots=True)
class RetainedInput:
    """A request's input for as long as the request lives.

    ``buffer`` is its slot (None where it travels as a whole tensor: then ``payload`` has the frame,
    and keeping that is all the retaining there is). ``parked``: nobody was ever given its handle.
    """

    payload: Payload
    buffer: OutBuffer | None
    parked: bool = False


def waiting_bytes(entries: Iterable[Entry]) -> int:
    """Of frames that are kept until the other tasks of their requests have ended as well."""
    total = 0
    for entry in entries:
        ends = (*entry.outcomes.values(), *(k.outcome for k in entry.kept.values()))
        answers = {id(e): e.payload.frame for e in ends if isinstance(e, Answer)}  # tasks share one
        total += sum(memoryview(f).nbytes for f in answers.values() if f is not None)
    return total


class Outgoing(NamedTuple):
    """An input on its way to a first stage: what to answer for when it never leaves."""

    entry: Entry
    attempt: int
    payload: Payload

    @property
    def current(self) -> bool:
        """It belongs to the request's present attempt."""
        return self.attempt == self.entry.attempt


class TensorDesk:
    """Moves tensors between clients (frames, granted slots) and the arenas' slots.

    Args:
        producer: the arena of the inputs.
        consumer: opens what the workers send.
        grants: the clients' own segments.

    Attributes:
        legs: what has travelled between clients and here, and how.
        frames: inputs that are kept in no slot, as long as anybody refers to them: ZeroMQ sends one
            on when its worker reads, which may be after its request has ended.
    """

    def __init__(self, producer: Producer, consumer: Consumer, grants: GrantDesk) -> None:
        self._producer = producer
        self._consumer = consumer
        self._grants = grants
        self.legs = Legs()
        self.frames = Living()

    def elements(self, client: bytes, request: Request, frame: memoryview | None) -> memoryview:
        """The input where it has arrived: the message's frame, or the client's slot.

        Raises:
            WireError: MALFORMED_MESSAGE.
            RequestError: CONNECTION_LOST or INVALID_REQUEST: there is no such slot.
        """
        if request.upload is None:
            return check_frame(request, frame)
        if frame is not None:
            raise WireError("MALFORMED_MESSAGE", "an upload and a frame in one message")
        return self._grants.upload(client, request.upload, request.tensor.nbytes)

    def retain(
        self,
        request: Request,
        source: memoryview,
        root: StageRoute | None,
        check_finite: bool,
        deadline_ns: int,
    ) -> RetainedInput | None:
        """Keep the input and make it ready for the first stage: one copy into a slot, or none.

        Without a ``root`` it is not known yet where it will go: it is kept in a slot until
        :meth:`prepare_again`.

        The values are checked where they are kept: a client may write into its own slot while we
        read it, and what was checked must be what is computed with.

        Returns:
            None when no slot is free now.

        Raises:
            RequestError: TOO_LARGE, or what :func:`check_values` finds.
            SystemError_: NO_SPACE.
        """
        tensor, nbytes, by_slot = request.tensor, source.nbytes, request.upload is not None
        if root is not None and root.mode != MODE_HANDLES:
            kept = memoryview(bytes(source)) if by_slot else source
            check_values(tensor, kept, check_finite)
            self.legs.arrived.count(nbytes, by_slot, copies=int(by_slot))
            return RetainedInput(self._framed(tensor, kept), None)
        try:
            buffer = self._producer.reserve(tensor.dtype, tensor.dims)
        except BlockFlowError as exc:
            # Clients learn nothing of arenas and paths.
            text = f"no memory for an input of {nbytes} bytes"
            hint = "try again later, or send less at once; `blockflow doctor` shows what is short"
            raise make_error(exc.code, text, hint=hint) from exc
        if buffer is None:
            return None
        try:
            check_values(tensor, buffer.memory, check_finite, source)
        except BaseException:
            self._producer.discard(buffer)
            raise
        self.legs.arrived.count(nbytes, by_slot, copies=1)
        if root is None:
            return RetainedInput(Payload(TensorDesc(tensor.dtype, tensor.dims), None), buffer, True)
        self._producer.hold(buffer)
        payload = self._producer.publish(buffer, (root.incarnation,), deadline_ns)[0]
        return RetainedInput(payload, buffer)

    def prepare_again(self, entry: Entry) -> None:
        """Make a kept input ready for another run, or its first one.

        An input that was kept as a frame goes as one; one in a slot goes as a frame to a worker
        that takes no handles, and where the slot can have no more readers.
        """
        retained, root = entry.retained, entry.plan.root
        buffer = retained.buffer
        if buffer is None:
            return
        if root.mode == MODE_HANDLES:
            if retained.parked:
                self._producer.hold(buffer)
                retained.parked = False
            with suppress(LeaseError):
                handed = self._producer.publish(buffer, (root.incarnation,), entry.deadline_ns)
                retained.payload = handed[0]
                return
        desc = TensorDesc(buffer.dtype, buffer.dims)
        retained.payload = self._framed(desc, memoryview(bytes(buffer.memory)))

    def _framed(self, desc: TensorDesc, frame: memoryview) -> Payload:
        self.frames.add(frame, frame.nbytes)
        return Payload(desc, frame)

    def unsent(self, payload: Payload) -> None:
        """A message with an input's handle never left: nobody will release it."""
        if payload.desc.handle is not None:
            self._producer.revoke(payload)

    def release(self, retained: RetainedInput) -> None:
        """The request has ended; the slot is free once the first stage has let go of it, too."""
        retained.payload = Payload(retained.payload.desc, None)
        buffer, retained.buffer = retained.buffer, None
        if buffer is None:
            return
        if retained.parked:
            self._producer.discard(buffer)
        else:
            self._producer.unhold(buffer)

    def open(self, msg: Data, frame: Any | None) -> InBuffer:
        """Map a result.

        Raises:
            BlockError: OUTPUT_MISMATCH: it cannot be read.
            RequestError: WORKER_LOST: its arena is gone.
            SystemError_: NO_SPACE: there is no room to map it.
        """
        try:
            return self._consumer.open(msg.tensor, frame)
        except RequestError as exc:
            raise RequestError("WORKER_LOST", "the worker died with its result") from exc
        except WireError as exc:
            raise BlockError("OUTPUT_MISMATCH", "the last block's result cannot be read") from exc
        except SystemError_ as exc:
            raise SystemError_(exc.code, "no room to read the result", hint=exc.hint) from exc

    def cut(
        self, buffer: InBuffer, start: int, rows: int, client: bytes, keep: bool = False
    ) -> Result:
        """Rows ``start..start+rows`` of a result, ready for the reply to ``client``.

        What lies in a worker's slot is copied (once, into a slot of the client where it has one),
        so that the slot is free at once even when the request waits for its other tasks; a frame
        is ours already. What was cut out of a padded batch is not contiguous and becomes so here.
        What is to outlive the client's connection, or is the result of several tasks, is copied
        into a frame (``keep``): a slot is one result's.
        """
        desc = buffer.desc
        dims = (rows, *desc.dims[1:])
        mine = TensorDesc(desc.dtype, dims)
        in_slot = keep or desc.handle is not None
        part: memoryview | np.ndarray[Any, Any]
        if desc.strides is None:
            row_bytes = tensor_bytes(desc.dtype, dims[1:])
            part = buffer.memory[start * row_bytes : (start + rows) * row_bytes]
        else:
            whole = as_numpy(buffer.memory, desc.dtype, desc.dims, desc.strides)
            part = whole[start : start + rows]
        place = None if keep else self._grants.place(client, part)
        if place is not None:
            self.legs.left.count(part.nbytes, True, copies=1)
            return Result(mine, None, place)
        # A view would keep all of a batch's frame for as long as its client takes, or other tasks.
        little = 2 * part.nbytes < buffer.memory.nbytes
        copied = in_slot or desc.strides is not None or little
        self.legs.left.count(part.nbytes, False, copies=int(copied))
        return Result(mine, part.tobytes() if copied else part, None)

    def unreplied(self, entry: Entry) -> None:
        """No reply will name the client's slots that hold results of ``entry``."""
        for end in entry.ended().values():
            if isinstance(end.outcome, Answer) and end.outcome.payload.place is not None:
                self._grants.take_back(entry.client, end.outcome.payload.place)

    def peer_gone(self, incarnation: int) -> None:
        """A worker is proven dead: its leases are void and its arena is unmapped."""
        self._producer.peer_gone(incarnation)
        self._consumer.peer_gone(incarnation)

    def set_devices(self, devices: Mapping[int, str]) -> None:
        """Where the workers compute, by incarnation."""
        self._producer.set_devices(devices)

    def ebb(self, now_ns: int) -> None:
        """Give memory back that inputs have not needed for some seconds."""
        self._producer.ebb(now_ns)

    def close(self) -> None:
        self._consumer.close()
        self._producer.close()
