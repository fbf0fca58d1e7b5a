"""Settings of one control plane: addresses, folders, time-outs. Defaults serve one machine well."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from pathlib import Path

DEFAULT_HOST = "127.0.0.1"
DEFAULT_REST_PORT = 5780
DEFAULT_CLIENT_PORT = 5755

_LOOPBACK = frozenset({"127.0.0.1", "::1", "localhost"})


def default_state_dir() -> Path:
    """``$XDG_STATE_HOME/blockflow``, by default ``~/.local/state/blockflow``."""
    base = os.environ.get("XDG_STATE_HOME", "")
    return (Path(base) if base.startswith("/") else Path.home() / ".local" / "state") / "blockflow"


def default_run_root() -> Path:
    """Where run directories lie: ``$BLOCKFLOW_RUN_ROOT`` or ``/dev/shm/blockflow-<uid>``."""
    return Path(os.environ.get("BLOCKFLOW_RUN_ROOT") or f"/dev/shm/blockflow-{os.getuid()}")


def is_loopback(host: str) -> bool:
    return host in _LOOPBACK


def available_cores() -> tuple[int, ...]:
    """The cpu numbers that this process may use."""
    return tuple(sorted(os.sched_getaffinity(0)))


@dataclass(frozen=True, slots=True)
class Timing:
    """Time-outs and periods in seconds.

    Attributes:
        start: a worker must be Ready this long after its launch.
        stop: a process must exit this long after Stop, then it is killed.
        ack: how long a worker's answer to new routes is waited for before the flip goes on.
        flip: how long the Dispatcher's answer is; then it counts as hung and is replaced.
        drain: how long requests on the old routes may take before their workers stop anyway.
        ping: how long a Pong is waited for.
        health: period of the pings to all processes.
        grace: how long a shutdown waits for requests in flight.
    """

    start: float = 120.0
    stop: float = 5.0
    ack: float = 2.0
    flip: float = 10.0
    drain: float = 65.0
    ping: float = 1.0
    health: float = 2.0
    grace: float = 2.0


@dataclass(frozen=True, slots=True)
class ControlSettings:
    """What ``blockflow up`` may be told.

    Ports may be 0: any free one, announced when ready. ``max_inflight`` are the Dispatcher's
    credits. ``dispatcher_arena_bytes`` bounds the inputs that it keeps; memory is committed only as
    it is used.
    """

    repository: Path = Path("blocks")
    state_dir: Path = field(default_factory=default_state_dir)
    run_root: Path = field(default_factory=default_run_root)
    host: str = DEFAULT_HOST
    rest_port: int = DEFAULT_REST_PORT
    client_port: int = DEFAULT_CLIENT_PORT
    cores: tuple[int, ...] = field(default_factory=available_cores)
    monitor_hz: float = 4.0
    max_inflight: int = 256
    max_inflight_per_client: int = 256
    dispatcher_arena_bytes: int = 512 * 1024 * 1024
    dispatcher_slots: int = 512
    token_file: Path | None = None
    timing: Timing = Timing()
