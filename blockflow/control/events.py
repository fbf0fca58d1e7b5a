"""What the Manager's pure core is told, and what it wants done.

Events go in with the time, instructions come out; processes, sockets and files are the shell's.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from blockflow.core.errors import BlockFlowError
from blockflow.wire.control import ControlMessage

# --- events -------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Launched:
    """The process exists."""

    incarnation: int
    pid: int


@dataclass(frozen=True, slots=True)
class LaunchFailed:
    """No process came to be."""

    incarnation: int
    error: BlockFlowError


@dataclass(frozen=True, slots=True)
class Received:
    """A control message whose sender is proven by its socket identity."""

    incarnation: int
    message: ControlMessage


@dataclass(frozen=True, slots=True)
class Exited:
    """The process is dead and reaped. ``status``: exit status, or minus the signal's number;
    ``log_tail``: its last log lines."""

    incarnation: int
    status: int
    log_tail: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Committed:
    """The new epoch is on disk."""

    update_id: int


@dataclass(frozen=True, slots=True)
class CommitFailed:
    """The new epoch could not be stored; the old one is still the stored one."""

    update_id: int
    error: BlockFlowError


Event = Launched | LaunchFailed | Received | Exited | Committed | CommitFailed

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
class Kill:
    """SIGKILL: it did not stop by itself."""

    incarnation: int


@dataclass(frozen=True, slots=True)
class Commit:
    """Store the epoch; answered by Committed or CommitFailed."""

    update_id: int
    epoch: int
    posted: Mapping[str, Any]
    topology: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Finished:
    """The update reached a final state; whoever waits for it may be told."""

    update_id: int


@dataclass(frozen=True, slots=True)
class AllGone:
    """After a shutdown: no process is left."""


Instruction = Launch | Send | Kill | Commit | Finished | AllGone
