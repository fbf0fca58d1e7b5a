"""CudaDriver against a stand-in for libcuda made of C callbacks: the calls as the driver gets them.

No GPU is needed to see that every function exists under the name it is asked by, that handles go by
value and pointers by reference, and that a status becomes the right error.
"""

from __future__ import annotations

import ctypes
import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch  # not while the loader is a stand-in

from blockflow.core.errors import SystemError_
from blockflow.tensormq import cuda_driver
from blockflow.tensormq.cuda_api import CudaError, EventKind
from blockflow.tensormq.cuda_driver import _BLOCKING, _SHORT, CudaDriver, _IpcHandle, uuid_text
from blockflow.tensormq.cuda_here import DOUBLE_ENV
from blockflow.tensormq.cuda_preflight import preflight
from blockflow.tensormq.memory import open_device

HANDLE = bytes(range(64))


class StandIn:
    """A library: every function of the tables as a C function; keeps what it was called with."""

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []
        self.status: dict[str, int] = {}
        self.outputs: dict[str, Any] = {
            "cuDeviceGetCount": 2,
            "cuDeviceGet": 5,
            "cuDeviceTotalMem_v2": 141 << 30,
            "cuDeviceGetAttribute": 1,
            "cuDeviceCanAccessPeer": 1,
            "cuDevicePrimaryCtxRetain": 0xC0,
            "cuMemGetInfo_v2": (40 << 30, 141 << 30),
            "cuMemAlloc_v2": 0x7F0000000000,
            "cuIpcOpenMemHandle_v2": 0x7E0000000000,
            "cuIpcOpenEventHandle": 0xE1,
            "cuEventCreate": 0xE0,
            "cuStreamCreate": 0x51,
            "cuEventElapsedTime": 2.5,
        }
        for name, types in (_BLOCKING | _SHORT).items():
            prototype = ctypes.CFUNCTYPE(ctypes.c_int, *types)
            setattr(self, name, prototype(self._function(name)))

    def _function(self, name: str) -> Any:
        def function(*args: Any) -> int:
            seen = tuple(bytes(a) if isinstance(a, _IpcHandle) else a for a in args)
            self.calls.append((name, *(s for s in seen if isinstance(s, (int, bytes)) or not s)))
            if name in ("cuIpcGetMemHandle", "cuIpcGetEventHandle"):
                ctypes.memmove(args[0], HANDLE, 64)
            elif name == "cuDeviceGetUuid_v2":
                ctypes.memmove(args[0], bytes(range(16)), 16)
            elif isinstance(self.outputs.get(name), tuple):
                for place, value in zip(args, self.outputs[name], strict=True):
                    place[0] = value
            elif name in self.outputs:
                args[0][0] = self.outputs[name]
            return self.status.get(name, 0)

        return function

    def args(self, name: str) -> tuple[Any, ...]:
        """Plain arguments of the last call."""
        return next(c[1:] for c in reversed(self.calls) if c[0] == name)


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> Iterator[StandIn]:
    made = StandIn()
    monkeypatch.setattr(ctypes, "CDLL", lambda path: made)
    monkeypatch.setattr(ctypes, "PyDLL", lambda path: made)
    cuda_driver._driver.cache_clear()
    yield made
    cuda_driver._driver.cache_clear()


@pytest.fixture
def driver(library: StandIn) -> CudaDriver:
    return CudaDriver(1)


def test_the_primary_context_is_retained_set_and_left_to_the_process(
    library: StandIn, driver: CudaDriver
) -> None:
    assert library.args("cuInit") == (0,)
    assert library.args("cuDeviceGet") == (1,)
    driver.mem_free(64)
    driver.mem_free(64)
    assert [c for c in library.calls if c[0] == "cuCtxSetCurrent"] == [("cuCtxSetCurrent", 0xC0)]
    driver.close()
    driver.close()
    assert not [c for c in library.calls if "Release" in c[0]]  # torch may go on in it
    assert driver.torch_device == "cuda:1"


def test_memory_and_its_handles(library: StandIn, driver: CudaDriver) -> None:
    assert driver.mem_alloc(4 << 20) == 0x7F0000000000
    assert library.args("cuMemAlloc_v2") == (4 << 20,)
    assert driver.mem_export(0x7F0000000000) == HANDLE
    assert driver.mem_import(HANDLE) == 0x7E0000000000
    assert library.args("cuIpcOpenMemHandle_v2") == (HANDLE, 1), "by value, peers enabled"
    assert driver.memory_used() == 101 << 30, "free comes first, then all"
    driver.mem_close(0x7E0000000000)
    assert library.args("cuIpcCloseMemHandle") == (0x7E0000000000,)
    driver.host_register(4096, 8192, False)
    assert library.args("cuMemHostRegister_v2") == (4096, 8192, 1)
    driver.host_register(4096, 8192, True)
    assert library.args("cuMemHostRegister_v2") == (4096, 8192, 9)


