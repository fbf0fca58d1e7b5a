"""Load: clients that send all tasks without a pause and know the right answers; and odd ones, that
ask for what cannot be answered, or change their minds."""

from __future__ import annotations

import logging
import random
import secrets
import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from concurrent.futures import wait as wait_for
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

from blockflow.bench.chaos.ledger import CANCELLED, NO_REPLY, OK, PLAIN, POISON, WRONG, Ledger
from blockflow.bench.chaos.wire import WireTap
from blockflow.client import Client
from blockflow.core.errors import BlockFlowError
from blockflow.wire.data import REQUEST_ID_BYTES

log = logging.getLogger("blockflow.bench")

Array = npt.NDArray[np.float32]
TOLERANCE = 1e-4
"""What the right answer may differ by from another computation of it: batches of other sizes add
in another order (a few 1e-6 were seen). Answers to different inputs must differ by more, or one
could pass for another: :func:`told_apart`."""
NOWHERE = "no such task"
_POISONED = frozenset({POISON})
CANCELS_S = 0.03
"""A client changes its mind so soon at the latest: about as long as an answer takes."""
_OWN_WORDS = "no answer within"
"""How the client's own DEADLINE_EXCEEDED begins; the Dispatcher's is a reply like any other."""


@dataclass(frozen=True, slots=True)
class _Sender:
    """A client: where it connects to, what it sends how often, and what is special about it."""

    address: str
    tasks: tuple[str, ...]
    rate: float
    odd: bool = False
    far: bool = False


@dataclass(frozen=True, slots=True)
class _Ask:
    """A request; ``right`` is its result, None where there should be none."""

    task: str
    x: Array
    wanted: frozenset[str]
    right: Array | None = None
    retries: int = 8
    far: bool = False


@dataclass(frozen=True, slots=True)
class Traffic:
    """The load: requests per second and task, seconds that each may take, the seed of it all, and
    how long overdue replies are waited for at the end; with ``odd``, also requests that cannot be
    answered or are cancelled, so many per second, and a client behind a network that fails."""

    rate: float = 20.0
    deadline_s: float = 10.0
    seed: int = 1
    patience_s: float = 5.0
    odd: float = 0.0


