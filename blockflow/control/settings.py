"""Settings of one control plane: addresses, folders, time-outs. Defaults serve one machine well."""

from __future__ import annotations

import os
from dataclasses import dataclass, field, fields, replace
from ipaddress import ip_address
from pathlib import Path
from typing import Any

from blockflow.core.errors import RequestError, SystemError_
from blockflow.core.text import has_half
from blockflow.launch.cgroup import available_cores
from blockflow.launch.whereabouts import lasting
from blockflow.tensormq.janitor import ROOT_ENV, run_root

DEFAULT_HOST = "127.0.0.1"
DEFAULT_REST_PORT = 5780
DEFAULT_CLIENT_PORT = 5755

_TOLD = ("repository", "state_dir", "run_root", "keys")
"""Paths that processes and REST's callers are told."""


def default_state_dir() -> Path:
    """``$XDG_STATE_HOME/blockflow``, by default ``~/.local/state/blockflow``.

    Raises:
        SystemError_: STATE_UNUSABLE: this user has no home.
    """
    return _own("XDG_STATE_HOME", ".local/state") / "blockflow"


def default_keys() -> Path:
    """``$XDG_CONFIG_HOME/blockflow/keys``, by default ``~/.config/blockflow/keys``. Raises as
    :func:`default_state_dir`."""
    return _own("XDG_CONFIG_HOME", ".config") / "blockflow" / "keys"


def _own(variable: str, below_home: str) -> Path:
    base = os.environ.get(variable, "")
    if base.startswith("/"):
        return Path(base)
    try:
        return Path.home() / below_home
    except RuntimeError:  # a number that no user has, as in some containers, and no HOME
        raise SystemError_(
            "STATE_UNUSABLE",
            "this user has no home directory",
            hint=f"set HOME or {variable}, or name the folder (--state-dir, --keys)",
        ) from None


def bare(host: str) -> str:
    """``host`` without the brackets that an IPv6 address may stand in."""
    return host[1:-1] if host.startswith("[") and host.endswith("]") else host


def with_port(host: str, port: int) -> str:
    """``host:port``, as addresses have it: IPv6 in brackets, for its colons are no port's."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def is_address(host: str) -> bool:
    """Whether it is a number, not a name."""
    try:
        ip_address(bare(host))
    except ValueError:
        return False
    return True


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach what listens there. Other names are not looked up."""
    return host == "localhost" or (is_address(host) and ip_address(bare(host)).is_loopback)


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
        beat: period of the looks at all processes; one that is stopped so long is replaced.
        silence: how long a process may leave a ping unanswered while all of it sleeps, until it is
            replaced. With ``health`` and the looks between it is noticed within a second.
        hang: how long its main loop may, while its control thread answers.
        grace: how long a shutdown waits for requests in flight.
    """

    start: float = 120.0
    stop: float = 5.0
    ack: float = 2.0
    flip: float = 10.0
    drain: float = 65.0
    ping: float = 1.0
    health: float = 0.25
    beat: float = 0.25
    silence: float = 0.45
    hang: float = 1.5
    grace: float = 2.0


@dataclass(frozen=True, slots=True)
class ControlSettings:
    """What ``blockflow up`` may be told.

    ``cores`` may be :class:`~blockflow.core.cores.Cores`, which say how many may be busy at once.
    Ports may be 0: any free one, announced when ready. ``max_inflight`` are the Dispatcher's
    credits; with ``adaptive_limit`` fewer are given out where requests queue. ``host`` is where
    REST listens, ``client_host`` where clients do (IPv6 addresses lose brackets that they are given
    in); beyond loopback both need ``keys``, the folder of CURVE keys, and a token. ``token_file``
    is by default the one in that folder, else there is none. ``names`` are further names of this
    machine that REST answers to. ``rest_cert`` and ``rest_key`` (PEM files) make it HTTPS; beyond
    loopback that is a must unless ``rest_plain``. ``plain_links`` leaves the tcp links between this
    instance's own processes open to whoever is on this machine, as measurements beside bare
    messages need it; they are closed by a key otherwise. ``dispatcher_arena_bytes`` bounds the
    inputs that it keeps; memory is committed only as it is used. ``result_memory_bytes`` bounds the
    replies that it keeps for clients that may ask again (0 = off).
    """

    repository: Path = Path("blocks")
    state_dir: Path = field(default_factory=default_state_dir)
    run_root: Path = field(default_factory=run_root)
    host: str = DEFAULT_HOST
    client_host: str = DEFAULT_HOST
    rest_port: int = DEFAULT_REST_PORT
    client_port: int = DEFAULT_CLIENT_PORT
    cores: tuple[int, ...] = field(default_factory=available_cores)
    monitor_hz: float = 4.0
    max_inflight: int = 256
    max_inflight_per_client: int = 256
    adaptive_limit: bool = True
    dispatcher_arena_bytes: int = 512 * 1024 * 1024
    dispatcher_slots: int = 512
    result_memory_bytes: int = 32 * 1024 * 1024
    token_file: Path | None = None
    keys: Path | None = None
    names: tuple[str, ...] = ()
    rest_cert: Path | None = None
    rest_key: Path | None = None
    rest_plain: bool = False
    plain_links: bool = False
    timing: Timing = Timing()

    def lasting(self) -> ControlSettings:
        """The same with all paths from the root: other processes get these, and what becomes of the
        working directory must not matter.

        Raises:
            FileNotFoundError: one is relative, and the working directory is gone.
            RequestError: INVALID_REQUEST: one of those that others are told is not UTF-8, which
                messages and answers are.
        """
        known = {f.name: getattr(self, f.name) for f in fields(self)}
        paths: dict[str, Any] = {n: lasting(p) for n, p in known.items() if isinstance(p, Path)}
        for name in _TOLD:
            if has_half(path := str(paths.get(name, ""))):
                raise RequestError(
                    "INVALID_REQUEST",
                    f"the path {path!r} is not UTF-8",
                    where=ROOT_ENV if name == "run_root" else f"--{name.replace('_', '-')}",
                    hint="rename the folder, or name it by a link in a folder whose name is; if "
                    "it is, set PYTHONUTF8=1 or a locale of UTF-8",
                )
        return replace(self, **paths)

    def __post_init__(self) -> None:
        object.__setattr__(self, "host", bare(self.host))
        object.__setattr__(self, "client_host", bare(self.client_host))
