"""What the doctor looks at, and what it says: the nouns. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from enum import StrEnum

MIB = 1024 * 1024
GIB = 1024 * MIB


class Level(StrEnum):
    """How bad a finding is. Only ``error`` makes the command fail."""

    OK = "ok"
    NOTE = "note"
    WARNING = "warning"
    ERROR = "error"


@dataclass(frozen=True, slots=True)
class Finding:
    """``remedy`` says what to do; it is empty only where all is well."""

    check: str
    level: Level
    text: str
    remedy: str = ""

    def to_dict(self) -> dict[str, str]:
        return {k: str(v) for k, v in asdict(self).items()}


@dataclass(frozen=True, slots=True)
class Folder:
    """A folder that BlockFlow uses; ``free`` bytes and ``inodes`` on its file system, ``mode`` its
    permissions.

    ``loose`` is what in it anybody can write to, ``foreign`` what, itself included, belongs to
    neither this user nor root.
    """

    path: str
    exists: bool = True
    ours: bool = True
    mode: int = 0o700
    writable: bool = True
    free: int = 100 * GIB
    size: int = 100 * GIB
    inodes: int = 1_000_000
    loose: tuple[str, ...] = ()
    foreign: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Port:
    """An address that ``blockflow up`` takes by default; ``holder`` is '' when it is free."""

    what: str
    address: str
    option: str
    holder: str = ""


@dataclass(frozen=True, slots=True)
class Leftover:
    """A run directory whose system is gone."""

    path: str
    nbytes: int


@dataclass(frozen=True, slots=True)
class BlockFacts:
    """A stored block: ``problem`` is why it cannot be used, ``profile`` why none holds."""

    name: str
    problem: str = ""
    remedy: str = ""
    extra: str = ""
    profile: str = ""


@dataclass(frozen=True, slots=True)
class Facts:
    """All that the checks look at; the defaults are a machine where all is well.

    Attributes:
        threads: why ZeroMQ cannot have its own, '' = it can.
        packages: name -> version, '' = not installed.
        quota: cores' worth of time that the control group allows, 0 = no limit.
        memory_limit: of the control group, 0 = none.
        tasks: processes and threads that there may be, 0 = no limit.
        counted: whether the kernel tells how many bytes a TCP connection has brought.
        gpus: NVIDIA devices that are known to be here. mps: their multi-process service is.
        cuda: whether the installed torch is a build for them.
        cpu_latency: why idle cores cannot be kept awake, '' = they can.
        hashed: whether the artifacts were read as a whole.
        keys: why the folder of keys cannot be used, '' = it can, or there is none.
        stored: what is wrong with the stored state, '' = nothing, or nothing was stored.
        stored_usable: whether a start has a generation of it to go on with.
        stored_bytes: its size, which a save needs again.
    """

    python: tuple[int, int] = (3, 11)
    system: str = "Linux"
    uid: int = 1000
    pidfd: bool = True
    memfd: bool = True
    counted: bool = True
    zmq: tuple[int, ...] = (4, 3, 5)
    curve: bool = True
    threads: str = ""
    packages: Mapping[str, str] = field(
        default_factory=lambda: {"torch": "2.13.0", "onnxruntime": "1.31", "openvino": "2026.4"}
    )
    shm: Folder = field(default_factory=lambda: Folder("/dev/shm", mode=0o1777))
    run_root: Folder = field(default_factory=lambda: Folder("/dev/shm/blockflow-1000"))
    state_dir: Folder = field(default_factory=lambda: Folder("~/.local/state/blockflow"))
    repository: Folder = field(default_factory=lambda: Folder("blocks"))
    blocks: tuple[BlockFacts, ...] = (BlockFacts("trunk"),)
    hashed: bool = True
    leftovers: tuple[Leftover, ...] = ()
    fds_soft: int = 65536
    fds_hard: int = 65536
    ports: tuple[Port, ...] = ()
    clocksource: str = "tsc"
    clock_step_ns: int = 1
    year: int = 2026
    cores: int = 4
    cpus: int = 4
    quota: float = 0.0
    cpu_latency: str = ""
    gpus: int = 0
    mps: bool = False
    cuda: bool = True
    memory: int = 16 * GIB
    memory_limit: int = 0
    tasks: int = 0
    keys: str = ""
    stored: str = ""
    stored_usable: bool = True
    stored_bytes: int = 0
