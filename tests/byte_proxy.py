"""A TCP proxy that holds, loses, slices and cuts what passes, and keeps a ledger of every byte.

It knows as much of ZMTP as it needs to lose one whole message and leave the connection well: the
greeting is 64 bytes, then come frames of flags, length and body (rfc.zeromq.org/spec/23). A test
asks the ledger whether its fault was really injected.
"""

from __future__ import annotations

import asyncio
import hashlib
import socket
import struct
import threading
from collections.abc import Coroutine, Iterator
from dataclasses import dataclass, field
from typing import Any, Literal, Self

GREETING_BYTES = 64
_MORE, _LONG, _COMMAND = 1, 2, 4
_CHUNK = 1 << 16
_PATIENCE_S = 30.0
_WRITES_S = 16
"""Of a slow link."""

Direction = Literal["up", "down"]
"""``up`` is from who connects to who listens."""


@dataclass(frozen=True)
class Unit:
    """A piece of the greeting, a command, or a whole message."""

    data: bytes
    message: bool


class Framer:
    """Cuts one direction of a ZMTP 3 connection into units; what is incomplete waits."""

    def __init__(self) -> None:
        self._buffer = bytearray()
        self._greeting = GREETING_BYTES
        self._parts = 0

    def feed(self, data: bytes) -> Iterator[Unit]:
        self._buffer += data
        while (end := self._end()) is not None:
            size, message = end
            unit = Unit(bytes(self._buffer[:size]), message)
            del self._buffer[:size]
            self._parts = 0
            yield unit

    def _end(self) -> tuple[int, bool] | None:
        """Length and kind of the first unit, once it is complete. ``_parts`` is what of it is."""
        buffer = self._buffer
        if self._greeting:  # either side sends the rest of it when it has seen the other's begin
            size = min(len(buffer), self._greeting)
            self._greeting -= size
            return (size, False) if size else None
        while True:
            at = self._parts
            if len(buffer) < at + 2:
                return None
            flags = buffer[at]
            head, form = (9, ">Q") if flags & _LONG else (2, ">B")
            if len(buffer) < at + head:
                return None
            end = at + head + struct.unpack_from(form, buffer, at + 1)[0]
            if len(buffer) < end:
                return None
            if flags & _COMMAND and at == 0:
                return end, False
            if not flags & (_MORE | _COMMAND):  # a heartbeat may stand between two parts
                return end, True
            self._parts = end


@dataclass
class Rule:
    """What happens to all that goes one way.

    Attributes:
        hold: it is read and kept, until the rule changes or the connection ends.
        swallow: it is read and thrown away; such a connection is of no more use.
        lose: so many whole messages more are thrown away.
        slice_bytes: it is passed on in writes of so many bytes; 0 = as it comes.
        bytes_s: no more than so many bytes a second are passed on, as by a slow link; 0 = as
            quickly as they are taken.
    """

    hold: bool = False
    swallow: bool = False
    lose: int = 0
    slice_bytes: int = 0
    bytes_s: int = 0


@dataclass
class Account:
    """One direction's bytes; ``lost`` were thrown away, what is neither that nor delivered is
    held. The digests are of all that came, and of all that went out or was lost, in order."""

    received: int = 0
    delivered: int = 0
    lost: int = 0
    writes: int = 0
    messages: int = 0
    lost_messages: int = 0
    came: Any = field(default_factory=hashlib.sha256)
    went: Any = field(default_factory=hashlib.sha256)

    @property
    def held(self) -> int:
        return self.received - self.delivered - self.lost

    def findings(self) -> list[str]:
        """What is not as if the proxy were not there."""
        out = []
        if self.lost:
            out.append(f"{self.lost} bytes lost")
        if self.held:
            out.append(f"{self.held} bytes not delivered")
        elif self.came.digest() != self.went.digest():
            out.append("bytes altered")
        return out


class _Way:
    """One direction of one connection: a task reads, a task writes."""

    def __init__(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, proxy: ByteProxy, way: str
    ) -> None:
        self._reader = reader
        self._writer = writer
        self._proxy = proxy
        self._way = way
        self._framer = Framer()
        self._queue: asyncio.Queue[Unit | None] = asyncio.Queue()
        self.account = Account()

    async def read(self) -> None:
        account = self.account
        try:
            while data := await self._reader.read(_CHUNK):
                account.received += len(data)
                account.came.update(data)
                for unit in self._framer.feed(data):
                    account.messages += unit.message
                    self._queue.put_nowait(unit)
        except OSError:
            pass
        self._queue.put_nowait(None)

    async def write(self) -> None:
        account = self.account
        while True:
            unit = await self._queue.get()
            await self._proxy.gate(self._way, unit is None)
            if unit is None:
                return
            rule = self._proxy.rules[self._way]
            if rule.swallow or (rule.lose and unit.message):
                rule.lose -= bool(rule.lose) and unit.message
                account.lost += len(unit.data)
                account.lost_messages += unit.message
                account.went.update(unit.data)
                continue
            size = rule.slice_bytes or rule.bytes_s // _WRITES_S or len(unit.data)
            for start in range(0, len(unit.data), size):
                await self._put(unit.data[start : start + size])
                if rule.bytes_s:
                    await asyncio.sleep(min(size, len(unit.data) - start) / rule.bytes_s)

    async def _put(self, data: bytes) -> None:
        self._writer.write(data)
        await self._writer.drain()
        self.account.delivered += len(data)
        self.account.writes += 1
        self.account.went.update(data)


