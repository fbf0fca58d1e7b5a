"""The clients of ``make bench-overload``, in a process of their own (:mod:`other_process`).

In the benchmark's own the control plane works, and who watches the system's memory: these would
keep the interpreter from the clients for milliseconds at a time, and a request that was refused at
once would seem to have waited.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import astuple, replace
from functools import partial
from random import Random
from typing import Any

import numpy as np

from blockflow.bench.chaos.lag import Lag
from blockflow.bench.other_process import OtherProcess, Say
from blockflow.bench.overload_figures import Ended
from blockflow.client import Client
from blockflow.core.errors import BlockFlowError
from blockflow.core.model import TensorSpec

TASK = "work"
SPEC = TensorSpec("float32", ("rows", 1024))
_CALLERS = 12
_SEED = 1
_SPARE_S = 60.0
"""Beyond a load's own time, for whatever is late in it."""


class Clients(OtherProcess):
    """Seen from the benchmark's process.

    Args:
        endpoint: where clients are served.
        seconds: of a load, and of what finds the capacity.
        deadline_s: of every request of a load.

    Raises:
        BlockFlowError: they cannot be served.
    """

    def __init__(self, endpoint: str, seconds: float, deadline_s: float) -> None:
        order = {"endpoint": endpoint, "seconds": seconds, "deadline_s": deadline_s}
        wait_s = seconds + deadline_s + _SPARE_S
        super().__init__("blockflow.bench.overload_clients", order, wait_s=wait_s)

    def capacity(self) -> float:
        """Answers per second to callers that each wait for theirs."""
        self.ask()
        return float(self.answer()["per_s"])

    def offer(self, times: float, per_s: float) -> list[Ended]:
        """Send at random times, ``per_s`` a second; returns when every request has ended."""
        self.ask(times=times, per_s=per_s)
        return [Ended(*one) for one in self.answer()["ended"]]


def capacity(client: Client, seconds: float) -> float:
    """See :meth:`Clients.capacity`."""
    x = _input()
    begin = time.monotonic()
    end = begin + seconds

    def call(_: int) -> int:
        done = 0
        while time.monotonic() < end:
            client.infer(TASK, x)
            done += 1
        return done

    with ThreadPoolExecutor(_CALLERS) as callers:
        done = sum(callers.map(call, range(_CALLERS)))
    return done / (time.monotonic() - begin)


def offer(
    client: Client, times: float, per_s: float, seconds: float, deadline_s: float
) -> list[Ended]:
    """See :meth:`Clients.offer`; ``times`` draws when requests are sent."""
    x, rng = _input(), Random(f"{_SEED}/{times}")
    ended: list[Ended] = []
    noted = threading.Semaphore(0)
    lag = Lag()
    begin, at, sent = time.monotonic(), 0.0, 0

    def finish(future: Future[Any], due_s: float, late_s: float) -> None:
        ended.append(Ended(due_s, time.monotonic() - begin, outcome_of(future), late_s))
        noted.release()

    while (at := at + rng.expovariate(per_s)) < seconds:
        pause = begin + at - time.monotonic()
        if pause > 0:
            time.sleep(pause)
        late_s = time.monotonic() - begin - at
        future = client.submit(TASK, x, deadline_s=deadline_s)
        future.add_done_callback(partial(finish, due_s=at, late_s=late_s))
        sent += 1
    for _ in range(sent):
        noted.acquire()
    book = lag.stop()

    def excused_s(e: Ended) -> float:
        """After a standstill all that was due meanwhile is sent at once: who was late with it was
        not the system, nor has anybody offered that load."""
        return e.lag_s + book.allowance(begin + e.due_s + e.lag_s, begin + e.done_s)

    return [replace(e, lag_s=excused_s(e)) for e in ended]


def outcome_of(future: Future[Any]) -> str:
    """One of ``OUTCOMES``."""
    error = future.exception()
    if error is None:
        return "ok"
    code = error.code if isinstance(error, BlockFlowError) else ""
    return {"OVERLOADED": "rejected", "DEADLINE_EXCEEDED": "late"}.get(code, "failed")


def _input() -> np.ndarray[Any, np.dtype[np.float32]]:
    return np.ones((1, 1024), np.float32)


def obey(orders: Iterator[dict[str, Any]], say: Say) -> None:
    plan = next(orders)
    seconds, deadline_s = float(plan["seconds"]), float(plan["deadline_s"])
    with Client(plan["endpoint"]) as client:
        client.wait_ready([TASK])
        say({})
        for order in orders:
            if order:
                ended = offer(client, order["times"], order["per_s"], seconds, deadline_s)
                say({"ended": [[*astuple(e)] for e in ended]})
            else:
                say({"per_s": capacity(client, seconds)})
