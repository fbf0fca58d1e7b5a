"""The sync and the async client behind one face, for suites that run for both."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

from blockflow.client import AsyncClient, Client, SharedMemory
from blockflow.core.errors import BlockFlowError


class SyncFace:
    """The sync client as the suite calls it."""

    def __init__(self, address: str, **kw: Any) -> None:
        self._client = Client(address, **kw)
        self.submit = self._client.submit
        self.infer = self._client.infer
        self.tasks = self._client.tasks
        self.wait_ready = self._client.wait_ready
        self.counters = self._client.counters
        self.close = self._client.close

    @property
    def shared_memory(self) -> SharedMemory:
        return self._client.shared_memory


class AsyncFace:
    """The async client behind sync calls: an event loop in a thread of its own."""

    def __init__(self, address: str, **kw: Any) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="test-loop")
        self._thread.start()
        try:
            self._client = AsyncClient(address, **kw)
        except BlockFlowError:
            self._end_loop()
            raise
        self.submit = self._client.submit
        self.counters = self._client.counters

    @property
    def shared_memory(self) -> SharedMemory:
        return self._client.shared_memory

    def _call(self, coroutine: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result(20)

    def infer(self, *a: Any, **kw: Any) -> Any:
        return self._call(self._client.infer(*a, **kw))

    def tasks(self, **kw: Any) -> Any:
        return self._call(self._client.tasks(**kw))

    def wait_ready(self, *a: Any, **kw: Any) -> Any:
        return self._call(self._client.wait_ready(*a, **kw))

    def close(self) -> None:
        if self._thread.is_alive():
            self._call(self._client.close())
            self._end_loop()

    def _end_loop(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()
