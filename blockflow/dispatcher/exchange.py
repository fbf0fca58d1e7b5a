"""Exchange: requests in, replies out. Carries out what admission, planner and table decide."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any

import zmq

from blockflow.core import limits
from blockflow.core.errors import BlockError, BlockFlowError, RequestError, WireError
from blockflow.core.routing import RouteTable
from blockflow.dispatcher.admission import Admission, Reject
from blockflow.dispatcher.clients import ClientPort, Sent, is_local
from blockflow.dispatcher.grants import GrantDesk
from blockflow.dispatcher.inflight import (
    Answer,
    Drop,
    Entry,
    InFlightTable,
    Instruction,
    ReleaseInput,
    Reply,
)
from blockflow.dispatcher.plan import Planner
from blockflow.dispatcher.stats import DispatcherStats
from blockflow.dispatcher.tensors import Result, TensorDesk
from blockflow.dispatcher.validate import check_contract, check_names
from blockflow.tensormq.push import PushCache, Unsent
from blockflow.wire import client as wire
from blockflow.wire.data import (
    Data,
    Failure,
    Item,
    decode_data_plane,
    encode_data,
)

_LOG = logging.getLogger("blockflow.dispatcher")
ANY_TASK = "*"
"""Stands for the task in the reply to a request whose task names could not be read."""


class Exchange:
    """The request path between clients and first stages, last stages and clients.

    Used from one thread. ``clock`` gives monotonic nanoseconds; each event is stamped once.

    Attributes:
        closed_because: reason for which nothing new is admitted ('' = open).
    """

    def __init__(
        self,
        incarnation: int,
        admission: Admission,
        desk: TensorDesk,
        grants: GrantDesk,
        clients: ClientPort,
        push: PushCache,
        clock: Callable[[], int],
    ) -> None:
        self._incarnation = incarnation
        self._admission = admission
        self._desk = desk
        self._grants = grants
        self._clients = clients
        self._push = push
        self._clock = clock
        self.planner = Planner()
        self.table = InFlightTable(incarnation)
        self.stats = DispatcherStats()
        self.closed_because = ""

    # --- from the clients ---

    def on_client(self, client: bytes, frames: Sequence[zmq.Frame]) -> None:
        """One message of a client. Whatever it holds, the client gets a typed answer or nothing."""
        received = self._clock()
        header = frames[0].buffer if frames else memoryview(b"")
        if not 1 <= len(frames) <= 2:
            why = f"a message has 1 or 2 frames, not {len(frames)}"
            self._refuse_unread(client, header, WireError("MALFORMED_MESSAGE", why))
            return
        try:
            msg = wire.decode_to_dispatcher(header)
        except BlockFlowError as exc:
            self._refuse_unread(client, header, exc)
            return
        if isinstance(msg, wire.Request):
            frame = frames[1].buffer if len(frames) == 2 else None
            try:
                entry = self._admit(client, msg, frame, received)
            except BlockFlowError as exc:
                self._refuse(client, msg, exc, received)
            except Exception as exc:  # a defect: this one request pays for it
                _LOG.exception("request %s failed in admission", msg.request_id.hex())
                error = BlockFlowError("INTERNAL", f"{type(exc).__name__} in admission")
                self._refuse(client, msg, error, received)
            else:
                self._set_out(entry)
        elif isinstance(msg, wire.Cancel):
            self.carry_out(self.table.cancel(client, msg.request_id))
        elif isinstance(msg, wire.Invite):
            self._invite(client, msg, is_local(frames[0]), received)
        else:
            self._describe(client, msg)

    def _admit(
        self, client: bytes, request: wire.Request, frame: memoryview | None, received: int
    ) -> Entry:
        """Check, plan and keep the input. Raises BlockFlowError: it is not admitted."""
        if self.closed_because:
            raise RequestError("NOT_READY", self.closed_because, hint="try again later")
        check_names(request.tasks)
        table = self.table
        table.check_new(client, request.request_id)
        tasks = [self.planner.task(name) for name in request.tasks]
        check_contract(request.tensor, tasks)
        source = self._desk.elements(client, request, frame)
        nbytes = source.nbytes
        verdict = self._admission.decide(
            inflight=len(table),
            of_client=table.of_client(client),
            charged=table.charged,
            nbytes=nbytes,
            now_ns=received,
        )
        if isinstance(verdict, Reject):
            raise verdict.error
        rows = request.tensor.dims[0]
        self._admission.check_tasks(tasks, table.rows_of, rows, len(table), received)
        plan = self.planner.plan(tasks)
        # What costs more the larger the input is comes last: the copy, and the check of the values.
        check_finite = any(t.check_finite for t in tasks)
        retained = self._desk.retain(request, source, plan.root, check_finite)
        if retained is None:
            raise self._admission.no_space(nbytes, len(table), received).error
        entry = table.admit(
            client,
            request.request_id,
            request.tasks,
            plan,
            rows=rows,
            deadline_ns=received + request.deadline_ms * 1_000_000,
            received_ns=received,
            retained=retained,
            charged=nbytes,
        )
        self.planner.take(plan)
        self.stats.admitted(request.tasks, entry.rows)
        return entry

    def _set_out(self, entry: Entry) -> None:
        """Send the input to the first stage."""
        plan, payload = entry.plan, entry.retained.payload
        now = self._clock()
        entry.ingress_ns = now - entry.received_ns
        frames: list[Any] = [
            encode_data(Data(self._incarnation, now, payload.desc, (entry.item(now),)))
        ]
        if payload.frame is not None:
            frames.append(payload.frame)
        root = plan.root
        if not self._push.send(root.endpoint, frames, tag=entry):
            self.on_unsent([Unsent(root.endpoint, frames, entry)])

    def on_unsent(self, messages: Sequence[Unsent]) -> None:
        """Inputs that never left this process: their requests fail, their leases end."""
        for message in messages:
            entry: Entry = message.tag
            self._desk.unsent(entry.retained)
            error = RequestError(
                "BLOCK_UNAVAILABLE",
                f"worker {entry.plan.root.worker} takes no messages",
                where=entry.plan.root.block,
                hint="try again later",
            )
            self.carry_out(self.table.fail(entry, error))

    def _refuse(
        self, client: bytes, request: wire.Request, error: BlockFlowError, received: int
    ) -> None:
        self.stats.refused(request.tasks, error.code)
        total = self._clock() - received
        results = [
            wire.TaskResult(task, None, error, total_ns=total)
            for task in dict.fromkeys(request.tasks)
        ]
        self._send(client, wire.Reply(request.request_id, self.planner.epoch, tuple(results)), [])

    def _refuse_unread(self, client: bytes, header: memoryview, error: BlockFlowError) -> None:
        """Answer what cannot be decoded if it has a request id; else only count it."""
        self.stats.events["malformed_client"] += 1
        rid = wire.request_id_of(header)
        if rid is None:
            return
        if error.details.get("too_large"):
            error = RequestError("TOO_LARGE", error.message, hint="send less at once")
        self.stats.refused((), error.code)
        result = wire.TaskResult(ANY_TASK, None, error)
        self._send(client, wire.Reply(rid, self.planner.epoch, (result,)), [])

    def _describe(self, client: bytes, ask: wire.Describe) -> None:
        table = self.planner.table
        tasks = [t.to_dict() for t in table.tasks.values()] if table else []
        bounds = {
            "protocol_version": limits.PROTOCOL_VERSION,
            "max_inflight": self._admission.max_inflight,
            "max_inflight_per_client": self._admission.max_inflight_per_client,
            "max_message_bytes": limits.MAX_MESSAGE_BYTES,
            "max_tasks_per_request": limits.MAX_TASKS_PER_REQUEST,
            "max_deadline_ms": limits.MAX_DEADLINE_MS,
        }
        self._send(
            client, wire.Description(ask.request_id, self.planner.epoch, tuple(tasks), bounds), []
        )

    def _invite(self, client: bytes, ask: wire.Invite, local: bool, received: int) -> None:
        if local:
            path, token, reason = self._grants.invite(client, received)
        else:
            path, token, reason = "", b"", "the client is on another host"
        self._send(client, wire.Invitation(ask.request_id, path, token, reason), [])

    # --- from the workers

    def on_return(self, frames: Sequence[zmq.Frame]) -> None:
        """One message of a worker; what is not of this protocol is counted and dropped."""
        now = self._clock()
        if not 1 <= len(frames) <= 2:
            self._malformed_data(f"{len(frames)} frames")
            return
        try:
            msg = decode_data_plane(frames[0].buffer)
        except BlockFlowError as exc:
            self._malformed_data(str(exc))
            return
        if isinstance(msg, Failure):
            for item in msg.items:
                self.carry_out(
                    self.table.failure(
                        item.request_id, item.attempt, item.hop, msg.sender, msg.error
                    )
                )
            return
        self._on_data(msg, frames[1].buffer if len(frames) == 2 else None, now)

    def _on_data(self, msg: Data, frame: memoryview | None, now: int) -> None:
        try:
            buffer = self._desk.open(msg, frame)
        except BlockFlowError as exc:
            self.stats.events["unreadable_data"] += 1
            _LOG.warning("a result of incarnation %d: %s", msg.sender, exc.__cause__ or exc)
            for item in msg.items:
                self._fail_item(msg, item, exc)
            return
        instructions: list[Instruction] = []
        start = 0
        try:
            for item in msg.items:
                entry = self.table.expecting(item.request_id, item.attempt, item.hop, msg.sender)
                if isinstance(entry, Drop):
                    pass  # late, double or forged: nothing but its slot is to be freed
                elif item.rows != entry.rows:
                    error = BlockError(
                        "OUTPUT_MISMATCH", f"{item.rows} rows came for a request of {entry.rows}"
                    )
                    instructions += self.table.failure(
                        item.request_id, item.attempt, item.hop, msg.sender, error
                    )
                else:
                    payload = self._desk.cut(buffer, start, item.rows, entry.client)
                    instructions += self.table.outcome(
                        item.request_id,
                        item.attempt,
                        item.hop,
                        msg.sender,
                        Answer(payload, item.hops, msg.sent_ns),
                    )
                start += item.rows
        finally:
            buffer.release()
        self.carry_out(instructions)

    def _fail_item(self, msg: Data, item: Item, error: BlockFlowError) -> None:
        self.carry_out(
            self.table.failure(item.request_id, item.attempt, item.hop, msg.sender, error)
        )

    def _malformed_data(self, why: str) -> None:
        n = self.stats.events["malformed_data"] = self.stats.events["malformed_data"] + 1
        if n & (n - 1) == 0:  # at 1, 2, 4, 8 ...: the log stays bounded
            _LOG.warning("data message refused (%d so far): %s", n, why)

    # --- from the Controller and the clock

    def publish(self, routes: RouteTable) -> None:
        """New requests go by ``routes``; those in flight keep their way."""
        self.planner.replace(routes)
        self.stats.publish(routes.tasks)

    def peer_gone(self, incarnation: int) -> None:
        """A worker is proven dead."""
        self.planner.peer_gone(incarnation)
        self._desk.peer_gone(incarnation)
        self.carry_out(self.table.peer_gone(incarnation))

    def tick(self) -> None:
        """Answer what is due, try again what clients did not take."""
        now = self._clock()
        self.carry_out(self.table.tick(now))
        if self._clients.waiting():
            for client, why in self._clients.flush(now):
                self._client_lost(client, why)

    def abort_all(self, error: BlockFlowError) -> None:
        """The Dispatcher ends: everything in flight is answered."""
        self.carry_out(self.table.abort_all(error))

    # --- instructions

    def carry_out(self, instructions: Sequence[Instruction]) -> None:
        for what in instructions:
            if isinstance(what, Reply):
                self._reply(what.entry)
            elif isinstance(what, ReleaseInput):
                entry = what.entry
                self._desk.release(entry.retained)
                self.planner.give_back(entry.plan)
                self._admission.completed(self._clock())

    def _reply(self, entry: Entry) -> None:
        blocks, lineage = entry.plan.blocks, entry.plan.lineage
        frames: list[Any] = []
        results: list[wire.TaskResult] = []
        now = self._clock()
        total = now - entry.received_ns
        for task, end, outcome in entry.results():
            if isinstance(outcome, BlockFlowError):
                self.stats.failed(task, outcome.code)
                results.append(
                    wire.TaskResult(
                        task, None, outcome, ingress_ns=entry.ingress_ns, total_ns=total
                    )
                )
                continue
            result: Result = outcome.payload
            egress = max(0, now - outcome.sent_ns)
            way = lineage[end]
            timings = [wire.Timing(blocks[t.node], t) for t in outcome.timings if t.node in way]
            if result.place is None:
                frames.append(result.frame)
            results.append(
                wire.TaskResult(
                    task,
                    result.tensor,
                    None,
                    tuple(timings),
                    entry.ingress_ns,
                    egress,
                    total,
                    result.place,
                )
            )
            self.stats.succeeded(task, total, entry.ingress_ns, egress, now)
        reply = wire.Reply(entry.request_id, entry.plan.epoch, tuple(results), entry.received_ns)
        self._send(entry.client, reply, frames)

    def _send(self, client: bytes, msg: wire.ToClient, frames: list[Any]) -> None:
        sent = self._clients.send(client, [wire.encode_to_client(msg), *frames], self._clock())
        if sent is not Sent.YES and sent is not Sent.LATER:
            self._client_lost(client, sent)

    def _client_lost(self, client: bytes, why: Sent) -> None:
        """Its other requests need no answer either; what comes back for them is dropped."""
        self.stats.events["slow_client" if why is Sent.SLOW else "client_gone"] += 1
        self._clients.forget(client)
        self._grants.client_gone(client)
        self.carry_out(self.table.client_gone(client))
