"""Exchange: requests in, replies out. Carries out what admission, planner and table decide."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Sequence
from operator import attrgetter
from typing import Any

import zmq

from blockflow.core.errors import BlockFlowError, RequestError, WireError
from blockflow.core.routing import RouteTable
from blockflow.core.text import worth_a_line
from blockflow.dispatcher.admission import Admission
from blockflow.dispatcher.clients import ClientPort, Sent, is_local
from blockflow.dispatcher.entrance import let_in
from blockflow.dispatcher.entry import (
    Entry,
    Instruction,
    ReleaseInput,
    Reply,
    SendAgain,
    SetOut,
    Supersede,
)
from blockflow.dispatcher.feedback import learn
from blockflow.dispatcher.grants import GrantDesk
from blockflow.dispatcher.inflight import InFlightTable
from blockflow.dispatcher.plan import Planner
from blockflow.dispatcher.questions import Questions
from blockflow.dispatcher.recovery import Death
from blockflow.dispatcher.repeats import ResultMemory, find_known, request_digest
from blockflow.dispatcher.replies import ANY_TASK, Descriptions, make_refusal, make_reply
from blockflow.dispatcher.retry import RetryBudget
from blockflow.dispatcher.returns import Returns, own_failure
from blockflow.dispatcher.stats import DispatcherStats
from blockflow.dispatcher.tensors import Outgoing, TensorDesk
from blockflow.dispatcher.validate import check_contract, check_names
from blockflow.dispatcher.wakefulness import Wakefulness
from blockflow.dispatcher.withdraw import Withdrawals
from blockflow.tensormq.push import PushCache, Unsent
from blockflow.wire import client as wire
from blockflow.wire.data import Data, encode_data

_LOG = logging.getLogger("blockflow.dispatcher")

_DEBTS_SHARE = 10
_DEBTS_NS = 50_000_000
"""Who owes what is looked at after every message, which takes some microseconds per client: of many
that owe for long, no more than a tenth of the time, but twenty times a second."""

_CHECKS_VALUES = attrgetter("check_finite")

_NAMED = 16
"""So many requests at work are named when their worker dies; of a large batch the first."""


class Exchange:
    """The request path between clients and first stages, last stages and clients.

    Used from one thread. ``clock`` gives monotonic nanoseconds; each event is stamped once.

    Attributes:
        admission: who may enter.
        memory: of replies that their clients may ask for again.
        withdrawals: of requests that nobody waits for any more.
        wakefulness: what the requests under way ask of idle cores.
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
        memory: ResultMemory,
        clock: Callable[[], int],
    ) -> None:
        self._incarnation = incarnation
        self.admission = admission
        self._desk = desk
        self._grants = grants
        self._clients = clients
        self._push = push
        self._clock = clock
        self.planner = Planner()
        self.table = InFlightTable(incarnation, self.planner, RetryBudget(admission.max_inflight))
        self.memory = memory
        self.withdrawals = Withdrawals(incarnation, push)
        self.wakefulness = Wakefulness()
        self.stats = DispatcherStats()
        self._results = Returns(desk, self.table, self.stats, self.carry_out, self.defect)
        descriptions = Descriptions(admission.bounds)
        self._questions = Questions(
            lambda question: descriptions.answer(question, self.planner.table), self._send_frames
        )
        self._debts_ns = 0
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
                # Its traceback, which may lead back to it, would keep the input until a collection.
                self._refuse(client, msg, exc.with_traceback(None), received)
            except Exception as exc:  # a defect: this one request pays for it
                _LOG.exception("request %s failed in admission", msg.request_id.hex())
                self._refuse(client, msg, own_failure(exc, "in admission"), received)
            else:
                if entry is not None and not entry.waits_for:
                    self.carry_out([SetOut(entry)])
        elif isinstance(msg, wire.Cancel):
            self.carry_out(self.table.cancel(client, msg.request_id))
        elif isinstance(msg, wire.Invite):
            self._invite(client, msg, is_local(frames[0]), received)
        else:
            self._questions.ask(msg.request_id, client)

    def _admit(
        self, client: bytes, request: wire.Request, frame: memoryview | None, received: int
    ) -> Entry | None:
        """Check, plan and keep the input. Raises BlockFlowError: it is not admitted.

        Returns:
            None when it is a request that came before: it has its answer, or will get it.
        """
        check_names(request.tasks)
        table = self.table
        source = self._desk.elements(client, request, frame)
        known = find_known(self.memory, table, client, request, source, received)
        if known is not None:
            if known:
                self._send_frames(client, known)
            return None
        table.check_new(client, request.request_id)
        if self.closed_because:
            raise RequestError("NOT_READY", self.closed_because, hint="try again later")
        tasks = [self.planner.task(name) for name in request.tasks]
        check_contract(request.tensor, tasks)
        budget_ns = request.deadline_ms * 1_000_000
        kept = self._desk.frames.nbytes
        plan = let_in(self.admission, table, self.planner, client, request, tasks, received, kept)
        # What costs more the larger the input is comes last: digest, copy, the check of the values.
        digest = request_digest(request, source) if request.tries and self.memory.on else b""
        check_finite = any(map(_CHECKS_VALUES, tasks))
        root = None if plan.absent else plan.root
        retained = self._desk.retain(request, source, root, check_finite, received + budget_ns)
        if retained is None:
            raise self.admission.no_space(source.nbytes, len(table), received).error
        entry = table.admit(
            client,
            request.request_id,
            request.tasks,
            plan,
            rows=request.tensor.dims[0],
            deadline_ns=received + budget_ns,
            received_ns=received,
            retained=retained,
            charged=source.nbytes,
            digest=digest,
            again=request.tries > 1,
        )
        self.admission.enter(entry.ticket, client, request.tasks, budget_ns, received)
        self.stats.admitted(request.tasks, entry.rows)
        return entry

    def _set_out(self, entry: Entry) -> None:
        """Send the input to the first stage."""
        plan, payload = entry.plan, entry.retained.payload
        self.wakefulness.enter(entry.ticket, plan.tasks)
        now = self._clock()
        entry.ingress_ns = now - entry.received_ns
        frames: list[Any] = [
            encode_data(Data(self._incarnation, now, payload.desc, (entry.item(now),)))
        ]
        if payload.frame is not None:
            frames.append(payload.frame)
        root = plan.root
        tag = Outgoing(entry, entry.attempt, payload)
        if not self._push.send(root.endpoint, frames, tag=tag):
            self.on_unsent([Unsent(root.endpoint, frames, tag)])

    def on_unsent(self, messages: Sequence[Unsent]) -> None:
        """Inputs that never left this process: their requests fail, their leases end."""
        for message in messages:
            out: Outgoing | None = message.tag
            if out is None:  # a withdrawal
                continue
            self._desk.unsent(out.payload)
            if not out.current:
                continue
            entry = out.entry
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
        self._send(client, make_refusal(request, error, self.planner.epoch, total), [])

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

    def _invite(self, client: bytes, ask: wire.Invite, local: bool, received: int) -> None:
        if local:
            path, token, reason = self._grants.invite(client, received)
        else:
            path, token, reason = "", b"", "the client is on another host"
        self._send(client, wire.Invitation(ask.request_id, path, token, reason), [])

    # --- from the workers

    def on_return(self, frames: Sequence[zmq.Frame]) -> None:
        """One message of a worker."""
        self._results.read(frames, self._clock())

    # --- from the Controller and the clock

    def publish(self, routes: RouteTable) -> None:
        """New requests, and new attempts, go by ``routes``; what is under way keeps its way."""
        before = self.planner.table
        self.planner.replace(routes)
        self.withdrawals.publish(routes)
        self.admission.publish(routes.tasks)
        canaries = {n: t.canary.path for n, t in routes.tasks.items() if t.canary is not None}
        self.stats.publish(routes.tasks, canaries)
        self.carry_out(self.table.published())
        if before is not None and before.tasks != routes.tasks:  # with deadlines that clients keep
            self._questions.ask(wire.UNASKED, *self._clients.present)

    def peer_gone(
        self, incarnation: int, at_work: Sequence[bytes] = (), unsent: Sequence[Unsent] = ()
    ) -> None:
        """A worker is proven dead.

        Args:
            incarnation: its.
            at_work: records of what it was executing (:class:`~blockflow.wire.control.PeerGone`).
            unsent: messages that had not left for it.
        """
        self.withdrawals.peer_gone(incarnation)
        tags: list[Outgoing] = [m.tag for m in unsent if m.tag is not None]
        for tag in tags:
            self._desk.unsent(tag.payload)
        tickets = {t.entry.ticket for t in tags if t.current}
        self._desk.peer_gone(incarnation)
        death = Death.of(incarnation, at_work, tickets)
        for entry in self.table.at_work(death)[:_NAMED]:
            # Who looks for a crash's cause finds tickets there, and a client knows its own id only.
            words = (incarnation, entry.ticket.hex(), entry.request_id.hex(), entry.client.hex())
            _LOG.warning("incarnation %d died at ticket %s: request %s of client %s", *words)
        self.carry_out(self.table.peer_gone(death, self._clock()))

    def next_due(self) -> int | None:
        """When something is due although nothing happens: for :meth:`tick`, or of what is asked of
        idle cores."""
        deadline, sleep = self.table.next_deadline(), self.wakefulness.next_due()
        return sleep if deadline is None or (sleep is not None and sleep < deadline) else deadline

    def tick(self, now_ns: int) -> None:
        """Answer what is due, try again what clients did not take."""
        due = self.table.tick(now_ns)
        if due:
            self.carry_out(due)
        if now_ns >= self._debts_ns and self._clients.waiting():
            for client, why in self._clients.flush(now_ns):
                self._client_lost(client, why)
            end = self._clock()
            self._debts_ns = end + min(_DEBTS_SHARE * (end - now_ns), _DEBTS_NS)
        if self._questions.under_way:
            self._questions.go_on()

    def abort_all(self, error: BlockFlowError) -> None:
        """The Dispatcher ends: everything in flight is answered."""
        self.carry_out(self.table.abort_all(error))

    # --- instructions

    def carry_out(self, instructions: Sequence[Instruction]) -> None:
        """Do them all: a defect at one must not keep the credit or the slot of another."""
        todo = deque(instructions)
        while todo:
            what = todo.popleft()
            try:
                if isinstance(what, Reply):
                    self._reply(what.entry)
                elif isinstance(what, SetOut):
                    self._set_out(what.entry)
                elif isinstance(what, ReleaseInput):
                    self._release(what.entry)
                elif isinstance(what, SendAgain):
                    if what.entry in self.table:  # its client may have been found to be gone
                        self._desk.prepare_again(what.entry)
                        self._set_out(what.entry)
                elif isinstance(what, Supersede):
                    self.wakefulness.leave(what.ticket, self._clock())  # perhaps it has to wait
                    self.withdrawals.give_up(what.ticket, what.attempt, what.plan, what.ends)
            except Exception as exc:
                self.defect(type(what).__name__)
                if isinstance(what, SetOut | SendAgain):  # else it would wait for its deadline
                    todo += self.table.fail(what.entry, own_failure(exc, "on its way"))
        if self.withdrawals.due:
            self.withdrawals.send()

    def _release(self, entry: Entry) -> None:
        try:
            self._desk.release(entry.retained)
        finally:
            now = self._clock()
            self.admission.leave(entry.ticket, now)
            self.wakefulness.leave(entry.ticket, now)
            self.withdrawals.ended(entry)

    def defect(self, what: str) -> None:
        """Something hit a defect: the others must not. To be called where it is caught."""
        n = self.stats.events["defects"] = self.stats.events["defects"] + 1
        if worth_a_line(n):
            _LOG.exception("%s could not be handled (%d so far)", what, n)

    def _reply(self, entry: Entry) -> None:
        now, made = self._clock(), True
        try:
            ends = entry.results()
            learn(self.admission, entry, ends, now)
            reply, tensors = make_reply(entry, ends, now, self.stats)
            frames = [wire.encode_to_client(reply), *tensors]
            if entry.digest:
                self.memory.remember(entry, frames, now)
        except Exception as exc:  # its client would wait for its deadline
            self.defect("a reply")
            made = False
            total = now - entry.received_ns
            failed = make_refusal(entry, own_failure(exc, "at its reply"), entry.plan.epoch, total)
            frames = [wire.encode_to_client(failed)]
        if entry.client:
            self._send_frames(entry.client, frames)
        if not made:
            self._desk.unreplied(entry)

    def _send(self, client: bytes, msg: wire.ToClient, frames: list[Any]) -> None:
        self._send_frames(client, [wire.encode_to_client(msg), *frames])

    def _send_frames(self, client: bytes, frames: Sequence[Any]) -> None:
        sent = self._clients.send(client, frames, self._clock())
        if sent is not Sent.YES and sent is not Sent.LATER:
            self._client_lost(client, sent)

    def _client_lost(self, client: bytes, why: Sent) -> None:
        """Its other requests need no answer either; what comes back for them is dropped."""
        if why is Sent.SLOW:
            self.stats.events["slow_client"] += 1
        elif self.table.of_client(client):
            self.stats.events["client_gone"] += 1
        self._clients.forget(client)
        self._questions.forget(client)
        self._grants.client_gone(client)
        self.carry_out(self.table.client_gone(client))
