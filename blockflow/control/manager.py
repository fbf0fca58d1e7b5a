"""Manager: the thread that carries out what the Brain decides (thesis, section 3.5: the Manager).

It owns the Brain, the store, the children and the KPIs; every other thread talks to it through
:meth:`Manager.submit`, so that no state is shared and nothing needs a lock.
"""

from __future__ import annotations

import logging
import os
import select
import signal
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

from blockflow.control.adoption import Inheritance
from blockflow.control.brain import Brain
from blockflow.control.children import Children
from blockflow.control.controller import Controller
from blockflow.control.crashes import CrashBook
from blockflow.control.crew import ns
from blockflow.control.endings import LastWords
from blockflow.control.events import (
    AllGone,
    Begun,
    Commit,
    CommitFailed,
    Committed,
    Event,
    Exited,
    Finished,
    Instruction,
    Kill,
    Launch,
    LaunchFailed,
    Prove,
    Proved,
    Received,
    Send,
)
from blockflow.control.fleet import Place
from blockflow.control.health import Health
from blockflow.control.kpis import KpiBook
from blockflow.control.lookups import Lookups
from blockflow.control.memory import KillWatch
from blockflow.control.probe import ROUTES_VERSION, Prober
from blockflow.control.profiles import ProfileShelf
from blockflow.control.settings import ControlSettings
from blockflow.control.store import StateStore
from blockflow.control.succession import Outcome, Succession
from blockflow.control.tenure import CONTROL_SOCKET, Tenure
from blockflow.control.update import Update
from blockflow.control.views import Views
from blockflow.control.waiters import Waiter, Waiters, fulfil, result_of
from blockflow.core.errors import BlockFlowError, SystemError_
from blockflow.core.scarcity import no_room
from blockflow.launch.base import Launcher
from blockflow.launch.ward import Ward
from blockflow.tensormq.agent import Mailbox
from blockflow.tensormq.janitor import RunDir, remove_leavings
from blockflow.tensormq.weights import remove_unused
from blockflow.wire.control import Pong, Ready, RoutesApplied, Stats

log = logging.getLogger("blockflow.control")

T = TypeVar("T")

_CALL_S = 30.0
"""A command waits this long for the Manager's thread, which itself waits for nobody for long."""


