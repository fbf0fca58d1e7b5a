"""What tests of device memory share: devices of the double, and a second process as the other end.

The other end is told what to do in lines. It uses the double, or the real driver where there is a
GPU.
"""

from __future__ import annotations

import gc
import json
import os
import secrets
import socket
import threading
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from blockflow.core.errors import BlockFlowError, make_error
from blockflow.launch.base import Launcher
from blockflow.launch.local import TemplateLauncher
from blockflow.tensormq import cuda_consumer
from blockflow.tensormq.channel import Consumer, InBuffer, Usage
from blockflow.tensormq.cuda import CudaProducer
from blockflow.tensormq.cuda_api import CudaApi
from blockflow.tensormq.cuda_consumer import CudaConsumer
from blockflow.tensormq.cuda_device import CudaDevice
from blockflow.tensormq.cuda_fake import FakeCuda
from blockflow.tensormq.cuda_here import DOUBLE_ENV
from blockflow.tensormq.mixed import MixedOutBuffer, MixedProducer
from blockflow.tensormq.views import as_torch
from blockflow.wire.codec import decode, encode
from blockflow.wire.tensor import TensorDesc, desc_from_wire


def double_folder(run_dir: Path) -> Path:
    """Beside the run directory, so that what is left there is not mistaken for ours."""
    folder = run_dir.parent / f"{run_dir.name}-double"
    folder.mkdir(exist_ok=True)
    return folder


_DEVICES: list[CudaDevice] = []
_SCOPES = ExitStack()


def fake_device(folder: Path, ordinal: int = 0, **options: Any) -> CudaDevice:
    """This thread is its engine's, until :func:`close_devices`."""
    _DEVICES.append(made := CudaDevice(FakeCuda(folder, ordinal, **options)))
    _SCOPES.enter_context(made.api.engine_scope(made.stream))
    return made


def close_devices() -> None:
    """All that were made since the last call."""
    _SCOPES.close()
    while _DEVICES:
        assert _DEVICES.pop().close()


def far_process() -> int:
    """Another process for the double to play: this one's parent, since that lives."""
    return os.getppid()


def far_device(folder: Path, ordinal: int = 0, **options: Any) -> CudaDevice:
    """A device as another process has it."""
    return fake_device(folder, ordinal, process=far_process(), **options)


def make_api(where: str, ordinal: int = 0) -> CudaApi:
    """``driver`` (the double if the environment names one), or the folder of a double; ``lazy:``
    before it for streams that are threads."""
    if where == "driver":
        where = os.environ.get(DOUBLE_ENV, where)
    if where == "driver":
        from blockflow.tensormq.cuda_driver import CudaDriver

        return CudaDriver(ordinal)
    return FakeCuda(Path(where.removeprefix("lazy:")), ordinal, eager=not where.startswith("lazy:"))


class SettledConsumer(CudaConsumer):
    """Its releases have been marked when they return, so that a test may sweep at once."""

    def released(self, *args: Any) -> None:
        super().released(*args)
        assert self._device.completions.wait_idle(10)


class DeviceFirst(MixedProducer):
    """Reserves for consumers on devices unless told otherwise."""

    def reserve(
        self, dtype: str, dims: Sequence[int], consumers: Collection[int] = ()
    ) -> MixedOutBuffer | None:
        return super().reserve(dtype, dims, consumers or (21,))

    def usage(self) -> Usage:
        assert self.cuda is not None
        return self.cuda.usage()


def to_line(desc: TensorDesc) -> str:
    return encode(desc.to_wire()).hex()


def from_line(text: str) -> TensorDesc:
    return desc_from_wire(decode(bytes.fromhex(text), max_bytes=4096, what="test"), "test")


class OtherEnd:
    """A process with producers and consumers in it, forked from a template that has torch."""

    def __init__(self, launcher: Launcher, folder: Path) -> None:
        with socket.socket(socket.AF_UNIX) as listener:
            address = str(folder / f"end-{secrets.token_hex(4)}.sock")
            listener.bind(address)
            listener.listen()
            self._child = launcher.launch("tests.cuda_rig:serve", {"address": address}, "other-end")
            listener.settimeout(60)
            self._lines = listener.accept()[0].makefile("rw")
        Path(address).unlink()

    def ask(self, call: str, *args: Any) -> Any:
        """Call a method of :class:`Server` there."""
        self._lines.write(json.dumps([call, *args]) + "\n")
        self._lines.flush()
        line = self._lines.readline()
        assert line, "the other end has died"
        answer = json.loads(line)
        if "error" in answer:
            raise make_error(*answer["error"])
        return answer["value"]

    def kill(self) -> None:
        self._child.kill()
        assert self._child.wait(10) is not None

    def end(self) -> None:
        self.kill()
        self._child.close()
        self._lines.close()


