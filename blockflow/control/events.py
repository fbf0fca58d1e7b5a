"""What the Manager's pure core is told, and what it wants done.

Events go in with the time, instructions come out; processes, sockets and files are the shell's.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from blockflow.core.errors import BlockFlowError
from blockflow.core.model import BlockInfo
from blockflow.tensormq.atwork import Work
from blockflow.wire.control import ControlMessage

# --- events -------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Launched:
    """The process exists. ``started``: when (:func:`blockflow.launch.process.start_time`)."""

    incarnation: int
    pid: int
    started: int = 0


@dataclass(frozen=True, slots=True)
class LaunchFailed:
    """No process came to be."""

    incarnation: int
    error: BlockFlowError


@dataclass(frozen=True, slots=True)
class Received:
    """A control message whose sender is proven by its socket identity. ``read_ns``: when it was
    read from the socket (monotonic); the mailbox may have kept it since."""

    incarnation: int
    message: ControlMessage
    read_ns: int = 0


@dataclass(frozen=True, slots=True)
class Exited:
    """The process is dead and reaped. ``status``: exit status, or minus the signal's number;
    ``log_tail``: its last log lines; ``work``: the forwards that it died in."""

    incarnation: int
    status: int
    log_tail: tuple[str, ...] = ()
    work: tuple[Work, ...] = ()


@dataclass(frozen=True, slots=True)
class Proved:
    """A worker's readiness probe came back, or ``error`` says what is wrong with it."""

    incarnation: int
    error: BlockFlowError | None
    took_ms: float


@dataclass(frozen=True, slots=True)
class Committed:
    """The new epoch is on disk."""

    update_id: int


@dataclass(frozen=True, slots=True)
class CommitFailed:
    """The new epoch could not be stored; the old one is still the stored one."""

    update_id: int
    error: BlockFlowError


Event = Launched | LaunchFailed | Received | Exited | Proved | Committed | CommitFailed

# --- instructions -------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Launch:
    """Start a process: ``entry`` is ``module:function``, ``spec`` its birth certificate."""

    incarnation: int
    role: str
    name: str
    entry: str
    spec: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Send:
    incarnation: int
    message: ControlMessage


@dataclass(frozen=True, slots=True)
class Prove:
    """Send a probe through each of a worker's blocks (stage, block); answered by Proved."""

    incarnation: int
    endpoint: str
    mode: str
    blocks: tuple[tuple[int, BlockInfo], ...]


@dataclass(frozen=True, slots=True)
class Kill:
    """SIGKILL: it did not stop by itself, or it hangs."""

    incarnation: int


@dataclass(frozen=True, slots=True)
class Begun:
    """An update to ``epoch`` is under way: a note for whoever finds this control plane dead."""

    update_id: int
    epoch: int


@dataclass(frozen=True, slots=True)
class Commit:
    """Store the epoch; answered by Committed or CommitFailed. ``digests`` pin the artifacts by
    block of the repository, ``how`` is the kind of the update."""

    update_id: int
    epoch: int
    posted: Mapping[str, Any]
    topology: Mapping[str, Any]
    digests: Mapping[str, str]
    how: str


@dataclass(frozen=True, slots=True)
class Finished:
    """The update reached a final state; whoever waits for it may be told."""

    update_id: int


@dataclass(frozen=True, slots=True)
class AllGone:
    """After a shutdown: no process is left."""


Instruction = Launch | Send | Prove | Kill | Begun | Commit | Finished | AllGone