class Load:
    """An open loop per task: requests leave at random moments, whatever became of the others.

    Args:
        address: of the Dispatcher.
        inputs: to send in turn.
        answers: task -> the right results, one for each input.
        far_address: the Dispatcher's for one client more, which sends all tasks in turn.

    Attributes:
        ledger: of all clients; read it after :meth:`stop`.
        failures: why clients ended that should have gone on, in words; likewise.
    """

    def __init__(
        self,
        address: str,
        inputs: Sequence[Array],
        answers: Mapping[str, Sequence[Array]],
        traffic: Traffic,
        far_address: str = "",
    ) -> None:
        self.ledger = Ledger()
        self.failures: list[str] = []
        self._address = address
        self._inputs = inputs
        self._answers = answers
        self._traffic = traffic
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._origin = time.monotonic()
        clients = [_Sender(address, (task,), traffic.rate) for task in answers]
        if traffic.odd:
            clients.append(_Sender(address, tuple(answers), traffic.odd, odd=True))
        if far_address:
            clients.append(_Sender(far_address, tuple(answers), traffic.rate, far=True))
        self._threads = [
            threading.Thread(target=self._run, args=(c, n), name=f"load-{n}", daemon=True)
            for n, c in enumerate(clients)
        ]

    def now(self) -> float:
        """Seconds of the run."""
        return time.monotonic() - self._origin

    def start(self) -> None:
        self._origin = time.monotonic()
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        """Stop sending and wait until every request has ended, or is long overdue."""
        self._stop.set()
        for thread in self._threads:
            thread.join()

    def answered(self) -> int:
        with self._lock:
            return len(self.ledger.ended)

    def poison(self, task: str, value: float) -> str:
        """Send ``task`` an input that kills whoever computes it, and wait for the end: the outcome.
        It is not sent again, lest it kill more than two."""
        tap = WireTap(self.ledger, self._lock, self.now)
        with Client(self._address, connect_timeout_s=self._traffic.deadline_s, tap=tap) as client:
            x = np.full_like(self._inputs[0], value)
            pending = self._submit(client, _Ask(task, x, _POISONED, retries=0))
            if pending is None:
                return "refused"
            self._await_all(client, [pending])
            if not pending.done():  # the ledger has it as one that never ended
                return "none"
            error = pending.exception()
        return OK if error is None else code_of(error)

    def _run(self, sender: _Sender, number: int) -> None:
        try:
            self._send(sender, number)
        except Exception as e:  # less load is no success
            log.exception("a client of the load has failed")
            self.failures.append(f"a client that sends {', '.join(sender.tasks)} failed: {e!r}")

    def _send(self, sender: _Sender, number: int) -> None:
        chance = random.Random(f"{self._traffic.seed}/{number}")
        due = time.monotonic()
        open_requests: list[Future[Any]] = []
        tap = WireTap(self.ledger, self._lock, self.now)
        # A client that gave up for want of a connection before the deadline would be its own fault.
        with Client(sender.address, connect_timeout_s=self._traffic.deadline_s, tap=tap) as client:
            while not self._stop.is_set():
                due += chance.expovariate(sender.rate)
                self._stop.wait(max(0.0, due - time.monotonic()))
                ask = self._ask(sender, chance)
                pending = self._submit(client, ask)
                if pending is not None:
                    open_requests.append(pending)
                    if CANCELLED in ask.wanted:
                        self._stop.wait(chance.uniform(0.0, CANCELS_S))
                        pending.cancel()
                if len(open_requests) > 1000:
                    open_requests = [p for p in open_requests if not p.done()]
            self._await_all(client, open_requests)

    def _ask(self, sender: _Sender, chance: random.Random) -> _Ask:
        task = sender.tasks[chance.randrange(len(sender.tasks))]
        which = chance.randrange(len(self._inputs))
        x, right = self._inputs[which], self._answers[task][which]
        if not sender.odd:
            return _Ask(task, x, PLAIN, right, far=sender.far)
        return chance.choice(
            (
                _Ask(task, x, frozenset({CANCELLED, OK}), right),
                _Ask(task, x[..., :-1], frozenset({"CONTRACT_MISMATCH"})),
                _Ask(task, np.full_like(x, np.nan), frozenset({"NON_FINITE_INPUT"})),
                _Ask(NOWHERE, x, frozenset({"UNKNOWN_TASK"})),
            )
        )

    def _submit(self, client: Client, ask: _Ask) -> Future[Any] | None:
        request_id, deadline_s = secrets.token_bytes(REQUEST_ID_BYTES), self._traffic.deadline_s
        with self._lock:
            now = self.now()
            self.ledger.sent(request_id, ask.task, now, deadline_s, ask.wanted, far=ask.far)
        try:
            pending = client.submit(
                ask.task,
                ask.x,
                deadline_s=deadline_s,
                request_id=request_id,
                retries=ask.retries,
            )
        except BlockFlowError as e:
            self._done(request_id, e.code)
            return None
        pending.add_done_callback(partial(self._ended, request_id, ask.right))
        return pending

    def _ended(self, request_id: bytes, right: Array | None, pending: Future[Any]) -> None:
        error = pending.exception()
        if error is not None:
            self._done(request_id, code_of(error))
            return
        value = pending.result().value
        if right is None:
            self._done(request_id, OK)
            return
        self._done(request_id, OK if same_answer(value, right) else WRONG)

    def _done(self, request_id: bytes, outcome: str) -> None:
        with self._lock:
            self.ledger.done(request_id, outcome, self.now())

    def _await_all(self, client: Client, pending: Sequence[Future[Any]]) -> None:
        """A client ends its requests by itself at their deadlines; what is open then is missing.
        The replies to those that it gave up may still come, and second ones."""
        wait_for(pending, timeout=self._traffic.deadline_s + self._traffic.patience_s)
        end = time.monotonic() + self._traffic.patience_s
        while self._silent() and time.monotonic() < end:
            time.sleep(0.02)
        # Messages keep their order: what had been sent before this answer has come before it.
        with suppress(BlockFlowError):
            client.tasks(timeout_s=self._traffic.patience_s)

    def _silent(self) -> int:
        with self._lock:
            return self.ledger.silent


def same_answer(value: npt.NDArray[Any], right: Array) -> bool:
    """Whether ``value`` is the right answer, as well as two computations of it can agree."""
    if value.shape != right.shape or value.dtype != right.dtype:
        return False
    return bool(np.allclose(value, right, rtol=0.0, atol=TOLERANCE))


def told_apart(answers: Sequence[Array]) -> bool:
    """Whether no row of any answer could pass for another one: a mistaken or mixed-up reply is then
    seen to be wrong."""
    rows = np.concatenate(answers)
    apart = np.abs(rows[:, None] - rows[None]).reshape(len(rows), len(rows), -1).max(axis=-1)
    np.fill_diagonal(apart, np.inf)
    return bool(apart.min() > 2 * TOLERANCE)


def code_of(error: BaseException) -> str:
    """An error's code for the ledger, NO_REPLY where the client has waited in vain."""
    if not isinstance(error, BlockFlowError):
        return type(error).__name__
    silent = error.code == "DEADLINE_EXCEEDED" and error.message.startswith(_OWN_WORDS)
    return NO_REPLY if silent else error.code