class ByteProxy:
    """Between whoever connects to :attr:`endpoint` and ``target`` (``tcp://host:port``).

    Its rules hold for all connections, also later ones. Use it as a context manager; its methods
    may be called from any thread, and return when what they do is done.
    """

    def __init__(self, target: str) -> None:
        host, _, port = target.removeprefix("tcp://").rpartition(":")
        self._target = (host, int(port))
        self.rules: dict[str, Rule] = {"up": Rule(), "down": Rule()}
        self._changed = asyncio.Event()
        self._ways: dict[str, list[_Way]] = {"up": [], "down": []}
        self._tasks: dict[asyncio.Task[None], tuple[asyncio.StreamWriter, ...]] = {}
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="byte-proxy")
        self._thread.start()
        self._server = self._call(asyncio.start_server(self._serve, "127.0.0.1", 0))
        self.endpoint = f"tcp://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # --- faults ----------------------------------------------------------------------------------

    def rule(self, *ways: Direction, **fields: Any) -> None:
        """From now on, what goes these ways (by default both) meets ``Rule(**fields)``."""

        async def change() -> None:
            for way in ways or ("up", "down"):
                self.rules[way] = Rule(**fields)
            self._changed.set()
            self._changed = asyncio.Event()

        self._call(change())

    def reset(self) -> int:
        """End all connections with a TCP reset on both sides; what was held is lost with them.
        Returns how many there were."""
        return self._call(self._reset())

    def begin_anew(self) -> int:
        """:meth:`reset`, and no rule for what comes then. In one step: a connection that begins
        between the two would lose its first bytes, and its ends wait half a minute for them."""

        async def both() -> int:
            for way in self.rules:
                self.rules[way] = Rule()
            return await self._reset()  # ends what there is before anything else runs

        return self._call(both())

    # --- the ledger ------------------------------------------------------------------------------

    @property
    def connections(self) -> int:
        """How many there have been."""
        return len(self._ways["up"])

    def total(self, way: Direction, what: str) -> int:
        """Sum of a figure of :class:`Account` over all connections."""
        return sum(getattr(w.account, what) for w in self._ways[way])

    def findings(self) -> list[str]:
        """What is not as if the proxy were not there; empty after slicing, or nothing at all."""
        return [
            f"{k}: {f}"
            for k, ways in self._ways.items()
            for w in ways
            for f in w.account.findings()
        ]

    # --- inside ----------------------------------------------------------------------------------

    async def gate(self, way: str, end: bool) -> None:
        """Wait while nothing may pass; the end of a connection is lost with what is swallowed."""
        while (rule := self.rules[way]).hold or (end and rule.swallow):
            await self._changed.wait()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            far_reader, far_writer = await asyncio.open_connection(*self._target)
        except OSError:
            writer.close()
            return
        pair = (writer, far_writer)
        for one in pair:
            one.get_extra_info("socket").setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._spawn(self._carry(reader, far_writer, "up"), pair)
        self._spawn(self._carry(far_reader, writer, "down"), pair)

    def _spawn(
        self, work: Coroutine[Any, Any, None], pair: tuple[asyncio.StreamWriter, ...]
    ) -> None:
        task = self._loop.create_task(work)
        self._tasks[task] = pair
        task.add_done_callback(lambda t: self._tasks.pop(t, None))

    async def _carry(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, name: str
    ) -> None:
        way = _Way(reader, writer, self, name)
        self._ways[name].append(way)
        pumping = asyncio.ensure_future(way.read())
        try:
            await way.write()
        except OSError:
            pass
        finally:
            pumping.cancel()
            writer.close()

    async def _reset(self) -> int:
        pairs = set(self._tasks.values())
        tasks = list(self._tasks)
        for pair in pairs:
            for writer in pair:
                sock = writer.get_extra_info("socket")
                if sock is not None and sock.fileno() >= 0:
                    linger = struct.pack("ii", 1, 0)
                    sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
                writer.transport.abort()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        return len(pairs)

    def close(self) -> None:
        """End everything. Idempotent."""
        if self._loop.is_closed():
            return

        async def end() -> None:
            self._server.close()
            await self._reset()
            await asyncio.sleep(0)  # the transports' own last callbacks

        self._call(end())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def _call(self, work: Coroutine[Any, Any, Any]) -> Any:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(_PATIENCE_S)