@contextmanager
def other_end(launcher: Launcher, folder: Path) -> Iterator[OtherEnd]:
    end = OtherEnd(launcher, folder)
    try:
        yield end
    finally:
        end.end()


def warm_launcher() -> TemplateLauncher:
    """A template for other ends; it touches no device, its children may."""
    return TemplateLauncher(preload=["torch", "blockflow.tensormq.memory", "tests.cuda_rig"])


class FarBuffer(InBuffer):
    """A buffer of the other end; ``memory`` is what its device holds, read by a kernel there."""

    __slots__ = ("_end", "_number", "_read")

    def __init__(self, end: OtherEnd, number: int, desc: TensorDesc) -> None:
        self.desc = desc
        self._end = end
        self._number = number
        self._read: memoryview | None = None

    @property
    def memory(self) -> memoryview:  # type: ignore[override]
        if self._read is None:
            self._read = memoryview(bytes.fromhex(self._end.ask("read", self._number)))
        return self._read

    def tensor(self) -> Any:
        return as_torch(self.memory, self.desc.dtype, self.desc.dims, self.desc.strides)

    def release(self) -> None:
        self._read = memoryview(b"")
        self._end.ask("release", self._number)


class FarConsumer(Consumer):
    """A CudaConsumer in the other end."""

    def __init__(self, end: OtherEnd, where: str, run_dir: Path, ordinal: int = 0) -> None:
        self._end = end
        self._number = end.ask("consumer", where, str(run_dir), ordinal)

    def open(self, desc: TensorDesc, frame: Any | None) -> InBuffer:
        number = self._end.ask("open", self._number, to_line(desc), frame is not None)
        return FarBuffer(self._end, number, desc)

    def peer_gone(self, incarnation: int) -> None:
        self._end.ask("peer_gone", self._number, incarnation)

    def close(self) -> None:
        self._end.ask("close", self._number)


