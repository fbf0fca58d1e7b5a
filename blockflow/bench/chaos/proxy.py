"""Proxy: stands before the Dispatcher's port for some clients, and resets or holds what passes."""

from __future__ import annotations

import selectors
import socket
import struct
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from blockflow.bench.fuzz import zmtp

_CHUNK = 1 << 16
_LOOK_S = 0.05
_RESET = struct.pack("ii", 1, 0)
_PATIENCE_S = 5.0


class Proxy:
    """Forwards bytes both ways; a thread per connection and one that accepts.

    Args:
        target: ``tcp://HOST:PORT`` of who listens; each connection here makes one to it, so that a
            new Dispatcher at the same address is found.

    Attributes:
        endpoint: for clients.
        connections: how many there have been.
    """

    def __init__(self, target: str) -> None:
        self._target = zmtp.place(target)
        self._lock = threading.Lock()
        self._pairs: dict[int, tuple[socket.socket, socket.socket]] = {}
        self._threads: list[threading.Thread] = []
        self._held_until_s = 0.0
        self._stop = threading.Event()
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._listener.settimeout(_LOOK_S)
        self.endpoint = f"tcp://127.0.0.1:{self._listener.getsockname()[1]}"
        self.connections = 0
        self._spawn(self._accept)

    def reset(self) -> int:
        """End all connections with a TCP reset to both sides: what is under way is lost. Returns
        how many there were."""
        with self._lock:
            pairs = list(self._pairs.values())
            for pair in pairs:
                for one in pair:
                    with suppress(OSError):  # it has just ended by itself
                        one.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
                        one.shutdown(socket.SHUT_RD)  # wakes its thread, which closes it
        return len(pairs)

    def hold(self, seconds: float) -> int:
        """For so long nothing passes, and nothing is lost. Returns how many connections there
        are."""
        self._held_until_s = time.monotonic() + seconds
        with self._lock:
            return len(self._pairs)

    def close(self) -> None:
        """End everything."""
        self._stop.set()
        self._listener.close()
        self.reset()
        for thread in self._threads:
            thread.join()

    def _spawn(self, work: Callable[..., None], *given: Any) -> None:
        thread = threading.Thread(target=work, args=given, name="chaos-proxy", daemon=True)
        thread.start()
        self._threads.append(thread)

    def _accept(self) -> None:
        while not self._stop.is_set():
            try:
                near, _ = self._listener.accept()
            except TimeoutError:
                continue
            except OSError:  # it was closed
                return
            try:
                far = socket.create_connection(self._target, timeout=_PATIENCE_S)
            except OSError:  # nobody listens there just now
                near.close()
                continue
            for one in (near, far):
                one.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                one.settimeout(_PATIENCE_S)
            self.connections += 1
            self._spawn(self._carry, self.connections, near, far)

    def _carry(self, number: int, near: socket.socket, far: socket.socket) -> None:
        with self._lock:
            self._pairs[number] = (near, far)
        with near, far:
            with suppress(OSError), selectors.DefaultSelector() as selector:
                selector.register(near, selectors.EVENT_READ, far)
                selector.register(far, selectors.EVENT_READ, near)
                while not self._stop.is_set():
                    ready = selector.select(_LOOK_S)
                    self._stop.wait(max(0.0, self._held_until_s - time.monotonic()))
                    if not all(self._pass(key.fileobj, key.data) for key, _ in ready):
                        break  # what the other side has sent meanwhile is lost, as in a reset
            with self._lock:  # before they are closed: their numbers may be others' then
                del self._pairs[number]

    def _pass(self, source: Any, sink: socket.socket) -> bool:
        """What there is; False: it has ended."""
        data = source.recv(_CHUNK)
        sink.sendall(data)
        return bool(data)
