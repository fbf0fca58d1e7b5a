"""SimProcess: what a worker and the Dispatcher have in common: they live, hang, answer and die."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from enum import StrEnum
from typing import TYPE_CHECKING, Any

from blockflow import __version__
from blockflow.control.events import Launch
from blockflow.core.errors import BlockFlowError
from blockflow.launch.vitals import Vitals
from blockflow.tensormq.atwork import Work
from blockflow.tensormq.push import Unsent
from blockflow.wire.control import ControlMessage, Hello, Ping, Pong
from blockflow.wire.data import Data, Failure, Withdraw

if TYPE_CHECKING:
    from blockflow.bench.faultsim.world import World

Message = Data | Failure | Withdraw
"""A data message as its receiver reads it."""

_BUSY_CPU = 0.25
"""Of a core, on average, for a process that is well."""


class Hang(StrEnum):
    """How a process hangs."""

    NO = ""
    STOPPED = "stopped"
    SILENT = "silent"
    DEAF = "deaf"


class Links:
    """Sending sides of one process, as :class:`~blockflow.tensormq.push.PushCache` has them.

    What is sent to a dead process waits for a connection that never comes; whoever drops the
    endpoint gets it back. A queue without room takes nothing.
    """

    def __init__(self, world: World, incarnation: int) -> None:
        self._world = world
        self._incarnation = incarnation
        self._pending: dict[str, list[Unsent]] = {}

    def send(self, endpoint: str, frames: Sequence[Any], tag: Any = None) -> bool:
        message = [bytes(getattr(f, "buffer", f)) for f in frames]
        if self._world.refused(self._incarnation, endpoint, message):
            return False
        if not self._world.carry(self._incarnation, endpoint, message):
            self._pending.setdefault(endpoint, []).append(Unsent(endpoint, frames, tag))
        return True

    def drop(self, endpoint: str) -> list[Unsent]:
        """The process there is dead."""
        return self._pending.pop(endpoint, [])

    def retain(self, endpoints: set[str]) -> list[Unsent]:
        """Nobody else will be sent to."""
        gone = [e for e in self._pending if e not in endpoints]
        return [message for e in gone for message in self._pending.pop(e)]


class SimProcess(ABC):
    """A process under virtual time.

    Attributes:
        alive: it has not ended; ``ready``: it has loaded. hang: how it hangs.
        endpoint: where it takes data. resumed_ns: when it last went on.
    """

    def __init__(self, world: World, order: Launch) -> None:
        self.world = world
        self.name = order.name
        self.role = order.role
        self.spec = order.spec
        self.incarnation = order.incarnation
        self.endpoint = f"ipc:///sim/{order.incarnation}"
        self.alive = True
        self.ready = False
        self.hang = Hang.NO
        self.resumed_ns = 0
        self._held: list[tuple[Callable[[int, Any], None], Any]] = []
        self._heard = 0
        self._born_ns = world.now
        self._cpu_ns = 0

    # --- for the Manager

    def tell(self, message: ControlMessage) -> None:
        """To the control plane."""
        self.world.network.send(
            self.incarnation, 0, self.world.manager.hear, (self.incarnation, message)
        )

    def hello(self) -> None:
        self.tell(Hello(self.role, self.name, self.incarnation, self.incarnation, __version__))

    def control(self, now: int, message: ControlMessage) -> None:
        """A message of the control plane; pings are answered beside the main loop."""
        if not self.alive:
            return
        if isinstance(message, Ping) and self.hang is Hang.DEAF:
            self.tell(Pong(self.incarnation, message.seq, "ready", self._heard))
        elif self.hang is not Hang.NO:
            self._held.append((self.control, message))
        elif isinstance(message, Ping):
            self._heard = message.seq
            self.tell(Pong(self.incarnation, message.seq, "ready", self._heard))
        else:
            self.obey(now, message)

    @abstractmethod
    def obey(self, now: int, message: ControlMessage) -> None:
        """What the main loop does with a control message."""

    def vitals(self, now: int) -> Vitals:
        """What the kernel says of it."""
        if self.hang is Hang.NO:
            self._cpu_ns = int((now - self._born_ns) * _BUSY_CPU)
        state = "T" if self.hang is Hang.STOPPED else "S"
        return Vitals(state, self._cpu_ns, self._cpu_ns, self.hang is Hang.NO and self.eager())

    def eager(self) -> bool:
        """Whether some thread of it computes."""
        return False

    def work(self) -> tuple[Work, ...]:
        """The forwards under way: all that is known of them once it is dead."""
        return ()

    def probe(self) -> BlockFlowError | None:
        """What a readiness probe meets."""
        return None

    # --- what happens to it

    def when_well(self, now: int, call: Callable[[int, Any], None], arg: Any) -> bool:
        """Whether the main loop runs; if it hangs, ``call`` follows when it goes on."""
        if not self.alive:
            return False
        if self.hang is Hang.NO:
            return True
        self._held.append((call, arg))
        return False

    def seize(self, how: Hang) -> None:
        """It hangs from now on."""
        if self.alive and self.hang is Hang.NO:
            self.hang = how

    def resume(self, now: int) -> None:
        """It goes on, with everything that came meanwhile."""
        self.hang = Hang.NO
        self.resumed_ns = now
        held, self._held = self._held, []
        for call, arg in held:
            call(now, arg)

    def die(self, status: int) -> None:
        """It ends. The control plane is told by the kernel."""
        if self.alive:
            work = self.work()
            self.alive = False
            self._held.clear()
            self.world.died(self, status, work)
