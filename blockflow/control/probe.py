"""Prober: a request through a new worker's real data path, before anybody else's takes it.

A worker that says Ready has loaded its blocks and run them once. Whether a request gets through it,
from its data socket by its queue, policy and engine into a slot that another process can read, is
only known when one has. So the control plane plays the Dispatcher for it: it gives the new worker
routes in which it is itself the end of every path, sends one row of zeros through each block, and
reads the results. The worker notices no difference.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import zmq

from blockflow.control.events import Prove, Proved
from blockflow.core import limits
from blockflow.core.errors import BlockError, BlockFlowError, SystemError_
from blockflow.core.model import BlockInfo, tensor_bytes
from blockflow.core.routing import DISPATCHER_STAGE, RouteTable, StageRoute, merge_paths
from blockflow.core.scarcity import failure, named
from blockflow.core.text import worth_a_line
from blockflow.tensormq.agent import Mailbox
from blockflow.tensormq.curve import Gatekeeper, LinkGuard
from blockflow.tensormq.janitor import remove_leavings
from blockflow.tensormq.push import PushCache
from blockflow.tensormq.shm import ShmConsumer
from blockflow.tensormq.sockets import bind_pull, new_context
from blockflow.wire.control import Routes
from blockflow.wire.data import (
    PROBE_EPOCH,
    REQUEST_ID_BYTES,
    Data,
    Failure,
    Item,
    decode_data_plane,
    encode_data,
)
from blockflow.wire.tensor import TensorDesc

log = logging.getLogger("blockflow.control")

ROUTES_VERSION = 0
"""Of the routes that a worker has until it gets those of a publication, which begin at 1."""


@dataclass(slots=True)
class _Trial:
    """One worker that is being proved: ``waiting`` maps request id -> block."""

    order: Prove
    started_ns: int
    waiting: dict[bytes, BlockInfo]


class Prober:
    """Sends readiness probes and judges the answers, in a thread of its own.

    Args:
        run_dir: of the instance.
        incarnation: a number of its own; names its socket.
        report: takes the outcomes, in the Prober's thread.
        plain_links: whether the instance has no key for its links.
    """

    def __init__(
        self,
        run_dir: Path,
        incarnation: int,
        report: Callable[[Proved], None],
        plain_links: bool = False,
    ) -> None:
        self._run_dir = run_dir
        self._plain_links = plain_links
        self._incarnation = incarnation
        self._report = report
        self._count = 0
        self._unreadable = 0
        self._trials: dict[int, _Trial] = {}
        self._inbox: Mailbox[Prove | int | None] = Mailbox()
        self._consumer = ShmConsumer(run_dir)
        self._endpoint = ""
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Bind the socket and start the thread. Raises SystemError_."""
        context = new_context()
        try:
            # Here, not in the thread: nobody would hear that there is no room to read the key.
            guard = LinkGuard(Gatekeeper(context), self._run_dir)
            pull, self._endpoint = bind_pull(context, "ipc", self._run_dir, self._incarnation)
        except BaseException:
            context.term()
            raise
        thread = threading.Thread(
            target=self._run, args=(context, pull, guard), name="bf-prober", daemon=True
        )
        thread.start()
        self._thread = thread

    def routes(self, mode: str) -> Routes:
        """What a worker must have applied before :meth:`prove`: all paths end here.

        Args:
            mode: how it sends results to the Dispatcher: ``tensormq`` or ``zeromq``.
        """
        end = StageRoute(DISPATCHER_STAGE, "", "prober", self._incarnation, self._endpoint, mode)
        return Routes(RouteTable(0, ROUTES_VERSION, {DISPATCHER_STAGE: end}).to_dict())

    def prove(self, order: Prove) -> None:
        """Send a request through each block; a :class:`Proved` is reported, unless the worker
        keeps it for ever: that is for the caller's clock."""
        self._inbox.put(order)

    def forget(self, incarnation: int) -> None:
        """The worker is dead."""
        self._inbox.put(incarnation)

    def close(self) -> None:
        """End the thread, close the sockets. Idempotent."""
        thread, self._thread = self._thread, None
        if thread is not None:
            self._inbox.put(None)
            thread.join()
            remove_leavings(self._run_dir, self._incarnation)
        self._inbox.close()

    # --- the Prober's thread --------------------------------------------------------------------

    def _run(
        self, context: zmq.Context[zmq.Socket[bytes]], pull: zmq.Socket[bytes], guard: LinkGuard
    ) -> None:
        poller = zmq.Poller()
        poller.register(pull, zmq.POLLIN)
        poller.register(self._inbox.fileno(), zmq.POLLIN)
        push = PushCache(context, poller, protect=guard.connect)
        open_ = True
        while open_:
            events = dict(poller.poll())
            if self._inbox.fileno() in events:
                for order in self._inbox.drain():
                    if order is None:
                        open_ = False
                    elif isinstance(order, Prove):
                        keyed = order.endpoint.startswith("tcp:") and not self._plain_links
                        self._begin(order, push, guard.lost() if keyed else None)
                    else:
                        self._drop(order, push)
                        self._consumer.peer_gone(order)
            if pull in events:
                self._receive(pull, push)
            push.flush()
        for incarnation in list(self._trials):
            self._drop(incarnation, push)
        push.close()
        pull.close(0)
        context.term()
        self._consumer.close()

    def _begin(self, order: Prove, push: PushCache, unreachable: SystemError_ | None) -> None:
        trial = _Trial(order, time.monotonic_ns(), {})
        self._trials[order.incarnation] = trial
        if unreachable is not None:
            self._end(trial, unreachable, push)
            return
        try:
            for stage, block in order.blocks:
                self._count += 1
                half = REQUEST_ID_BYTES // 2
                name = self._incarnation.to_bytes(half, "big") + self._count.to_bytes(half, "big")
                trial.waiting[name] = block
                push.send(order.endpoint, self._request(name, stage, block))
        except Exception as exc:  # a defect here must not keep the worker waiting
            log.exception("the probe of %d cannot be sent", order.incarnation)
            self._end(trial, _defect(exc), push)

    def _request(self, name: bytes, stage: int, block: BlockInfo) -> list[Any]:
        """One row of zeros, the elements in the message, for the path that is ``stage`` alone."""
        dims = block.contract.input.least_dims()
        dtype = block.contract.input.dtype
        tree, _ = merge_paths([[stage]])
        item = Item(name, 1, PROBE_EPOCH, tree, 0, 1, limits.MAX_DEADLINE_MS)
        desc = TensorDesc(dtype, dims)
        header = encode_data(Data(self._incarnation, time.monotonic_ns(), desc, (item,)))
        return [header, bytes(tensor_bytes(dtype, dims))]

    def _receive(self, pull: zmq.Socket[bytes], push: PushCache) -> None:
        while True:
            try:
                frames = pull.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            try:
                message = decode_data_plane(frames[0])
            except BlockFlowError as exc:
                n = self._unreadable = self._unreadable + 1
                if worth_a_line(n):
                    log.warning("an answer to a probe cannot be read (%d so far): %s", n, exc)
                continue
            if not isinstance(message, Data | Failure):
                continue
            trial = self._trials.get(message.sender)
            if trial is None:
                continue
            error: BlockFlowError | None
            try:
                error = self._judge(trial, message, frames[1] if len(frames) > 1 else None)
            except BlockFlowError as exc:
                error = named(exc)
            except Exception as exc:  # as above
                log.exception("an answer of %d cannot be judged", message.sender)
                error = _defect(exc)
            if error is not None or not trial.waiting:
                self._end(trial, error, push)

    def _judge(self, trial: _Trial, message: Data | Failure, frame: Any) -> BlockFlowError | None:
        """What is wrong with a result. Raises BlockFlowError when it cannot be opened."""
        blocks = [trial.waiting.pop(i.request_id, None) for i in message.items]
        if isinstance(message, Failure):
            return named(message.error)
        buffer = self._consumer.open(message.tensor, frame)
        try:
            got = message.tensor
            for block in blocks:
                if block is None:
                    continue
                contract = block.contract
                spec = contract.input
                wanted = contract.output_dims(spec.bind(spec.dtype, spec.least_dims()))
                if (got.dtype, tuple(got.dims)) != (contract.output.dtype, wanted):
                    return BlockError(
                        "OUTPUT_MISMATCH",
                        f"the result is {got.dtype}{list(got.dims)}, the contract says "
                        f"{contract.output.dtype}{list(wanted)}",
                        where=block.name,
                    )
        finally:
            buffer.release()
        return None

    def _end(self, trial: _Trial, error: BlockFlowError | None, push: PushCache) -> None:
        took_ms = (time.monotonic_ns() - trial.started_ns) / 1e6
        self._drop(trial.order.incarnation, push)
        self._report(Proved(trial.order.incarnation, error, took_ms))

    def _drop(self, incarnation: int, push: PushCache) -> None:
        trial = self._trials.pop(incarnation, None)
        if trial is not None:
            push.drop(trial.order.endpoint)


def _defect(exc: Exception) -> SystemError_:
    return failure(exc, f"{type(exc).__name__} in the readiness probe: {exc}"[:500], "")