def test_events_and_streams(library: StandIn, driver: CudaDriver) -> None:
    for kind, flags in ((EventKind.READY, 6), (EventKind.DONE, 3), (EventKind.CLOCK, 1)):
        assert driver.event_create(kind) == 0xE0
        assert library.args("cuEventCreate") == (flags,)
    assert driver.event_export(0xE0) == HANDLE
    assert driver.event_import(HANDLE) == 0xE1
    assert library.args("cuIpcOpenEventHandle") == (HANDLE,)
    assert driver.stream_create() == 0x51
    assert library.args("cuStreamCreate") == (1,), "does not wait for the default stream"
    driver.event_record(0xE0, 0x51)
    assert library.args("cuEventRecord") == (0xE0, 0x51)
    driver.stream_wait(0x51, 0xE1)
    assert library.args("cuStreamWaitEvent") == (0x51, 0xE1, 0)
    assert driver.event_elapsed_ns(1, 2) == 2_500_000
    assert driver.event_query(0xE0)
    library.status["cuEventQuery"] = 600
    assert not driver.event_query(0xE0)
    library.status["cuEventQuery"] = 700
    with pytest.raises(CudaError):
        driver.event_query(0xE0)


def test_copies_are_in_order_of_target_source_bytes_stream(
    library: StandIn, driver: CudaDriver
) -> None:
    driver.copy_h2d(1 << 40, 4096, 8, 0x51)
    assert library.args("cuMemcpyHtoDAsync_v2") == (1 << 40, 4096, 8, 0x51)
    driver.copy_d2h(4096, 1 << 40, 8, 0x51)
    assert library.args("cuMemcpyDtoHAsync_v2") == (4096, 1 << 40, 8, 0x51)
    driver.copy_d2d(1 << 40, 1 << 41, 8, 0x51)
    assert library.args("cuMemcpyAsync") == (1 << 40, 1 << 41, 8, 0x51)


@pytest.mark.parametrize(
    ("method", "name"),
    [
        ("host_unregister", "cuMemHostUnregister"),
        ("event_destroy", "cuEventDestroy_v2"),
        ("event_synchronize", "cuEventSynchronize"),
        ("stream_destroy", "cuStreamDestroy_v2"),
        ("stream_synchronize", "cuStreamSynchronize"),
    ],
)
def test_what_is_waited_for_and_given_back_is_named_by_its_handle(
    library: StandIn, driver: CudaDriver, method: str, name: str
) -> None:
    getattr(driver, method)(0xE0)
    assert [call[0] for call in library.calls[-2:]] == ["cuCtxSetCurrent", name]
    assert library.args(name) == (0xE0,)


