"""CudaApi: the few driver calls that TensorMQ needs: one interface for the driver and its double.

An object speaks for one device in one process. Pointers, streams and events are plain integers, as
the driver's own handles are; IPC handles are 64 opaque bytes. Nothing here waits for the device but
the calls that say so. ``cuda_driver.CudaDriver`` is the real one, ``cuda_fake.FakeCuda`` the
double.
"""

from __future__ import annotations

import enum
from abc import ABC, abstractmethod
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from blockflow.core.errors import SystemError_

if TYPE_CHECKING:
    from torch import Tensor

IPC_HANDLE_BYTES = 64
"""Size of both kinds of IPC handle (CU_IPC_HANDLE_SIZE)."""

INVALID_VALUE = 1
OUT_OF_MEMORY = 2
NOT_INITIALIZED = 3
DEVICE_UNAVAILABLE = 46
NO_DEVICE = 100
INVALID_CONTEXT = 201
NO_PEER_ACCESS = 217
INVALID_HANDLE = 400
NOT_READY = 600
ILLEGAL_ADDRESS = 700
ALREADY_REGISTERED = 712
NOT_REGISTERED = 713
NOT_SUPPORTED = 801
SYSTEM_NOT_READY = 802
DRIVER_MISMATCH = 803
COMPAT_NOT_SUPPORTED = 804
MPS_CONNECTION_FAILED = 805
MPS_MAX_CLIENTS = 808
"""Status codes of the driver (CUresult) that are told apart here."""

_REMEDIES = {
    DEVICE_UNAVAILABLE: "its compute mode keeps it for one process, or for none: nvidia-smi -c "
    "DEFAULT as root, or NVIDIA's multi-process service (docs/cuda-ipc.md)",
    NO_DEVICE: "see what nvidia-smi shows, CUDA_VISIBLE_DEVICES, and whether the container has "
    "been given its GPUs (docker run --gpus all)",
    SYSTEM_NOT_READY: "a machine with NVSwitches needs its fabric manager: systemctl start "
    "nvidia-fabricmanager",
    DRIVER_MISMATCH: "the driver has been updated since the machine started: restart it",
    COMPAT_NOT_SUPPORTED: "this GPU takes no libcuda of another driver's: leave cuda/compat out of "
    "LD_LIBRARY_PATH",
    MPS_CONNECTION_FAILED: "the service that CUDA_MPS_PIPE_DIRECTORY or /tmp/nvidia-mps stands for "
    "does not answer: end it, and start it as this user",
    MPS_MAX_CLIENTS: "NVIDIA's service takes no more processes: place several blocks in one worker",
}


class CudaError(SystemError_):
    """A driver call failed. ``status`` is its CUresult.

    NO_SPACE when the device has no memory left, else INTERNAL: the device, the driver, or a defect
    in how it was called. Most of them leave the context unusable.
    """

    def __init__(self, call: str, status: int, name: str) -> None:
        super().__init__(
            "NO_SPACE" if status == OUT_OF_MEMORY else "INTERNAL",
            f"{call} failed: {name} ({status})",
            where="CUDA",
            hint=_REMEDIES.get(status, ""),
        )
        self.status = status


class EventKind(enum.IntFlag):
    """What an event is for; the values are the driver's creation flags.

    ``READY`` crosses processes, and then it cannot measure time. ``DONE`` lets a host thread sleep
    until it has come, ``CLOCK`` too, and two of these give a duration.
    """

    CLOCK = 0x1
    DONE = 0x1 | 0x2
    READY = 0x2 | 0x4


@dataclass(frozen=True, slots=True)
class DeviceFacts:
    """What preflight and KPIs want to know of a device.

    Attributes:
        name, uuid: the driver's (``GPU-...`` or ``MIG-...``, as NVML writes it).
        total_bytes: of its memory.
        unified_addressing, ipc_events: what IPC needs.
        read_only_pins: memory that this process may only read can be page-locked.
    """

    name: str
    uuid: str
    total_bytes: int
    unified_addressing: bool
    ipc_events: bool
    read_only_pins: bool


