"""The client of ``make bench-front-door``, in a process of its own (:mod:`other_process`): what it
uses is its own."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from threading import Semaphore
from typing import Any

import numpy as np

from blockflow.bench.other_process import OtherProcess, Say
from blockflow.client import Client

TASK = "echo"
_PATIENCE_S = 60.0


class FrontDoorClient(OtherProcess):
    """Seen from the benchmark's process.

    Raises:
        BlockFlowError: it cannot be started.
    """

    def __init__(self, endpoint: str) -> None:
        super().__init__("blockflow.bench.front_door_client", {"endpoint": endpoint})

    def took_s(self, nbytes: int, outstanding: int, requests: int) -> float:
        """Seconds that so many requests with an input of ``nbytes`` took, ``outstanding`` at once.

        Raises:
            BlockFlowError: of a request that was not served.
        """
        self.ask(nbytes=nbytes, outstanding=outstanding, requests=requests)
        return float(self.answer()["took_s"])


def serve(client: Client, order: Mapping[str, Any]) -> float:
    """See :meth:`FrontDoorClient.took_s`."""
    x = np.zeros((1, order["nbytes"]), np.uint8)
    room, failed = Semaphore(order["outstanding"]), []

    def ended(pending: Any) -> None:
        error = pending.exception()
        if error is not None:
            failed.append(error)
        room.release()

    begin = time.monotonic()
    for _ in range(order["requests"]):
        room.acquire()
        client.submit(TASK, x).add_done_callback(ended)
    for _ in range(order["outstanding"]):
        room.acquire()
    if failed:
        raise failed[0]
    return time.monotonic() - begin


def obey(orders: Iterator[dict[str, Any]], say: Say) -> None:
    with Client(next(orders)["endpoint"]) as client:
        client.wait_ready(TASK, timeout_s=_PATIENCE_S)
        say({})
        for order in orders:
            say({"took_s": serve(client, order)})
