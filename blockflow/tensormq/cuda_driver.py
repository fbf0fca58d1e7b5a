"""CudaDriver: CudaApi by the CUDA driver's own library, through ctypes.

The driver API and not the runtime (libcudart), because ``libcuda.so.1`` comes with the driver: it
is there wherever a GPU works, its symbols are versioned and stay, and no wheel or toolkit has to be
found. It shares the device's primary context with torch, whose runtime uses the same one. No
compiler is needed, and no private function of torch.

Signatures follow cuda.h; a name with ``_v2`` is what the plain name is a macro for since CUDA 4.
"""

from __future__ import annotations

import ctypes
import threading
from contextlib import AbstractContextManager, ExitStack
from ctypes import POINTER, byref, c_char, c_char_p, c_float, c_int, c_size_t, c_uint, c_void_p
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

from blockflow.core.errors import SystemError_
from blockflow.tensormq.cuda_api import (
    IPC_HANDLE_BYTES,
    NOT_READY,
    CudaApi,
    CudaError,
    DeviceFacts,
    EventKind,
)
from blockflow.tensormq.cuda_here import DRIVER

if TYPE_CHECKING:
    from torch import Tensor

_UVM, _WSL = Path("/dev/nvidia-uvm"), Path("/dev/dxg")
_DEVICEPTR = ctypes.c_uint64
_DEVICE = c_int

_STREAM_NON_BLOCKING = 0x1
_LAZY_PEER_ACCESS = 0x1
_REGISTER_PORTABLE = 0x1
_REGISTER_READ_ONLY = 0x8

_ATTRIBUTE_UNIFIED_ADDRESSING = 41
_ATTRIBUTE_READ_ONLY_REGISTER = 113
_ATTRIBUTE_IPC_EVENTS = 125


class _IpcHandle(ctypes.Structure):
    """CUipcMemHandle and CUipcEventHandle: passed by value."""

    _fields_ = (("reserved", c_char * IPC_HANDLE_BYTES),)


class _Uuid(ctypes.Structure):
    _fields_ = (("bytes", c_char * 16),)


_BLOCKING: dict[str, tuple[Any, ...]] = {
    "cuInit": (c_uint,),
    "cuDeviceGetCount": (POINTER(c_int),),
    "cuDeviceGet": (POINTER(_DEVICE), c_int),
    "cuDeviceGetName": (c_char_p, c_int, _DEVICE),
    "cuDeviceGetUuid_v2": (POINTER(_Uuid), _DEVICE),
    "cuDeviceTotalMem_v2": (POINTER(c_size_t), _DEVICE),
    "cuDeviceGetAttribute": (POINTER(c_int), c_int, _DEVICE),
    "cuDeviceCanAccessPeer": (POINTER(c_int), _DEVICE, _DEVICE),
    "cuDevicePrimaryCtxRetain": (POINTER(c_void_p), _DEVICE),
    "cuMemGetInfo_v2": (POINTER(c_size_t), POINTER(c_size_t)),
    "cuMemAlloc_v2": (POINTER(_DEVICEPTR), c_size_t),
    "cuMemFree_v2": (_DEVICEPTR,),
    "cuIpcGetMemHandle": (POINTER(_IpcHandle), _DEVICEPTR),
    "cuIpcOpenMemHandle_v2": (POINTER(_DEVICEPTR), _IpcHandle, c_uint),
    "cuIpcCloseMemHandle": (_DEVICEPTR,),
    "cuIpcGetEventHandle": (POINTER(_IpcHandle), c_void_p),
    "cuIpcOpenEventHandle": (POINTER(c_void_p), _IpcHandle),
    "cuEventCreate": (POINTER(c_void_p), c_uint),
    "cuEventDestroy_v2": (c_void_p,),
    "cuEventSynchronize": (c_void_p,),
    "cuStreamSynchronize": (c_void_p,),
    "cuStreamCreate": (POINTER(c_void_p), c_uint),
    "cuStreamDestroy_v2": (c_void_p,),
    "cuMemcpyHtoDAsync_v2": (_DEVICEPTR, c_void_p, c_size_t, c_void_p),
    "cuMemcpyDtoHAsync_v2": (c_void_p, _DEVICEPTR, c_size_t, c_void_p),
    "cuMemHostRegister_v2": (c_void_p, c_size_t, c_uint),
    "cuMemHostUnregister": (c_void_p,),
}
"""Calls that may take long: made without the interpreter lock."""

_SHORT: dict[str, tuple[Any, ...]] = {
    "cuCtxSetCurrent": (c_void_p,),
    "cuGetErrorName": (c_int, POINTER(c_char_p)),
    "cuEventRecord": (c_void_p, c_void_p),
    "cuEventQuery": (c_void_p,),
    "cuEventElapsedTime": (POINTER(c_float), c_void_p, c_void_p),
    "cuStreamWaitEvent": (c_void_p, c_void_p, c_uint),
    "cuMemcpyAsync": (_DEVICEPTR, _DEVICEPTR, c_size_t, c_void_p),
}
"""Calls of about a microsecond on the way of every hop: giving the interpreter lock away for them
would cost more than they take, since another thread may keep it for milliseconds."""


