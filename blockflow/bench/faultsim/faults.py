"""Faults: what is done to a world, by kind and by chance."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from blockflow.bench.faultsim.plant import Design, renewed, varied
from blockflow.bench.faultsim.process import Hang, SimProcess
from blockflow.control.brain import Brain
from blockflow.control.update import Kind

if TYPE_CHECKING:
    from blockflow.bench.faultsim.worker import SimWorker
    from blockflow.bench.faultsim.world import World

_MS = 1_000_000
_SECOND = 1000 * _MS
_WEIGHTS = {
    "kill idle": 2,
    "kill at work": 3,
    "kill loading": 1,
    "kill after output": 2,
    "kill dispatcher": 1,
    "stop": 2,
    "silence": 1,
    "deafness": 1,
    "stuck forward": 2,
    "manager late": 2,
    "manager dies": 2,
    "late messages": 2,
    "killed while late": 2,
    "lost message": 1,
    "doubled message": 2,
    "full queue": 2,
    "client gone": 2,
    "connection reset": 2,
    "poison": 2,
    "update": 2,
    "update fails": 1,
    "disk full": 1,
    "restart": 1,
    "drain": 1,
    "block stopped": 1,
}
KINDS = tuple(_WEIGHTS)
DESIGN = "design"
"""Key of a posted body: the number of what it asks for."""


class Faults:
    """The faults of a run."""

    def __init__(self, world: World, kinds: Sequence[str] = KINDS) -> None:
        self._world = world
        self._kinds = kinds
        self._weights = [_WEIGHTS[k] for k in kinds]
        self._poisons = 0
        self._load_failures = 0
        self._after_output: str | None = None
        self.done: Counter[str] = Counter()
        self._acts: dict[str, Callable[[int], bool]] = {
            "kill idle": lambda now: self._kill(self._idle()),
            "kill at work": lambda now: self._kill(self._at_work()),
            "kill loading": self._kill_loading,
            "kill after output": self._kill_after_output,
            "kill dispatcher": lambda now: self._kill([d] if (d := world.dispatcher) else []),
            "stop": self._stop,
            "silence": lambda now: self._seize(Hang.SILENT),
            "deafness": lambda now: self._seize(Hang.DEAF),
            "stuck forward": self._stick,
            "manager late": self._manager_late,
            "manager dies": self._manager_dies,
            "late messages": self._late_messages,
            "killed while late": self._kill_while_late,
            "lost message": self._lose,
            "doubled message": self._double,
            "full queue": self._fill_queue,
            "client gone": self._client_gone,
            "connection reset": self._reset,
            "poison": self._poison,
            "update": self._update,
            "update fails": self._update_fails,
            "disk full": self._disk_full,
            "restart": self._restart,
            "drain": self._drain,
            "block stopped": self._stop_block,
        }

    def plan(self, now: int, length_ns: int) -> None:
        """Draw an episode's faults."""
        rng = self._world.rng
        for kind in rng.choices(self._kinds, self._weights, k=rng.randint(1, 6)):
            self._world.loop.plan(now + rng.randrange(length_ns * 9 // 10), self._happen, kind)

    def end(self) -> None:
        """What was announced and has not happened does not happen any more."""
        self._poisons = self._load_failures = 0
        self._after_output = None
        self._world.manager.spare()
        self._world.network.lose_next = self._world.network.double_next = 0
        self._world.network.make_room()

    def _happen(self, now: int, kind: str) -> None:
        if self._acts[kind](now):
            self.done[kind] += 1
            self._world.note(f"fault: {kind}")

    # --- asked by those that it concerns

    def poison(self) -> str:
        """The block whose workers the next request kills; '' = none."""
        if not self._poisons:
            return ""
        self._poisons -= 1
        return self._block()

    def load_fails(self) -> bool:
        """Whether the worker that loads now cannot."""
        if not self._load_failures:
            return False
        self._load_failures -= 1
        return True

    def after_output(self, worker: SimWorker) -> bool:
        """Whether the worker that has just sent a result is killed."""
        if self._after_output != worker.block:
            return False
        self._after_output = None
        return True

    # --- processes

    def _ready(self) -> list[SimWorker]:
        return [w for w in self._world.workers if w.ready]

    def _idle(self) -> list[SimWorker]:
        return [w for w in self._ready() if not w.work()]

    def _at_work(self) -> list[SimWorker]:
        return [w for w in self._ready() if w.work()]

    def _kill(self, candidates: Sequence[SimProcess]) -> bool:
        if not candidates:
            return False
        self._world.rng.choice(candidates).die(-9)
        return True

    def _kill_loading(self, now: int) -> bool:
        """A worker, and then the one that loads in its place."""
        rng = self._world.rng
        if not self._kill(self._ready()):
            return False

        def again(at: int, _: object) -> None:
            self._kill([w for w in self._world.workers if not w.ready])

        self._world.loop.plan(now + rng.randint(120 * _MS, 600 * _MS), again)
        return True

    def _kill_after_output(self, now: int) -> bool:
        self._after_output = self._block()
        return True

    def _victim(self) -> SimProcess | None:
        """A process that serves."""
        dispatcher = self._world.dispatcher
        found: list[SimProcess] = [w for w in self._ready() if w.hang is Hang.NO]
        if dispatcher is not None and dispatcher.well:
            found.append(dispatcher)
        return self._world.rng.choice(found) if found else None

    def _seize(self, how: Hang) -> bool:
        victim = self._victim()
        if victim is None:
            return False
        self._world.note(f"{victim.name} ({victim.incarnation}): {how}")
        victim.seize(how)
        return True

    def _stop(self, now: int) -> bool:
        """SIGSTOP; for some SIGCONT follows, before or after anybody notices."""
        victim = self._victim()
        if victim is None:
            return False
        victim.seize(Hang.STOPPED)
        rng = self._world.rng
        if rng.random() < 0.7:

            def go_on(at: int, _: object) -> None:
                if victim.alive:
                    victim.resume(at)

            self._world.loop.plan(now + rng.randint(10 * _MS, 2 * _SECOND), go_on)
        return True

    def _stick(self, now: int) -> bool:
        found = [w for w in self._at_work() if w.hang is Hang.NO and not w.stuck]
        if not found:
            return False
        self._world.rng.choice(found).stuck = True
        return True

    def _manager_late(self, now: int) -> bool:
        self._world.manager.be_late(now, now + self._world.rng.randint(100 * _MS, 4 * _SECOND))
        return True

    def _manager_dies(self, now: int) -> bool:
        """By itself, or with somebody whose death it has just seen."""
        if self._world.manager.away:
            return False
        self._world.manager.doom(now)
        if self._world.rng.random() < 0.5:
            self._kill(self._ready())
        return True

    # --- messages and clients

    def _late_messages(self, now: int) -> bool:
        return self._for_a_while(self._world.network.delay, now)

    def _kill_while_late(self, now: int) -> bool:
        """What a request's earlier attempt has left behind comes when the next one is under way."""
        found = [w for w in self._at_work() if w.hang is Hang.NO]
        if len(found) < 2:
            return False
        rng = self._world.rng
        slow, victim = rng.sample(found, 2)
        self._world.network.delay(slow.incarnation, now + rng.randint(300 * _MS, 1500 * _MS))

        def kill(at: int, _: object) -> None:
            victim.die(-9)

        self._world.loop.plan(now + rng.randint(_MS, 30 * _MS), kill)
        return True

    def _lose(self, now: int) -> bool:
        self._world.network.lose_next += 1
        return True

    def _double(self, now: int) -> bool:
        self._world.network.double_next += self._world.rng.randint(1, 3)
        return True

    def _fill_queue(self, now: int) -> bool:
        """Who reads too slowly is sent nothing for a while."""
        return self._for_a_while(self._world.network.fill, now)

    def _for_a_while(self, order: Callable[[int, int], None], now: int) -> bool:
        """``order`` takes an incarnation, and until when."""
        victim = self._victim()
        if victim is None:
            return False
        # Not so long that its answers to pings could be missed: that is what a hang looks like.
        order(victim.incarnation, now + self._world.rng.randint(_MS, 900 * _MS))
        return True

    def _client_gone(self, now: int) -> bool:
        self._world.clients.leave(self._world.clients.some(), now)
        return True

    def _reset(self, now: int) -> bool:
        self._world.clients.reset(self._world.clients.some(), now)
        return True

    def _poison(self, now: int) -> bool:
        self._poisons += self._world.rng.randint(1, 2)
        return True

    # --- operators

    def _command(self, now: int, command: Callable[[Brain, int], object]) -> bool:
        manager = self._world.manager
        if manager.away or manager.brain.runner.current is not None:
            return False
        manager.call(now, command)
        return True

    def _post(self, now: int, design: Design) -> bool:
        plant = self._world.plant
        number = plant.add(design)
        topology = plant.topology(number)
        return self._command(now, lambda brain, at: brain.apply(topology, {DESIGN: number}, at))

    def _update(self, now: int) -> bool:
        return self._post(now, varied(self._world.design, self._world.rng))

    def _update_fails(self, now: int) -> bool:
        self._load_failures = 1
        return self._post(now, renewed(self._world.design))

    def _disk_full(self, now: int) -> bool:
        self._world.manager.disk_full = True
        return self._update(now)

    def _block(self) -> str:
        return self._world.rng.choice(self._world.design.blocks)

    def _restart(self, now: int) -> bool:
        block = self._block()
        return self._command(now, lambda brain, at: brain.restart(block, at))

    def _drain(self, now: int) -> bool:
        block = self._block()
        self._later(now, lambda brain, at: brain.close(block, Kind.UNDRAIN, at))
        return self._command(now, lambda brain, at: brain.close(block, Kind.DRAIN, at))

    def _stop_block(self, now: int) -> bool:
        block = self._block()
        self._later(now, lambda brain, at: brain.restart(block, at))
        return self._command(now, lambda brain, at: brain.close(block, Kind.STOP, at))

    def _later(self, now: int, command: Callable[[Brain, int], object]) -> None:
        """An operator's second thought."""
        world = self._world

        def call(at: int, _: object) -> None:
            world.manager.call(at, command)

        world.loop.plan(now + world.rng.randint(_MS, 3 * _SECOND), call)