class CudaApi(ABC):
    """One device, one process. Calls may come from any thread.

    Attributes:
        ordinal: the device's number in this process.
        torch_device: where torch keeps tensors of this device.

    Every call may raise :class:`CudaError`.
    """

    ordinal: int
    torch_device: str

    @abstractmethod
    def facts(self) -> DeviceFacts: ...

    @abstractmethod
    def readable_by(self, ordinal: int) -> bool:
        """Whether another device can read this one's memory; False for one that is not here."""

    @abstractmethod
    def memory_used(self) -> int:
        """Bytes of the device's memory that are in use, by whomever."""

    # --- memory ----------------------------------------------------------------------------------

    @abstractmethod
    def mem_alloc(self, nbytes: int) -> int:
        """Plain device memory of its own allocation: the only kind with an IPC handle."""

    @abstractmethod
    def mem_free(self, pointer: int) -> None:
        """Every importer must have closed it."""

    @abstractmethod
    def mem_export(self, pointer: int) -> bytes:
        """IPC handle of an allocation (of its beginning)."""

    @abstractmethod
    def mem_import(self, handle: bytes) -> int:
        """Map another process's allocation, of this device or of a peer."""

    @abstractmethod
    def mem_close(self, pointer: int) -> None:
        """Undo :meth:`mem_import`; no work that uses it may be under way."""

    @abstractmethod
    def host_register(self, address: int, nbytes: int, read_only: bool) -> None:
        """Page-lock host memory, so that copies to and from it are asynchronous and fast."""

    @abstractmethod
    def host_unregister(self, address: int) -> None: ...

    # --- events and streams ----------------------------------------------------------------------

    @abstractmethod
    def event_create(self, kind: EventKind) -> int: ...

    @abstractmethod
    def event_export(self, event: int) -> bytes:
        """IPC handle of a READY event."""

    @abstractmethod
    def event_import(self, handle: bytes) -> int:
        """Another process's READY event. Destroy it before its maker does."""

    @abstractmethod
    def event_destroy(self, event: int) -> None: ...

    @abstractmethod
    def event_record(self, event: int, stream: int) -> None:
        """The event has come when all that ``stream`` holds now is done."""

    @abstractmethod
    def event_query(self, event: int) -> bool:
        """Whether it has come; True for one that was never recorded."""

    @abstractmethod
    def event_synchronize(self, event: int) -> None:
        """Wait, in this thread, until it has come. Releases the interpreter lock."""

    @abstractmethod
    def event_elapsed_ns(self, start: int, stop: int) -> int:
        """Device time between two CLOCK events that have come."""

    @abstractmethod
    def stream_create(self) -> int:
        """A stream that does not wait for the default one."""

    @abstractmethod
    def stream_destroy(self, stream: int) -> None: ...

    @abstractmethod
    def stream_wait(self, stream: int, event: int) -> None:
        """What is put into ``stream`` from now on waits on the device for ``event`` as recorded
        by now; the host goes on."""

    @abstractmethod
    def stream_synchronize(self, stream: int) -> None:
        """Wait, in this thread, for all of the stream. Releases the interpreter lock."""

    # --- copies: queued in the stream ------------------------------------------------------------

    @abstractmethod
    def copy_h2d(self, target: int, address: int, nbytes: int, stream: int) -> None:
        """Host to device. Memory that is not page-locked is read before this returns."""

    @abstractmethod
    def copy_d2h(self, address: int, source: int, nbytes: int, stream: int) -> None: ...

    @abstractmethod
    def copy_d2d(self, target: int, source: int, nbytes: int, stream: int) -> None:
        """Also between peers."""

    # --- torch -----------------------------------------------------------------------------------

    @abstractmethod
    def tensor(self, pointer: int, nbytes: int) -> Tensor:
        """A uint8 tensor over device memory, not owned by it."""

    @abstractmethod
    def scratch(self, nbytes: int) -> Tensor:
        """A fresh uint8 tensor from torch's own pool, for the stream of :meth:`engine_scope`."""

    @abstractmethod
    def pool_bytes(self) -> tuple[int, int]:
        """What torch's own pool has given out in this process, and what it keeps."""

    @abstractmethod
    def engine_scope(self, stream: int) -> AbstractContextManager[object]:
        """While entered, torch computes on this device and in ``stream`` (in this thread)."""

    @abstractmethod
    def close(self) -> None:
        """Let go of the device. Everything made here must be gone. Idempotent."""