class _Library:
    """The loaded driver library: its functions with their signatures; raises on any status but 0.

    Raises:
        SystemError_: MISSING_EXTRA: there is no driver, or an old one.
    """

    def __init__(self, path: str = DRIVER) -> None:
        self._functions: dict[str, Any] = {}
        try:
            for table, library in ((_BLOCKING, ctypes.CDLL(path)), (_SHORT, ctypes.PyDLL(path))):
                for name, types in table.items():
                    function = getattr(library, name)
                    function.restype, function.argtypes = c_int, types
                    self._functions[name] = function
        except (OSError, AttributeError) as exc:
            raise SystemError_(
                "MISSING_EXTRA",
                f"no usable CUDA driver: {exc}",
                where=path,
                hint="install NVIDIA's driver (CUDA 12 or later), or place the block on cpu",
            ) from exc

    def call(self, name: str, *args: Any) -> None:
        status = self._functions[name](*args)
        if status:
            raise CudaError(name, status, self._name(status))

    def query(self, name: str, *args: Any) -> bool:
        """A call that answers "not yet" by its status."""
        status = self._functions[name](*args)
        if status not in (0, NOT_READY):
            raise CudaError(name, status, self._name(status))
        return bool(status == 0)

    def _name(self, status: int) -> str:
        text = c_char_p()
        known = self._functions["cuGetErrorName"](status, byref(text)) == 0 and text.value
        return text.value.decode() if known and text.value else "unknown error"


@cache
def _driver() -> _Library:
    library = _Library()
    try:
        library.call("cuInit", 0)
    except CudaError as exc:
        if exc.hint or _UVM.exists() or _WSL.exists():
            raise
        # The driver would load its module and make this file by a setuid helper, which a process
        # without new privileges cannot use (docs/security.md). Whoever used the GPU first has.
        raise SystemError_(
            exc.code,
            f"{exc.message}, and there is no {_UVM}",
            where=exc.where,
            hint="load the driver's module once, as root: nvidia-modprobe -u -c=0",
        ) from exc
    return library


class _Slab:
    """What torch reads to build a tensor over foreign device memory (__cuda_array_interface__)."""

    def __init__(self, pointer: int, nbytes: int) -> None:
        self.__cuda_array_interface__ = {
            "shape": (nbytes,),
            "typestr": "|u1",
            "data": (pointer, False),
            "strides": None,
            "version": 3,
        }


