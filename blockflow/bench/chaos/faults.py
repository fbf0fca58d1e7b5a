"""Faults: what a :class:`~blockflow.bench.chaos.plan.Fault` does to a running system."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from blockflow.bench.chaos.plan import Fault
from blockflow.bench.chaos.proxy import Proxy
from blockflow.bench.chaos.remote import RemoteSystem
from blockflow.bench.chaos.strangers import Strangers
from blockflow.control.guardian import MANAGER_POLICY
from blockflow.control.supervision import WORKER_POLICY
from blockflow.control.update import Kind as UpdateKind
from blockflow.core.errors import BlockFlowError
from blockflow.tensormq.atwork import AtWorkReader

STOP_S = 5.0
BURN_S = 5.0
STALL_S = 2.0
RESET, STALLED, POISONED = "connections reset", "network stalls 2 s", "poison"
NETWORK_KINDS = frozenset({RESET, STALLED})
FRAGILE = "fragile"
"""A block, and the task of it alone, that one input kills."""
_BURNERS_PER_CORE = 4
_SPARED = WORKER_POLICY.crashes - 2
"""A worker that has died so often lately is left alone: it would be given up, as it should be, and
its block stay down."""
_WINDOW_S = WORKER_POLICY.window_s + 2.0
_FIRST_S = 0.3
_AT_WORK_S = 3.0
_IN_UPDATE = 1 / 3
_NOTICED_S = 0.02
"""So long a Manager takes to notice a death, and to do what follows from it."""
_TAKEN_OVER_S = 60.0
_BURN = "import time\nend = time.monotonic() + {s}\nwhile time.monotonic() < end: pass"


@dataclass(frozen=True, slots=True)
class Injected:
    """A fault that was injected.

    ``at_s`` is when the process got its signal (to find it takes a while, in which it serves on).
    ``tasks`` are those that it may have interrupted, to look for their recovery; ``note`` is for
    people, and says so when there was nothing to do it to. ``beside`` are the tasks through a
    worker that was killed together with somebody else.
    """

    at_s: float
    kind: str
    tasks: tuple[str, ...]
    note: str
    beside: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Takeover:
    """A Manager was killed at ``at_s``; its successor had taken over and answered ``took_s`` later
    (infinite: there was none); ``adopted``: how many processes it went on with."""

    at_s: float
    took_s: float
    adopted: int


class Injector:
    """Does faults to ``system``.

    Args:
        topology: the body in force; the fault "system update" goes back and forth between it and
            the same one with a second trunk worker.
        clock: seconds of the run.
        proxy: before those clients that faults of the network shall hit.
        poison: sends a request that kills whoever runs it, and tells its outcome.

    Attributes:
        takeovers: of each Manager that was killed.
    """

    def __init__(
        self,
        system: RemoteSystem,
        topology: Mapping[str, Any],
        clock: Callable[[], float],
        seed: int,
        *,
        proxy: Proxy | None = None,
        poison: Callable[[], str] | None = None,
    ) -> None:
        self._system = system
        self._proxy = proxy
        self._poison_request = poison
        # A new Dispatcher comes up at the same address.
        self._strangers = Strangers(system.client_endpoint, tuple(topology["tasks"]), seed)
        self._topology = topology
        self._clock = clock
        self._larger = False
        self._struck_s = 0.0
        self._beside: tuple[str, ...] = ()
        self.takeovers: list[Takeover] = []
        self._managers: list[float] = []
        self._later: list[threading.Timer] = []
        self._children: list[subprocess.Popen[bytes]] = []
        self._do: Mapping[str, Callable[[float], tuple[Sequence[str], str]]] = {
            "worker killed": lambda d: self._worker(d, signal.SIGKILL),
            "worker killed at work": self._worker_at_work,
            "worker stopped 5 s": lambda d: self._worker(d, signal.SIGSTOP),
            "dispatcher killed": lambda d: self._dispatcher(signal.SIGKILL),
            "dispatcher stopped 5 s": lambda d: self._dispatcher(signal.SIGSTOP),
            "template killed": lambda d: self._template(),
            "manager killed": self._manager,
            "system update": lambda d: self._update(),
            "block restarted": self._restart,
            "client vanishes": self._strangers.client_vanishes,
            "malformed messages": self._strangers.malformed,
            "slow reader": self._strangers.slow_reader,
            "flood and reset": lambda d: self._strangers.flood(),
            "CPU burners": lambda d: self._burn(),
            RESET: lambda d: self._network(lambda proxy: proxy.reset()),
            STALLED: lambda d: self._network(lambda proxy: proxy.hold(STALL_S)),
            POISONED: lambda d: self._poison(),
        }

    def inject(self, fault: Fault) -> Injected:
        """Do it now. What fails about it (an update in progress, say) is in the note."""
        self._struck_s, self._beside = self._clock(), ()
        try:
            tasks, note = self._do[fault.kind.name](fault.draw)
        except (BlockFlowError, ProcessLookupError) as e:
            tasks, note = (), f"not done: {e}"
        return Injected(self._struck_s, fault.kind.name, tuple(tasks), note, self._beside)

    def close(self) -> None:
        """End everything that faults have left running."""
        for timer in self._later:
            timer.join()
        for child in self._children:
            child.wait()
        self._strangers.close()

    # --- processes ------------------------------------------------------------------------------

    def _worker(self, draw: float, sig: signal.Signals) -> tuple[Sequence[str], str]:
        workers = self._victims(draw)
        if not workers:
            return (), "no worker is ready that has not died too often lately"
        self._signal(workers[0]["pid"], sig)
        return self._hit(workers[0])

    def _worker_at_work(self, draw: float) -> tuple[Sequence[str], str]:
        """The chosen one, or soon any one, in the middle of a forward."""
        workers = self._victims(draw)
        records = [AtWorkReader.open(self._system.run_dir, w["incarnation"]) for w in workers]
        begin = time.monotonic()
        while (waited := time.monotonic() - begin) < _AT_WORK_S:
            for worker, record in zip(workers, records, strict=True):
                if record is not None and record.read():
                    self._signal(worker["pid"], signal.SIGKILL)
                    return self._hit(worker)
                if waited < _FIRST_S:
                    break
        return (), "no worker was at work"

    def _victims(self, draw: float) -> list[dict[str, Any]]:
        """Workers to choose from, the chosen one first."""

        def spared(worker: Mapping[str, Any]) -> bool:
            return sum(c["age_s"] < _WINDOW_S for c in worker["crashes"]) >= _SPARED

        known = self._system.commands.workers()
        ready = [w for w in known if w["role"] == "active" and w["state"] == "ready"]
        workers = sorted(
            (w for w in ready if not spared(w)),
            key=lambda w: -min((c["age_s"] for c in w["crashes"]), default=float("inf")),
        )
        first = int(draw * len(workers))
        return workers[first:] + workers[:first]

    def _hit(self, victim: Mapping[str, Any]) -> tuple[Sequence[str], str]:
        """The tasks that lead through it, and its name."""
        blocks = {stage["block"] for stage in victim["stages"]}
        hit = [t for t, path in self._topology["tasks"].items() if blocks & set(path)]
        return hit, victim["name"]

    def _dispatcher(self, sig: signal.Signals) -> tuple[Sequence[str], str]:
        dispatcher = self._system.commands.worker("dispatcher")
        if dispatcher.get("state") != "ready":
            return (), "the dispatcher is not ready"
        self._signal(dispatcher["pid"], sig)
        return tuple(self._topology["tasks"]), ""

    def _template(self) -> tuple[Sequence[str], str]:
        pid = self._system.commands.template_pid()
        if not pid:
            return (), "there is no template"
        self._signal(pid, signal.SIGKILL)
        return tuple(self._topology["tasks"]), ""

    def _manager(self, draw: float) -> tuple[Sequence[str], str]:
        """Alone, in the middle of an update, or together with a worker, whose death it may have
        noticed; nobody else's requests have to notice it."""
        now = time.monotonic()
        self._managers = [at for at in self._managers if at > now - MANAGER_POLICY.window_s]
        if len(self._managers) >= MANAGER_POLICY.crashes - 2:
            return (), "not done: one more would make the guardian give up"
        before = self._system.commands.status()["manager"]
        tasks, note = tuple(self._topology["tasks"]), "alone"
        if draw < _IN_UPDATE:
            note = "in an update"
            self._update(wait=False)
        elif draw > 1 - _IN_UPDATE:
            hit, name = self._worker((1 - draw) / _IN_UPDATE, signal.SIGKILL)
            self._beside, note = tuple(hit), f"with {name}"
            time.sleep(_NOTICED_S * (1000 * draw % 1))
        begin = time.monotonic()
        self._managers.append(begin)
        self._signal(before["pid"], signal.SIGKILL)
        while time.monotonic() < begin + _TAKEN_OVER_S:
            found = self._system.commands.health()
            if found.get("manager", before)["restarts"] > before["restarts"]:
                took_s, count = time.monotonic() - begin, len(found["manager"]["adopted"])
                self.takeovers.append(Takeover(self._struck_s, took_s, count))
                return tasks, f"{note}: {count} taken over in {took_s:.2f} s"
            time.sleep(0.01)
        self.takeovers.append(Takeover(self._struck_s, float("inf"), 0))
        return tasks, f"{note}: nobody took over"

    def _signal(self, pid: int, sig: signal.Signals) -> None:
        """Ours are direct: the pid cannot be another process's while its entry says ready."""
        os.kill(pid, sig)
        self._struck_s = self._clock()
        if sig is signal.SIGSTOP:
            timer = threading.Timer(STOP_S, _continue, (pid,))
            timer.start()
            self._later.append(timer)

    # --- control --------------------------------------------------------------------------------

    def _update(self, *, wait: bool = True) -> tuple[Sequence[str], str]:
        self._larger = not self._larger
        known = self._topology["blocks"]
        blocks: list[dict[str, Any]] = [
            {"name": b} if isinstance(b, str) else dict(b) for b in known
        ]
        replicas = blocks[0].get("replicas", 1) + self._larger
        blocks[0]["replicas"] = replicas
        self._system.apply({**self._topology, "blocks": blocks}, wait=wait)
        return (), f"{blocks[0]['name']} x {replicas}"

    def _restart(self, draw: float) -> tuple[Sequence[str], str]:
        names = [b if isinstance(b, str) else b["name"] for b in self._topology["blocks"]]
        block = names[int(draw * len(names))]
        self._system.commands.operate(UpdateKind.RESTART, block)
        return (), block

    def _poison(self) -> tuple[Sequence[str], str]:
        """A request that kills two workers of a block of its own, unless these have died so often
        that it would be given up."""
        if self._poison_request is None:
            return (), "not done: nobody sends it"
        fragile = [
            w
            for w in self._system.commands.workers()
            if any(stage["block"] == FRAGILE for stage in w["stages"])
        ]
        crashes = [sum(c["age_s"] < _WINDOW_S for c in w["crashes"]) for w in fragile]
        if not fragile or max(crashes) > _SPARED - 2:
            return (), "not done: its workers have died too often lately"
        return (FRAGILE,), f"its outcome is {self._poison_request()}"

    # --- the machine ----------------------------------------------------------------------------

    def _network(self, fault: Callable[[Proxy], int]) -> tuple[Sequence[str], str]:
        if self._proxy is None:
            return (), "not done: nobody is far"
        return (), f"{fault(self._proxy)} connections"

    def _burn(self) -> tuple[Sequence[str], str]:
        count = _BURNERS_PER_CORE * len(os.sched_getaffinity(0))
        code = _BURN.format(s=BURN_S)
        for _ in range(count):
            self._children.append(subprocess.Popen([sys.executable, "-c", code]))
        return (), f"{count} for {BURN_S:g} s"


def _continue(pid: int) -> None:
    """Wake a stopped process, if supervision has not replaced it meanwhile."""
    with suppress(ProcessLookupError):
        os.kill(pid, signal.SIGCONT)


def wait_healthy(system: RemoteSystem, timeout_s: float) -> float | None:
    """Seconds until everything is ready, None = not in time."""
    begin = time.monotonic()
    while not _is_ready(system):
        if time.monotonic() - begin > timeout_s:
            return None
        time.sleep(0.02)
    return time.monotonic() - begin


def _is_ready(system: RemoteSystem) -> bool:
    try:
        return bool(system.commands.health()["ready"])
    except BlockFlowError:  # it is too busy to say
        return False