class Server:
    """The other end's side."""

    def __init__(self) -> None:
        self.devices: dict[tuple[str, int], CudaDevice] = {}
        self.consumers: list[CudaConsumer] = []
        self.buffers: dict[int, InBuffer] = {}
        self.opened = 0
        self.producers: list[CudaProducer] = []
        self.stalled: list[threading.Event] = []

    def device(self, where: str, ordinal: int) -> CudaDevice:
        if (where, ordinal) not in self.devices:
            self.devices[where, ordinal] = CudaDevice(make_api(where, ordinal))
        return self.devices[where, ordinal]

    def consumer(self, where: str, run_dir: str, ordinal: int) -> int:
        self.consumers.append(CudaConsumer(self.device(where, ordinal), Path(run_dir)))
        return len(self.consumers) - 1

    def open(self, consumer: int, line: str, framed: bool) -> int:
        frame = b"" if framed else None
        self.opened += 1
        self.buffers[self.opened] = self.consumers[consumer].open(from_line(line), frame)
        return self.opened

    def order(self, number: int) -> None:
        """Order device work that reads it, and go on."""
        self.buffers[number].tensor()

    def read(self, number: int) -> str:
        return bytes(self.buffers[number].memory).hex()

    def stall(self, writes: Sequence[tuple[int, int]] = ()) -> None:
        """Order device work that goes on until :meth:`go_on`."""
        device = next(iter(self.devices.values()))
        assert isinstance(device.api, FakeCuda)
        end = threading.Event()
        self.stalled.append(end)
        device.api.launch(device.stream, lambda: end.wait() and None, writes=writes)

    def go_on(self) -> None:
        """What was stalled ends."""
        for end in self.stalled:
            end.set()

    def waits(self, consumer: int) -> int:
        """Owners' work that the device waits for."""
        return sum(len(m.waits) for m in self.consumers[consumer]._mappings.values())

    def compute(self, number: int) -> float:
        """Use the tensor on the device, as an engine would."""
        device = next(iter(self.devices.values()))
        with device.api.engine_scope(device.stream):
            return float(self.buffers[number].tensor().double().sum())

    def release(self, number: int, settle: bool = True) -> None:
        buffer = self.buffers.pop(number, None)
        if buffer is not None:
            buffer.release()
        if settle:
            self.settle()

    def hop(self, consumer: int, lines: Sequence[str]) -> None:
        """Open all of these, order work that reads them, and release them."""
        for number in [self.open(consumer, line, False) for line in lines]:
            self.order(number)
            self.release(number, False)
        self.settle()

    def forget_releases(self) -> None:
        """Plant a leak: from now on buffers are kept after their release."""
        kept = self.__dict__.setdefault("kept", [])
        real = self.open

        def open_and_keep(consumer: int, line: str, framed: bool) -> int:
            number = real(consumer, line, framed)
            kept.append(self.buffers[number])
            return number

        self.open = open_and_keep  # type: ignore[method-assign]

    def producer(self, where: str, run_dir: str, incarnation: int, ordinal: int = 0) -> int:
        device = self.device(where, ordinal)
        self.producers.append(CudaProducer(device, Path(run_dir), incarnation, 4 << 20, 8))
        return len(self.producers) - 1

    def send(self, producer: int, value: int, nbytes: int, stall: bool = False) -> str:
        """Fill a tensor of bytes; returns the line to open. ``stall``: its kernel does not end
        before :meth:`go_on`."""
        made = self.producers[producer]
        buffer = made.reserve("uint8", (nbytes,))
        if buffer is None:
            return ""
        if stall:
            self.stall([(buffer.pointer, nbytes)])
        with made.device.api.engine_scope(made.device.stream):
            if not stall:
                buffer.tensor().fill_(value)
        buffer.finish(lambda ns: None)  # it stays on the device
        return to_line(made.publish(buffer, [21])[0].desc)

    def send_some(self, producer: int, value: int, nbytes: int, most: int) -> list[str]:
        """As many as there are slots, ``most`` at most."""
        lines: list[str] = []
        while len(lines) < most and (line := self.send(producer, value, nbytes)):
            lines.append(line)
        return lines

    def sweep(self, producer: int) -> int:
        self.producers[producer].sweep()
        return self.producers[producer].outstanding()

    def consumer_gone(self, producer: int, incarnation: int) -> int:
        return self.producers[producer].peer_gone(incarnation)

    def close_producer(self, producer: int) -> None:
        self.producers[producer].close()

    def broken(self) -> str:
        return next((d.broken for d in self.devices.values() if d.broken), "")

    def grace(self, seconds: float) -> None:
        cuda_consumer.DEATH_GRACE_S = seconds

    def settle(self) -> None:
        for device in self.devices.values():
            assert device.completions.wait_idle(10)

    def peer_gone(self, consumer: int, incarnation: int) -> None:
        self.consumers[consumer].peer_gone(incarnation)

    def close(self, consumer: int) -> None:
        self.consumers[consumer].close()

    def forget(self, where: str) -> bool:
        """Close the devices there."""
        mine = [key for key in self.devices if key[0] == where]
        return all(device.close() for device in [self.devices.pop(key) for key in mine])

    def counts(self) -> dict[str, int]:
        """What the process holds: of the system, of Python, and of the driver as that counts it.

        Memory is what is the process's alone (``RssAnon``): pages of tensors that are looked at for
        the first time are no growth. ``device`` is the whole device's, in MiB.
        """
        gc.collect()
        words = dict(x.split(":", 1) for x in Path("/proc/self/status").read_text().splitlines())
        held: dict[str, int] = {}
        for device in self.devices.values():
            held["device"] = device.api.memory_used() >> 20
            if isinstance(device.api, FakeCuda):
                held |= device.api.counts()
        return {
            "fds": len(os.listdir("/proc/self/fd")),
            "private_kib": int(words["RssAnon"].split()[0]),
            "threads": int(words["Threads"]),
            "objects": len(gc.get_objects()),
            **held,
        }


LOOSE = {"private_kib": 4096, "objects": 200, "device": 32}
"""What may come and go without being a leak: an allocator's pools, caches, a driver's own. All
other counts have to stay what they were."""


def grown(before: Mapping[str, int], after: Mapping[str, int]) -> dict[str, int]:
    """What has grown by more than chance, between two :meth:`Server.counts` of a process."""
    growth = {name: after[name] - before[name] for name in before}
    return {name: more for name, more in growth.items() if more > LOOSE.get(name, 0)}


def hops(owner: OtherEnd, reader: OtherEnd, count: int, nbytes: int = 4096) -> None:
    """So many tensors from one end to the other, all slots' worth at a time."""
    while count > 0:
        lines = owner.ask("send_some", 0, count % 256, nbytes, min(count, 64))
        assert lines, "no slot came back"
        reader.ask("hop", 0, lines)
        count -= len(lines)


def serve(spec: Mapping[str, str]) -> int:
    """The other end's life."""
    server = Server()
    with socket.socket(socket.AF_UNIX) as sock:
        sock.connect(spec["address"])
        lines = sock.makefile("rw")
        for line in lines:
            call, *args = json.loads(line)
            try:
                answer: dict[str, Any] = {"value": getattr(server, call)(*args)}
            except BlockFlowError as exc:
                answer = {"error": [exc.code, exc.message]}
            lines.write(json.dumps(answer) + "\n")
            lines.flush()
    return 0
