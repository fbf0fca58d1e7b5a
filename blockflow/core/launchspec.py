"""What a process needs to know to become a worker or the Dispatcher.

The Controller makes it, a Launcher carries it (as plain JSON values), the new process reads it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any

from blockflow.core.engines import loaders
from blockflow.core.model import BlockInfo


@dataclass(frozen=True, slots=True)
class StageSpec:
    """One block in a worker.

    ``policy`` is the batching policy with its options, ``engine`` a registered engine or ``auto``,
    ``timeout_ms`` bounds one forward (0 = no bound), ``max_rows`` one batch. ``profile`` is a
    :meth:`~blockflow.core.profile.StageProfile.to_dict` of this block under this engine on this
    machine; None where the repository holds no fresh one. ``threads`` are the intra-op threads that
    its policy predicts for; None: those that the worker starts with.
    """

    stage: int
    block: BlockInfo
    engine: str = "auto"
    precision: str = "fp32"
    policy: Mapping[str, Any] = field(default_factory=lambda: {"policy": "none"})
    options: Mapping[str, Any] = field(default_factory=dict)
    max_rows: int = 32
    timeout_ms: int = 0
    profile: Mapping[str, Any] | None = None
    threads: int | None = None

    def to_dict(self) -> dict[str, Any]:
        facts = {f.name: getattr(self, f.name) for f in fields(self)}
        return {**facts, "block": self.block.to_dict()}

    @classmethod
    def from_dict(cls, d: Mapping[str, Any]) -> StageSpec:
        return cls(**{**d, "block": BlockInfo.from_dict(d["block"])})


@dataclass(frozen=True, slots=True)
class WorkerLaunch:
    """A worker's birth certificate.

    Attributes:
        name: of the replica (``trunk1#0``).
        incarnation: issued by the Controller, never reused; names the arena and the sockets.
        stages: the blocks it hosts.
        repository: folder of the block repository.
        run_dir: private 0700 folder of this instance: sockets and arenas.
        controller: address of the Controller's ROUTER.
        transport: ``ipc`` or ``tcp`` for its data socket.
        mode: ``tensormq`` or ``zeromq`` for what it sends.
        device: ``cpu`` or ``cuda:N``.
        threads: intra-op threads of a forward.
        cores: cpu numbers it may run on.
        arena_bytes: capacity of its arena (0 = none is made).
        slots: how many tensors may be out at once.
        monitor_hz: KPI samples per second, 0 = off.
        log_path: file that gets stderr and the log, '' = inherited.
        lanes: forwards that it may compute at once.
        modules: what its blocks' loaders import beside what every worker does.
        shared_weights: its replicas hold their weights once, where their engines can.
    """

    name: str
    incarnation: int
    stages: tuple[StageSpec, ...]
    repository: str
    run_dir: str
    controller: str
    transport: str
    mode: str
    device: str
    threads: int
    cores: tuple[int, ...]
    arena_bytes: int
    slots: int
    monitor_hz: float = 4.0
    log_path: str = ""
    lanes: int = 1
    modules: tuple[str, ...] = ()
    shared_weights: bool = False

    @property
    def loaders(self) -> set[str]:
        """What its blocks may come to be loaded with."""
        return {x for s in self.stages for x in loaders(s.block, s.engine, self.device)}

    def to_dict(self) -> dict[str, Any]:
        d: dict[str, Any] = {f.name: getattr(self, f.name) for f in fields(self)}
        d["stages"] = [s.to_dict() for s in self.stages]
        d["cores"], d["modules"] = list(self.cores), list(self.modules)
        return d

    @classmethod
    def from_dict(cls, d: Mapping[str, Any]) -> WorkerLaunch:
        return cls(
            **{
                **d,
                "stages": tuple(StageSpec.from_dict(s) for s in d["stages"]),
                "cores": tuple(d["cores"]),
                "modules": tuple(d.get("modules", ())),
            }
        )


@dataclass(frozen=True, slots=True)
class DispatcherLaunch:
    """The Dispatcher's birth certificate. ``client_endpoints`` are bound for clients:
    ``tcp://host:port`` (port 0 = any) and ``ipc://path``; ``max_inflight`` are its credits;
    ``max_inflight_per_client`` bounds one client's share; ``adaptive_limit``: a task's credits
    follow its queues; ``arena_bytes`` holds the retained inputs; ``result_memory_bytes`` holds
    replies that clients may ask for again (0 = off); ``keys`` is the folder of the server's CURVE
    keys ('' = none: tcp takes whoever reaches it)."""

    name: str
    incarnation: int
    run_dir: str
    controller: str
    client_endpoints: tuple[str, ...]
    transport: str
    cores: tuple[int, ...]
    arena_bytes: int
    slots: int
    max_inflight: int = 256
    max_inflight_per_client: int = 256
    adaptive_limit: bool = True
    result_memory_bytes: int = 32 * 1024 * 1024
    monitor_hz: float = 4.0
    log_path: str = ""
    keys: str = ""

    def to_dict(self) -> dict[str, Any]:
        d = asdict(self)
        d["client_endpoints"] = list(self.client_endpoints)
        d["cores"] = list(self.cores)
        return d

    @classmethod
    def from_dict(cls, d: Mapping[str, Any]) -> DispatcherLaunch:
        return cls(
            **{**d, "client_endpoints": tuple(d["client_endpoints"]), "cores": tuple(d["cores"])}
        )