class CudaDriver(CudaApi):
    """Retains the primary context of device ``ordinal``, as this process sees the devices.

    Raises:
        SystemError_: MISSING_EXTRA without a driver.
        CudaError: no such device.
    """

    def __init__(self, ordinal: int) -> None:
        self.ordinal = ordinal
        self.torch_device = f"cuda:{ordinal}"
        self._lib = _driver()
        self._device = self._device_of(ordinal)
        context = c_void_p()
        self._lib.call("cuDevicePrimaryCtxRetain", byref(context), self._device)
        self._context: c_void_p | None = context
        self._current = threading.local()

    def _device_of(self, ordinal: int) -> int:
        device = _DEVICE()
        self._lib.call("cuDeviceGet", byref(device), ordinal)
        return device.value

    def _call(self, name: str, *args: Any) -> None:
        self._enter()
        self._lib.call(name, *args)

    def _enter(self) -> None:
        """A context belongs to a thread's state: set it once in each thread that comes here."""
        if getattr(self._current, "context", None) is not self._context:
            self._lib.call("cuCtxSetCurrent", self._context)
            self._current.context = self._context

    def _attribute(self, number: int) -> int:
        value = c_int()
        self._lib.call("cuDeviceGetAttribute", byref(value), number, self._device)
        return value.value

    def facts(self) -> DeviceFacts:
        name = ctypes.create_string_buffer(256)
        uuid, total = _Uuid(), c_size_t()
        self._lib.call("cuDeviceGetName", name, len(name), self._device)
        self._lib.call("cuDeviceGetUuid_v2", byref(uuid), self._device)
        self._lib.call("cuDeviceTotalMem_v2", byref(total), self._device)
        return DeviceFacts(
            name.value.decode(errors="replace"),
            uuid_text(bytes(uuid)),
            total.value,
            self._attribute(_ATTRIBUTE_UNIFIED_ADDRESSING) == 1,
            self._attribute(_ATTRIBUTE_IPC_EVENTS) == 1,
            self._attribute(_ATTRIBUTE_READ_ONLY_REGISTER) == 1,
        )

    def readable_by(self, ordinal: int) -> bool:
        count, able = c_int(), c_int()
        self._lib.call("cuDeviceGetCount", byref(count))
        if not 0 <= ordinal < count.value:
            return False
        self._lib.call("cuDeviceCanAccessPeer", byref(able), self._device_of(ordinal), self._device)
        return bool(able.value)

    def memory_used(self) -> int:
        free, total = c_size_t(), c_size_t()
        self._call("cuMemGetInfo_v2", byref(free), byref(total))
        return total.value - free.value

    # --- memory ----------------------------------------------------------------------------------

    def mem_alloc(self, nbytes: int) -> int:
        pointer = _DEVICEPTR()
        self._call("cuMemAlloc_v2", byref(pointer), nbytes)
        return pointer.value

    def mem_free(self, pointer: int) -> None:
        self._call("cuMemFree_v2", pointer)

    def mem_export(self, pointer: int) -> bytes:
        handle = _IpcHandle()
        self._call("cuIpcGetMemHandle", byref(handle), pointer)
        return bytes(handle)

    def mem_import(self, handle: bytes) -> int:
        pointer = _DEVICEPTR()
        raw = _IpcHandle.from_buffer_copy(handle)
        self._call("cuIpcOpenMemHandle_v2", byref(pointer), raw, _LAZY_PEER_ACCESS)
        return pointer.value

    def mem_close(self, pointer: int) -> None:
        self._call("cuIpcCloseMemHandle", pointer)

    def host_register(self, address: int, nbytes: int, read_only: bool) -> None:
        flags = _REGISTER_PORTABLE | (_REGISTER_READ_ONLY if read_only else 0)
        self._call("cuMemHostRegister_v2", address, nbytes, flags)

    def host_unregister(self, address: int) -> None:
        self._call("cuMemHostUnregister", address)

    # --- events and streams ----------------------------------------------------------------------

    def event_create(self, kind: EventKind) -> int:
        event = c_void_p()
        self._call("cuEventCreate", byref(event), int(kind))
        return event.value or 0

    def event_export(self, event: int) -> bytes:
        handle = _IpcHandle()
        self._call("cuIpcGetEventHandle", byref(handle), event)
        return bytes(handle)

    def event_import(self, handle: bytes) -> int:
        event = c_void_p()
        self._call("cuIpcOpenEventHandle", byref(event), _IpcHandle.from_buffer_copy(handle))
        return event.value or 0

    def event_destroy(self, event: int) -> None:
        self._call("cuEventDestroy_v2", event)

    def event_record(self, event: int, stream: int) -> None:
        self._call("cuEventRecord", event, stream)

    def event_query(self, event: int) -> bool:
        self._enter()
        return self._lib.query("cuEventQuery", event)

    def event_synchronize(self, event: int) -> None:
        self._call("cuEventSynchronize", event)

    def event_elapsed_ns(self, start: int, stop: int) -> int:
        ms = c_float()
        self._call("cuEventElapsedTime", byref(ms), start, stop)
        return int(ms.value * 1e6)

    def stream_create(self) -> int:
        stream = c_void_p()
        self._call("cuStreamCreate", byref(stream), _STREAM_NON_BLOCKING)
        return stream.value or 0

    def stream_destroy(self, stream: int) -> None:
        self._call("cuStreamDestroy_v2", stream)

    def stream_wait(self, stream: int, event: int) -> None:
        self._call("cuStreamWaitEvent", stream, event, 0)

    def stream_synchronize(self, stream: int) -> None:
        self._call("cuStreamSynchronize", stream)

    # --- copies ----------------------------------------------------------------------------------

    def copy_h2d(self, target: int, address: int, nbytes: int, stream: int) -> None:
        self._call("cuMemcpyHtoDAsync_v2", target, address, nbytes, stream)

    def copy_d2h(self, address: int, source: int, nbytes: int, stream: int) -> None:
        self._call("cuMemcpyDtoHAsync_v2", address, source, nbytes, stream)

    def copy_d2d(self, target: int, source: int, nbytes: int, stream: int) -> None:
        self._call("cuMemcpyAsync", target, source, nbytes, stream)

    # --- torch -----------------------------------------------------------------------------------

    def tensor(self, pointer: int, nbytes: int) -> Tensor:
        import torch

        # Without a copy, because the memory is on that device already; torch keeps the object.
        return torch.as_tensor(_Slab(pointer, nbytes), device=self.torch_device)

    def scratch(self, nbytes: int) -> Tensor:
        import torch

        return torch.empty(nbytes, dtype=torch.uint8, device=self.torch_device)

    def pool_bytes(self) -> tuple[int, int]:
        import torch

        number = self.ordinal
        return torch.cuda.memory_allocated(number), torch.cuda.memory_reserved(number)

    def engine_scope(self, stream: int) -> AbstractContextManager[object]:
        import torch

        scope = ExitStack()
        scope.enter_context(torch.cuda.device(self.ordinal))
        own = torch.cuda.ExternalStream(stream, device=self.torch_device)
        scope.enter_context(torch.cuda.stream(own))
        return scope

    def close(self) -> None:
        """The context is left to the end of the process: torch's runtime may go on in it, and need
        not have counted itself among its users."""
        self._context = None


def uuid_text(raw: bytes) -> str:
    """A device's UUID as NVML writes it."""
    digits = raw.hex()
    cuts = (0, 8, 12, 16, 20, 32)
    return "GPU-" + "-".join(digits[a:b] for a, b in pairwise(cuts))
