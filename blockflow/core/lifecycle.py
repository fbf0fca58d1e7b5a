"""The life of a replica as one transition table; the docs' diagram is drawn from it.

Phases of the thesis (section 3.6.1): startup = LAUNCHING, LOADING and PROVING, running = READY and
DRAINING, termination = STOPPING.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum


class State(StrEnum):
    LAUNCHING = "launching"
    LOADING = "loading"
    PROVING = "proving"
    READY = "ready"
    DRAINING = "draining"
    STOPPING = "stopping"
    STOPPED = "stopped"
    FAILED = "failed"


class Event(StrEnum):
    HELLO = "hello"
    LOADED = "loaded"
    PROVED = "proved"
    START_FAILED = "start-failed"
    DRAIN = "drain"
    UNDRAIN = "undrain"
    STOP = "stop"
    EXITED = "exited"


S, E = State, Event

TABLE: Mapping[tuple[State, Event], State] = {
    (S.LAUNCHING, E.HELLO): S.LOADING,
    (S.LAUNCHING, E.STOP): S.STOPPING,
    (S.LAUNCHING, E.EXITED): S.FAILED,
    (S.LOADING, E.LOADED): S.PROVING,
    (S.LOADING, E.START_FAILED): S.FAILED,
    (S.LOADING, E.STOP): S.STOPPING,
    (S.LOADING, E.EXITED): S.FAILED,
    (S.PROVING, E.PROVED): S.READY,
    (S.PROVING, E.START_FAILED): S.FAILED,
    (S.PROVING, E.STOP): S.STOPPING,
    (S.PROVING, E.EXITED): S.FAILED,
    (S.READY, E.DRAIN): S.DRAINING,
    (S.READY, E.STOP): S.STOPPING,
    (S.READY, E.EXITED): S.FAILED,
    (S.DRAINING, E.UNDRAIN): S.READY,
    (S.DRAINING, E.STOP): S.STOPPING,
    (S.DRAINING, E.EXITED): S.FAILED,
    (S.STOPPING, E.EXITED): S.STOPPED,
    # What a process sent before it learned that it shall stop still arrives.
    (S.STOPPING, E.HELLO): S.STOPPING,
    (S.STOPPING, E.LOADED): S.STOPPING,
    (S.STOPPING, E.PROVED): S.STOPPING,
    (S.STOPPING, E.START_FAILED): S.STOPPING,
    (S.STOPPING, E.STOP): S.STOPPING,
    (S.FAILED, E.STOP): S.FAILED,
    (S.FAILED, E.EXITED): S.FAILED,
}

FINAL = frozenset({State.STOPPED, State.FAILED})


class IllegalTransition(RuntimeError):
    """A defect in BlockFlow: the event cannot happen in this state."""


def advance(state: State, event: Event) -> State:
    """The next state.

    Raises:
        IllegalTransition: the table has no such move.
    """
    try:
        return TABLE[(state, event)]
    except KeyError:
        raise IllegalTransition(f"{event} in state {state}") from None


def diagram() -> str:
    """The table as a mermaid state diagram (self-loops left out)."""
    lines = ["stateDiagram-v2", "    [*] --> launching"]
    lines += [f"    {a} --> {b}: {e}" for (a, e), b in TABLE.items() if a != b]
    lines += [f"    {s} --> [*]" for s in sorted(FINAL)]
    return "\n".join(lines)
