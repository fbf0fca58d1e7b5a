"""Judge: what must hold at every step, whatever fails. It sees what is sent and what comes, and
keeps books of its own; of the cores it asks only what they count.

Every rule has a name, and raises at the very event that breaks it.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Sequence
from typing import TYPE_CHECKING

from blockflow.bench.faultsim.plant import BLOCKS
from blockflow.bench.faultsim.process import Hang, Message
from blockflow.bench.faultsim.rows import ROW
from blockflow.bench.simulation.watch import InvariantBroken
from blockflow.control.supervision import WORKER_POLICY, RestartLedger
from blockflow.core.errors import BlockFlowError
from blockflow.dispatcher.recovery import DEADLY
from blockflow.tensormq.atwork import Work
from blockflow.wire import client as wire
from blockflow.wire.control import PeerGone
from blockflow.wire.data import REQUEST_ID_BYTES, Data, Item
from blockflow.wire.tensor import Handle
from blockflow.worker.ticket import Batch

if TYPE_CHECKING:
    from blockflow.bench.faultsim.clients import Asked
    from blockflow.bench.faultsim.dispatcher import SimDispatcher
    from blockflow.bench.faultsim.process import SimProcess
    from blockflow.bench.faultsim.worker import SimWorker
    from blockflow.bench.faultsim.world import World

SLACK_NS = 100_000_000
"""After its deadline a request has its reply within this time."""

ONE_REPLY = "one reply"
IN_TIME = "in time"
BOOKS = "books agree"
FENCED = "fenced"
RIGHT_ANSWER = "right answer"
ONE_EPOCH = "one epoch"
BLAME = "blame"
KILLS_TWO = "poison kills two"
ONCE = "once"
NOT_LATE = "nothing starts late"
WAITS = "what can wait waits"
INTENSITY = "restart intensity"
NO_FALSE_DEATH = "no false death"
READY_AGAIN = "ready again"
NO_DEFECT = "no defect"

RULES = (
    ONE_REPLY,
    IN_TIME,
    BOOKS,
    FENCED,
    RIGHT_ANSWER,
    ONE_EPOCH,
    BLAME,
    KILLS_TWO,
    ONCE,
    NOT_LATE,
    WAITS,
    INTENSITY,
    NO_FALSE_DEATH,
    READY_AGAIN,
    NO_DEFECT,
)


class Judge:
    """The books of one run; those about requests are closed after every episode."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._ledgers: dict[int, tuple[RestartLedger, deque[int]]] = {}
        self._lost: list[Handle] = []
        self._clear()

    def _clear(self) -> None:
        self._number: dict[bytes, int] = {}
        self._due: dict[bytes, int] = {}
        self._attempt: dict[bytes, int] = {}
        self._valid: dict[int, set[tuple[int, int]]] = {}
        self._epochs: dict[tuple[bytes, int], int] = {}
        self._deaths: Counter[bytes] = Counter()
        self._kills: Counter[bytes] = Counter()
        self._ran_once: set[tuple[int, str]] = set()
        self._gone: set[tuple[int, int]] = set()
        self._turned_away: set[int] = set()

    def _broken(self, rule: str, now: int, what: str) -> InvariantBroken:
        return InvariantBroken(rule, now, what)

    # --- requests

    def accepted(self, number: int, ticket: bytes, now: int) -> None:
        """A request is in flight under this ticket; the first time it is seen there, it has just
        been received, and its time runs from then on, whatever the cores say of it."""
        asked = self._world.clients.requests[number]
        self._due.setdefault(ticket, now + asked.deadline_ms * 1_000_000)

    def sent(self, dispatcher: SimDispatcher, data: Data) -> None:
        """An input has left the Dispatcher: an attempt begins."""
        number = _number_in(dispatcher, data)
        if number is None:
            return
        for item in data.items:
            self._number[item.request_id] = number
            self._attempt[item.request_id] = item.attempt

    def turned_away(self, dispatcher: SimDispatcher, data: Data) -> None:
        """An input could not leave the Dispatcher for want of room: its request may be refused."""
        number = _number_in(dispatcher, data)
        if number is not None:
            self._turned_away.add(number)

    def visits(self, item: Item, block: str, now: int) -> None:
        """An item has come to a worker."""
        key = item.request_id, item.attempt
        epoch = self._epochs.setdefault(key, item.epoch)
        if epoch != item.epoch:
            what = f"attempt {item.attempt} set out in epoch {epoch}, {block} sees {item.epoch}"
            raise self._broken(ONE_EPOCH, now, what)

    def starts(self, worker: SimWorker, batch: Batch, now: int) -> None:
        """A forward begins."""
        for ticket in batch.tickets:
            due = self._due[ticket.item.request_id]
            if due <= now:
                late = (now - due) / 1e6
                raise self._broken(NOT_LATE, now, f"{worker.name} starts {late:.3f} ms late")
            if worker.block in self._world.once:
                # By the client's own number: sent again, a request has another ticket.
                key = self._number[ticket.item.request_id], worker.block
                if key in self._ran_once:
                    what = f"request {key[0]} runs again at {worker.block}"
                    raise self._broken(ONCE, now, what)
                self._ran_once.add(key)

    def returned(self, dispatcher: int, message: Message) -> None:
        """A worker's message is at the Dispatcher: may it count?"""
        if not isinstance(message, Data) or (dispatcher, message.sender) in self._gone:
            return
        for item in message.items:
            if self._attempt.get(item.request_id) == item.attempt:
                number = self._number[item.request_id]
                self._valid.setdefault(number, set()).add((item.attempt, message.sender))

    def answered(self, number: int, asked: Asked | None, reply: wire.Reply, now: int) -> None:
        """A client has a reply."""
        if asked is None:
            raise self._broken(ONE_REPLY, now, f"request {number} is answered again")
        if tuple(r.task for r in reply.results) != asked.tasks:
            raise self._broken(ONE_REPLY, now, f"request {number}: not every task has its outcome")
        for result in reply.results:
            if result.error is not None:
                self._failed(number, asked, result.error, now)

    def _failed(self, number: int, asked: Asked, error: BlockFlowError, now: int) -> None:
        if error.code == "POISON":
            deaths = max([self._deaths[t] for t, n in self._number.items() if n == number] or [0])
            if deaths < DEADLY:
                what = f"request {number} was at work in {deaths} deaths"
                raise self._broken(BLAME, now, what)
        elif error.code in ("INTERNAL", "MALFORMED_MESSAGE", "OUTPUT_MISMATCH"):
            raise self._broken(NO_DEFECT, now, f"request {number}: {error}")
        if asked.must:
            raise self._broken(READY_AGAIN, now, f"request {number} failed after all: {error}")

    def replies(
        self, dispatcher: SimDispatcher, reply: wire.Reply, tensors: Sequence[bytes], now: int
    ) -> None:
        """A reply leaves the Dispatcher: whose results are in it?"""
        number = int.from_bytes(reply.request_id, "big")
        rest = iter(tensors)
        designs: set[int] | None = None
        for result in reply.results:
            if result.error is not None:
                self._refused(dispatcher, number, result.error, now)
                continue
            got, attempt, versions, sender = ROW.unpack_from(next(rest))
            if got != number:
                what = f"request {number} has the answer of {got}"
                raise self._broken(RIGHT_ANSWER, now, what)
            if (attempt, sender) not in self._valid.get(number, ()):
                what = f"request {number}: attempt {attempt} of incarnation {sender} was accepted"
                raise self._broken(FENCED, now, what)
            made_by = self._world.plant.made_by(result.task, versions)
            designs = made_by if designs is None else designs & made_by
            if not designs:
                what = f"no update asked for what request {number} was answered by"
                raise self._broken(ONE_EPOCH, now, what)
        asked = self._world.clients.requests[number]
        if asked.must and designs is not None and self._world.in_force not in designs:
            what = f"request {number} is answered by what an earlier update asked for"
            raise self._broken(ONE_EPOCH, now, what)

    def _refused(
        self, dispatcher: SimDispatcher, number: int, error: BlockFlowError, now: int
    ) -> None:
        """No request ends because a worker is being replaced, before its time is up."""
        if error.code != "BLOCK_UNAVAILABLE" or error.where not in BLOCKS:
            return
        if number in self._turned_away:
            return
        if not dispatcher.exchange.planner.down(error.where):
            what = f"request {number} is refused, but {error.where} will come back"
            raise self._broken(WAITS, now, what)

    # --- processes

    def launches(self, name: str, ledger: RestartLedger | None, now: int) -> None:
        """A process is started."""
        if ledger is None:
            return
        _, crashes = self._ledgers.setdefault(id(ledger), (ledger, deque(maxlen=8)))
        window = int(WORKER_POLICY.window_s * 1e9)
        recent = sum(t > now - window for t in crashes)
        if recent >= WORKER_POLICY.crashes:
            what = f"{name} is started after {recent} crashes within {WORKER_POLICY.window_s:g} s"
            raise self._broken(INTENSITY, now, what)
        pause = int(WORKER_POLICY.first_s * 1e9 / 2)
        if crashes and now - crashes[-1] < pause:
            what = f"{name} is started {(now - crashes[-1]) / 1e6:.1f} ms after its crash"
            raise self._broken(INTENSITY, now, what)

    def reaped(self, incarnation: int, now: int) -> None:
        """The control plane hears of a death."""
        replica = self._world.manager.brain.crew.fleet.by_incarnation(incarnation)
        if replica is not None:
            ledger = replica.ledger
            self._ledgers.setdefault(id(ledger), (ledger, deque(maxlen=8)))[1].append(now)

    def died(self, process: SimProcess, status: int, work: tuple[Work, ...]) -> None:
        """A process has died with this at work."""
        if status and process.hang is not Hang.STOPPED:
            self._deaths.update({r[:REQUEST_ID_BYTES] for w in work for r in w.records})

    def poison_kills(self, worker: SimWorker, batch: Batch, now: int) -> None:
        """An input has killed a worker; batch mates that are poison for other blocks have not."""
        for ticket in batch.tickets:
            key = ticket.item.request_id
            number = self._number.get(key, 0)
            asked = self._world.clients.requests.get(number)
            if asked is None or asked.poison != worker.block:
                continue
            self._kills[key] += 1
            if self._kills[key] > DEADLY:
                raise self._broken(KILLS_TWO, now, f"request {number} kills another worker")

    def proven_dead(self, dispatcher: int, message: PeerGone, now: int) -> None:
        """The Dispatcher learns of a death; nothing of that life may count from now on."""
        self._gone.add((dispatcher, message.incarnation))

    def condemned(self, process: SimProcess, cause: str, now: int) -> None:
        """The control plane kills a process for hanging."""
        stuck = bool(getattr(process, "stuck", False))
        if process.hang is Hang.NO and not stuck:
            raise self._broken(NO_FALSE_DEATH, now, f"{process.name} is well, but: {cause}")

    # --- books

    def lost(self, handle: Handle) -> None:
        """A message with this handle is lost: its receiver will never release it."""
        self._lost.append(handle)

    def looks(self, dispatcher: SimDispatcher, now: int) -> None:
        """After everything that the Dispatcher does."""
        exchange = dispatcher.exchange
        table = exchange.table
        if exchange.admission.inflight != len(table):
            what = f"{exchange.admission.inflight} credits are out for {len(table)} requests"
            raise self._broken(BOOKS, now, what)
        due = table.soonest_deadline()
        if due is not None and due + SLACK_NS < now and dispatcher.resumed_ns != now:
            late = (now - due) / 1e6
            raise self._broken(IN_TIME, now, f"a request waits {late:.0f} ms after its deadline")
        if dispatcher.defects():
            raise self._broken(NO_DEFECT, now, f"the Dispatcher counts {dispatcher.defects()}")

    def rest(self, now: int) -> None:
        """Nothing is under way any more: nothing may be left."""
        world = self._world
        open_ = world.clients.waiting
        if open_:
            numbers = ", ".join(str(a.number) for a in open_[:5])
            raise self._broken(ONE_REPLY, now, f"{len(open_)} have no reply, among them {numbers}")
        dispatcher = world.dispatcher
        if dispatcher is not None:
            table, planner = dispatcher.exchange.table, dispatcher.exchange.planner
            routes = planner.table
            load = sum(planner.outstanding(s) for s in (routes.stages if routes else ()))
            left = {"requests": len(table), "bytes": table.charged, "waiting": table.waiting}
            left |= {"stages' loads": load, "credits": dispatcher.exchange.admission.inflight}
            if any(left.values()):
                raise self._broken(BOOKS, now, f"the Dispatcher rests with {left}")
        self._slots(now)
        self._clear()
        held = {id(r.ledger) for r in world.manager.brain.crew.fleet}
        self._ledgers = {k: v for k, v in self._ledgers.items() if k in held}

    def _slots(self, now: int) -> None:
        """Only slots whose message was lost on the way may be out."""
        arenas = self._world.arenas
        self._lost = [h for h in self._lost if h.incarnation in arenas]
        self._lost = [h for h in self._lost if arenas[h.incarnation].current(h)]
        for incarnation, arena in arenas.items():
            excused = len({h.slot for h in self._lost if h.incarnation == incarnation})
            if arena.leases.outstanding > excused:
                what = f"incarnation {incarnation} has {arena.leases.outstanding} slots out"
                raise self._broken(BOOKS, now, what + f", {excused} of them lost on the way")


def _number_in(dispatcher: SimDispatcher, data: Data) -> int | None:
    """Whose input a message of the Dispatcher brings, by what lies in its slot."""
    handle = data.tensor.handle
    if handle is None:
        return None
    return int(ROW.unpack(dispatcher.arena.memory(handle.offset, ROW.size))[0])