def test_torch_is_asked_by_names_and_arguments_that_it_has(
    driver: CudaDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A build for the CPU has them as well, and can be asked for nothing but that."""
    log: list[str] = []

    def of(real: Any, answer: Any) -> Any:
        signature = inspect.signature(real)

        def call(*args: Any, **kwargs: Any) -> Any:
            given = signature.bind(*args, **kwargs)
            return answer(**given.arguments)

        return call

    @contextmanager
    def entered(what: str) -> Iterator[None]:
        log.append(what)
        yield
        log.append(f"not {what}")

    def stand_in(name: str, answer: Any) -> None:
        monkeypatch.setattr(torch.cuda, name, of(getattr(torch.cuda, name), answer))

    stand_in("device", lambda device: entered(f"device {device}"))
    stand_in("stream", lambda stream: entered(stream))
    stand_in("ExternalStream", lambda stream_ptr, device: f"stream {stream_ptr:#x} of {device}")
    stand_in("memory_allocated", lambda device: 10 + device)
    stand_in("memory_reserved", lambda device: 20 + device)
    with driver.engine_scope(0x51):
        log.append("computes")
    scopes = ["device 1", "stream 0x51 of cuda:1"]
    assert log == [*scopes, "computes", *(f"not {scope}" for scope in reversed(scopes))]
    assert driver.pool_bytes() == (11, 21)
    made: list[Any] = []
    monkeypatch.setattr(torch, "empty", lambda *args, **kwargs: made.append((args, kwargs)))
    monkeypatch.setattr(torch, "as_tensor", lambda data, device: made.append((data, device)))
    driver.scratch(64)
    driver.tensor(1 << 40, 4096)
    memory, device = made.pop()
    assert made == [((64,), {"dtype": torch.uint8, "device": "cuda:1"})]
    assert device == "cuda:1"
    assert memory.__cuda_array_interface__ == {
        "shape": (4096,), "typestr": "|u1", "data": (1 << 40, False), "strides": None, "version": 3,
    }  # fmt: skip


def test_facts_and_peers(library: StandIn, driver: CudaDriver) -> None:
    facts = driver.facts()
    assert facts.uuid == "GPU-00010203-0405-0607-0809-0a0b0c0d0e0f"
    assert facts.total_bytes == 141 << 30
    assert facts.unified_addressing and facts.ipc_events and facts.read_only_pins
    assert driver.readable_by(0)
    assert not driver.readable_by(2), "there are two"
    library.outputs["cuDeviceCanAccessPeer"] = 0
    assert not driver.readable_by(0)


def test_an_exclusive_device_is_shared_by_the_clients_of_nvidias_service(
    library: StandIn, driver: CudaDriver
) -> None:
    """Its manual sets that mode, which binds the service alone. (All attributes are 1 here.)"""
    assert preflight(driver, {}).able


def test_a_device_that_another_process_has_alone_says_what_to_do(library: StandIn) -> None:
    library.status["cuDevicePrimaryCtxRetain"] = 46
    with pytest.raises(CudaError, match="nvidia-smi -c DEFAULT"):
        CudaDriver(0)


@pytest.mark.parametrize(
    ("status", "remedy"), [(100, "--gpus all"), (802, "fabricmanager"), (805, "does not answer")]
)
def test_a_driver_that_does_not_start_says_what_to_do(
    library: StandIn, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, status: int, remedy: str
) -> None:
    monkeypatch.setattr(cuda_driver, "_UVM", tmp_path / "nvidia-uvm")
    library.status["cuInit"] = status
    with pytest.raises(CudaError, match=remedy):
        CudaDriver(0)


def test_a_status_becomes_an_error(library: StandIn, driver: CudaDriver) -> None:
    library.status |= {"cuMemAlloc_v2": 2, "cuIpcOpenMemHandle_v2": 201, "cuGetErrorName": 1}
    with pytest.raises(CudaError) as info:
        driver.mem_alloc(1)
    assert (info.value.code, info.value.status) == ("NO_SPACE", 2)
    with pytest.raises(CudaError) as info:
        driver.mem_import(HANDLE)
    assert (info.value.code, info.value.status) == ("INTERNAL", 201)


def test_without_a_driver_the_error_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda_driver, "DRIVER", "libcuda-that-is-not-there.so.1")
    with pytest.raises(SystemError_) as info:
        cuda_driver._Library("libcuda-that-is-not-there.so.1")
    assert info.value.code == "MISSING_EXTRA"
    assert "NVIDIA's driver" in info.value.hint


def test_an_old_driver_without_a_function_is_told_too(
    library: StandIn, monkeypatch: pytest.MonkeyPatch
) -> None:
    del library.cuDeviceGetUuid_v2
    with pytest.raises(SystemError_, match="cuDeviceGetUuid_v2"):
        CudaDriver(0)


def test_uuid_text() -> None:
    assert uuid_text(bytes(16)) == "GPU-00000000-0000-0000-0000-000000000000"


def test_a_driver_that_cannot_load_its_module_says_how(
    library: StandIn, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A worker may not execute the setuid helper that would."""
    library.status["cuInit"] = 999
    monkeypatch.setattr(cuda_driver, "_UVM", tmp_path / "nvidia-uvm")
    with pytest.raises(SystemError_, match="there is no") as info:
        CudaDriver(0)
    assert "nvidia-modprobe" in (info.value.hint or "")
    (tmp_path / "nvidia-uvm").touch()
    with pytest.raises(CudaError):
        CudaDriver(0)


def test_where_the_driver_has_no_module_there_is_none_to_load(
    library: StandIn, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    library.status["cuInit"] = 999
    monkeypatch.setattr(cuda_driver, "_UVM", tmp_path / "nvidia-uvm")
    monkeypatch.setattr(cuda_driver, "_WSL", tmp_path)
    with pytest.raises(CudaError):
        CudaDriver(0)


def test_a_torch_without_cuda_is_named(library: StandIn, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(DOUBLE_ENV, raising=False)
    monkeypatch.setattr("torch.version.cuda", None)
    with pytest.raises(SystemError_, match="built without CUDA") as info:
        open_device("cuda:1")
    assert (info.value.code, info.value.where) == ("MISSING_EXTRA", "cuda:1")
    monkeypatch.setattr("torch.version.cuda", "13.0")
    assert open_device("cuda:1").torch_device == "cuda:1"
