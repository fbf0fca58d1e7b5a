"""Which CUDA devices this machine has, as far as that shows without a CUDA context.

For the control plane, which starts no driver: it looks at the files that the driver makes. The
answer is a bound from above, so that what is refused by it could not have been started; what may be
there after all is left to the worker that opens it.
"""

from __future__ import annotations

import ctypes
import errno
import re
import socket
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

DRIVER = "libcuda.so.1"
DOUBLE_ENV = "BLOCKFLOW_CUDA_DOUBLE"
"""A folder: devices ``cuda:N`` are then played by the CPU (``cuda_fake``), to try things out."""
DOUBLE_DEVICES = 2

_VISIBLE = "CUDA_VISIBLE_DEVICES"
_MPS_PIPES = "CUDA_MPS_PIPE_DIRECTORY"
_NODE = re.compile(r"nvidia[0-9]+")


@dataclass(frozen=True, slots=True)
class Devices:
    """At most ``count`` devices are here; ``whose`` says who has them."""

    count: int
    whose: str

    def missing(self, device: str) -> str:
        """Why ``device`` (``cpu``, ``cuda:N``) cannot be used; '' if it may be there."""
        kind, _, number = device.partition(":")
        if kind == "cpu" or int(number) < self.count:
            return ""
        names = ", ".join(f"cuda:{i}" for i in range(self.count)) or "no CUDA device"
        return f"there is no {device}: {self.whose} {names}"


def driver_loads() -> bool:
    """Whether the driver's library is there. It is not initialised."""
    try:
        ctypes.CDLL(DRIVER)
    except OSError:
        return False
    return True


def devices_here(
    environment: Mapping[str, str],
    root: Path = Path("/"),
    has_driver: Callable[[], bool] = driver_loads,
) -> Devices | None:
    """The devices that a worker with this ``environment`` can see at most; None = not known.

    Not known is how many a divided GPU (MIG) shows, and how many there are behind a driver that has
    made no device files: not yet, or never (WSL).
    """
    if environment.get(DOUBLE_ENV):
        return Devices(DOUBLE_DEVICES, f"the double ({DOUBLE_ENV}) has")
    built = _built_in(root)
    if not built and not has_driver():
        return Devices(0, "without NVIDIA's driver, this machine has")
    known = None if not built or _divided(root) else built
    visible = environment.get(_VISIBLE)
    if visible is not None:
        return Devices(_left(visible, known), f"{_VISIBLE}={visible[:100]} leaves")
    return None if known is None else Devices(known, "this machine has")


def has_mps(environment: Mapping[str, str]) -> bool:
    """Whether processes with this ``environment`` find the control daemon of NVIDIA's multi-process
    service: then their kernels run side by side; without it the device switches between them."""
    folder = environment.get(_MPS_PIPES) or "/tmp/nvidia-mps"
    return _is_served(Path(folder) / "control")


def _is_served(path: Path) -> bool:
    """Whether a process has this socket: one that was killed leaves its file. Nothing is sent: to a
    socket of another kind than its own there is no connection."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(str(path))
        except OSError as exc:
            return exc.errno == errno.EPROTOTYPE
    return True


def _built_in(root: Path) -> int:
    # A container may see fewer device files than GPUs. On a machine that has just booted, files may
    # be missing that the first use makes. So the larger number bounds both.
    nodes = [p for p in root.glob("dev/nvidia*") if _NODE.fullmatch(p.name)]
    return max(len(nodes), len(list(root.glob("proc/driver/nvidia/gpus/*"))))


def _divided(root: Path) -> bool:
    return any(root.glob("proc/driver/nvidia/capabilities/gpu*/mig/gi*"))


def _left(visible: str, built: int | None) -> int:
    """CUDA takes the entries up to the first that names no device."""
    count = 0
    for entry in visible.split(","):
        name = entry.strip()
        beyond = name.isdecimal() and built is not None and int(name) >= built
        if not name or name.startswith("-") or beyond:
            break
        count += 1
    return count