class Manager:
    """The control plane's centre.

    Args:
        settings: of this control plane.
        store: the locked state; closed by its owner.
        launcher: starts processes; closed by its owner.
        run_dir: of this instance.
        ward: of the guardian that starts another Manager should this one die; None without.
        inheritance: what a Manager that has died left to this one.

    Attributes:
        number: its own; it is lower than those of its processes and updates.
        outcome: of the succession, if there was one, once it is done.
    """

    def __init__(
        self,
        settings: ControlSettings,
        store: StateStore,
        launcher: Launcher,
        run_dir: RunDir,
        *,
        ward: Ward | None = None,
        inheritance: Inheritance | None = None,
    ) -> None:
        self.settings = settings
        self.store = store
        self.run_dir = run_dir
        self.kpis = KpiBook()
        self._crashes = CrashBook(settings.state_dir)
        self._kills = KillWatch() if ward is None else KillWatch(told=ward.line.claimed)
        endpoint = f"ipc://{run_dir.path}/{CONTROL_SOCKET}"
        self._log_dir = settings.state_dir / "logs"
        place = Place(str(run_dir.path), endpoint, str(self._log_dir))
        self.brain = Brain(settings, place, store)
        self.gone = threading.Event()
        self._lookups = Lookups(ProfileShelf(settings.repository))
        self._inbox: Mailbox[Received | Proved | Callable[[], None]] = Mailbox()
        self._ward = ward
        self._inheritance = inheritance
        self.outcome: Outcome | None = None
        self._tenure = Tenure(ward, run_dir.path, store.warn)
        self.number = store.take_incarnation()
        self._prober = Prober(run_dir.path, self.number, self._inbox.put, settings.plain_links)
        self._unproved: dict[int, Prove] = {}
        self.controller = Controller(endpoint, self._inbox.put)
        self._health = Health(
            self.brain.crew, self.controller, run_dir.path, settings.timing, self._inbox.put
        )
        self._poll = select.poll()
        self._poll.register(self._inbox.fileno(), select.POLLIN)
        self._children = Children(
            launcher, self._lookups.launch, self._poll, self._log_dir, store.warn, self._kills.claim
        )
        self._waiters = Waiters()
        self._dead = LastWords(self.brain.crew.find)
        self._thread = threading.Thread(target=self._run, name="bf-manager", daemon=True)

    # --- for other threads ----------------------------------------------------------------------

    def start(self) -> None:
        """Start the thread and the Dispatcher's launch; returns at once."""
        self._prober.start()
        self.controller.start()
        self._thread.start()
        if self._inheritance is None:
            self.submit(lambda: self.brain.crew.start_dispatcher(time.monotonic_ns()))

    def submit(self, command: Callable[[], T]) -> Future[T]:
        """Run ``command`` in the Manager's thread, between two events."""
        future: Future[T] = Future()
        if not self._thread.is_alive():
            raise SystemError_("NOT_RUNNING", "the control plane is not running")
        self._inbox.put(partial(fulfil, future, command))
        return future

    def call(self, command: Callable[[], T]) -> T:
        """:meth:`submit` and wait for the result. Raises what ``command`` raises, or TIMEOUT."""
        return result_of(self.submit(command), _CALL_S, self.store.patience.reason)

    def wait(self, test: Callable[[], T | None], timeout_s: float) -> T | None:
        """Wait until ``test``, run in the Manager's thread, gives something; None on time-out.
        Raises as :meth:`call`."""
        future: Future[T | None] = Future()
        deadline = time.monotonic_ns() + ns(timeout_s)
        self.call(lambda: self._waiters.add(Waiter(test, deadline, future)))
        return result_of(future, timeout_s + _CALL_S, self.store.patience.reason)

    def wait_update(self, update_id: int, timeout_s: float) -> Update | None:
        """The update once it is final; None when it is still under way at the time-out."""
        return self.wait(lambda: self.ended(update_id), timeout_s)

    def ended(self, update_id: int) -> Update | None:
        """The update if it is final; call it in the Manager's thread."""
        update = self.brain.runner.updates.get(update_id)
        return update if update is not None and update.final else None

    def views(self) -> Views:
        """Documents of this moment; call it in the Manager's thread."""
        now = time.monotonic_ns()
        return Views(self.brain, self.kpis, self._health.ping_ms, now, self._crashes)

    def warnings(self) -> tuple[str, ...]:
        """Of the state and the journal; call it in the Manager's thread."""
        return self.store.warning, self._tenure.warning

    def ping(self, names: set[str] | None = None) -> list[dict[str, Any]]:
        """Ping the workers with these names (None = all, with the Dispatcher) and collect the
        answers; a process that does not answer in time has ``ok`` false."""
        answers = self.call(lambda: self._health.ask(names))
        return result_of(answers, self.settings.timing.ping + _CALL_S).to_dict()

    def shutdown(self) -> None:
        """Begin to stop all processes, without waiting for it. The update under way fails, so that
        whoever waits for that is told at once. Idempotent."""
        if self._thread.is_alive():
            self.submit(lambda: self.brain.shutdown(time.monotonic_ns()))

    def stop(self) -> None:
        """Stop all processes and wait until they are gone, then end the threads. Idempotent."""
        if self._thread.is_alive():
            self.shutdown()
            timing = self.settings.timing
            if not self.gone.wait(timing.grace + 2 * timing.stop + 5.0):
                log.error("some processes did not end in time and are killed")
            self._inbox.put(self._end)
            self._thread.join()
        self.controller.close()
        self._prober.close()
        self._inbox.close()

    # --- the Manager's thread -------------------------------------------------------------------

    def _run(self) -> None:
        self._running = True
        if self._inheritance is not None and self._ward is not None:
            self._succeed(self._inheritance, self._ward)
        while self._running:
            if self._apart(self._turn) is not None:
                time.sleep(0.05)
        self._children.kill_all(self.settings.timing.stop)
        self._waiters.dismiss()
        self._health.close()

    def _end(self) -> None:
        self._running = False

    def _succeed(self, inheritance: Inheritance, ward: Ward) -> None:
        """Take over what a dead Manager has left, before anything else is done."""
        try:
            succession = Succession(
                inheritance, self.brain, self._children, self.controller, self._health, self.run_dir
            )
            outcome = succession.run(self._poll, self._inbox, ward.guardian, {self.number})
            for death in outcome.dead:
                self._died(death)
            self.brain.crew.take_back()
            self.brain.readopt(outcome.adoption, time.monotonic_ns())
            self._carry_out()
        except Exception as e:
            lacking = no_room(e, f"no room to take over: {e}", "manager")
            if lacking is not None:
                ward.line.failing(lacking)  # the next one may find it; the guardian says so, once
            else:
                log.exception("what runs cannot be taken over")
                # Better a moment without service than processes that nobody looks after.
                ward.line.anew(f"taking over failed: {type(e).__name__}: {e}")
            os._exit(1)
        self.outcome = outcome
        log.warning("taken over: %s", ", ".join(outcome.adopted) or "nothing")

    def _turn(self) -> None:
        """One round of the loop: wait, take what came, carry out what follows."""
        ready = [fd for fd, _ in self._poll.poll(self._timeout_ms())]
        for item in self._inbox.drain():
            self._apart(partial(self._take, item))
        now = time.monotonic_ns()
        for death in self._children.reap(ready):
            self._dead.add(death, now)
        for death in self._dead.heard_out(now):
            self._apart(partial(self._died, death))
        deadline = self.brain.deadline()
        if deadline is not None and now >= deadline:
            self.brain.tick(now)
            self._carry_out()
        for hang in self._health.tick(now):
            self.brain.condemn(hang, now)
            self._carry_out()
        if not self.brain.stopping:  # nothing is launched any more
            self._children.tend(now)
        self._tenure.attend(now)
        self.store.tend(now)
        self._kills.look(now)
        for event in self._children.go_on():
            self._happened(event)
            self._carry_out()
        self._waiters.check(now)

    def _apart(self, act: Callable[[], None]) -> Exception | None:
        """Do it. A defect must not take with it what else there is to do, or the control plane:
        what runs keeps serving."""
        try:
            act()
        except Exception as e:
            log.exception("defect in the manager's loop")
            return e
        return None

    def _take(self, item: Received | Proved | Callable[[], None]) -> None:
        if isinstance(item, Received):
            self._received(item)
            if isinstance(item.message, Stats | Pong):
                return  # nothing follows, and of N processes come 5 N a second
        elif isinstance(item, Proved):
            self.brain.handle(item, time.monotonic_ns())
        else:
            item()
        self._carry_out()

    def _timeout_ms(self) -> int:
        now = time.monotonic_ns()
        times = [self.brain.deadline(), self._health.deadline(), self._children.deadline(now)]
        times += [*self._waiters.deadlines(), *self._dead.deadlines()]
        return max(0, -(-(min(t for t in times if t is not None) - now) // 1_000_000))

    def _received(self, event: Received) -> None:
        message, now = event.message, time.monotonic_ns()
        if isinstance(message, Stats):
            if (life := self.brain.crew.find(event.incarnation)) is not None:
                topology = self.brain.realm.topology
                tasks = topology.tasks if topology is not None else ()
                self.kpis.add(event.incarnation, life.name, message, time.time(), tasks)
        elif isinstance(message, Pong):
            self._health.pong(event.incarnation, message, event.read_ns)
        elif isinstance(message, RoutesApplied) and message.version == ROUTES_VERSION:
            order = self._unproved.pop(event.incarnation, None)
            if order is not None:
                self._prober.prove(order)
        else:
            if isinstance(message, Ready):
                self._health.loaded(event.incarnation)
            self.brain.handle(event, now)

    def _died(self, death: Exited) -> None:
        if self._tenure.ordered(death.status):
            return  # no crash, and nothing is to be done about it: all of this ends
        incarnation = death.incarnation
        life = self.brain.crew.find(incarnation)
        name, state = (life.name, str(life.state)) if life is not None else ("?", "")
        level = logging.INFO if state == "stopping" else logging.WARNING
        log.log(level, "%s (incarnation %d) ended: status %d", name, incarnation, death.status)
        self.controller.forget(incarnation)
        self.kpis.forget(incarnation)
        self._unproved.pop(incarnation, None)
        self._prober.forget(incarnation)
        death = replace(death, work=self._health.died(incarnation))
        # Consumers keep what they have mapped; nobody can map the dead arena anew.
        remove_leavings(self.run_dir.path, incarnation)
        remove_unused(self.run_dir.path)
        now = time.monotonic_ns()
        if life is not None and death.status == -signal.SIGKILL:
            self.brain.crew.killed(life, lambda: self._kills.claim(now))
        self.brain.handle(death, now)
        self._carry_out()  # before it is written down: requests wait for it, and a disk may stall
        self._crashes.take(self.brain.crew, incarnation, now)

    def _carry_out(self) -> None:
        """Do what the Brain says, and what follows from doing it, until it asks for nothing. Raises
        what a defect has raised, when all the others are done."""
        defects: list[Exception] = []
        while True:
            instructions = self.brain.take()
            self._tenure.record(self.brain.realm)
            if not instructions:
                break
            for instruction in instructions:
                try:
                    if (event := self._do(instruction)) is not None:
                        self._happened(event)
                except Exception as e:
                    defects.append(e)
        if defects:
            raise defects[0] if len(defects) == 1 else ExceptionGroup("defects", defects)

    def _do(self, instruction: Instruction) -> Event | None:
        if isinstance(instruction, Send):
            message = self._lookups.message(instruction, self.brain.crew.fleet)
            self.controller.send(instruction.incarnation, message)
        elif isinstance(instruction, Launch):
            self.controller.admit(instruction.incarnation)
            return self._children.launch(instruction)
        elif isinstance(instruction, Prove):
            self._unproved[instruction.incarnation] = instruction
            self.controller.send(instruction.incarnation, self._prober.routes(instruction.mode))
        elif isinstance(instruction, Kill):
            self._children.kill(instruction)
        elif isinstance(instruction, Begun):
            self.store.begin(instruction.epoch)
        elif isinstance(instruction, Commit):
            return self._commit(instruction)
        elif isinstance(instruction, Finished):
            if (update := self.brain.runner.updates.get(instruction.update_id)) is not None:
                if update.stores:
                    self.store.ended(update.epoch)
                cause = f": {update.error}" if update.error is not None else ""
                log.info("update %d (%s) %s%s", update.update_id, update.kind, update.phase, cause)
        elif isinstance(instruction, AllGone):
            self.gone.set()
        return None

    def _happened(self, event: Event) -> None:
        """What came of what was done here. A launch that failed is a crash, of no process."""
        self.brain.handle(event, now := time.monotonic_ns())
        if isinstance(event, LaunchFailed):
            self.controller.forget(event.incarnation)
            self._crashes.take(self.brain.crew, event.incarnation, now)

    def _commit(self, order: Commit) -> Committed | CommitFailed:
        try:
            self.store.commit(order.epoch, order.posted, order.topology, order.digests, order.how)
        except BlockFlowError as e:
            return CommitFailed(order.update_id, e)
        return Committed(order.update_id)
