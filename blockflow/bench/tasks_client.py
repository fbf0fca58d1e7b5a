"""The client of ``make bench-tasks``, in a process of its own (:mod:`other_process`): in the
benchmark's the control plane works, and would keep the interpreter from it."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from blockflow.bench.closing import Closing
from blockflow.bench.other_process import OtherProcess, Say
from blockflow.client import Client
from blockflow.core.errors import RequestError

_PATIENCE_S = 60.0


class TaskClient(Closing):
    """Seen from the benchmark's process.

    Args:
        endpoint: where clients are served.

    Raises:
        BlockFlowError: it cannot be started.
    """

    def __init__(self, endpoint: str) -> None:
        order = {"endpoint": endpoint}
        self._other = OtherProcess("blockflow.bench.tasks_client", order)

    def ask(
        self, tasks: Sequence[str], requests: int, unknown: Sequence[str]
    ) -> dict[str, list[float]]:
        """Milliseconds of: the ``first`` request of each of these tasks, further ``request``s for
        them in turn, and each ``refusal`` for tasks that are not there; one at a time.

        Raises:
            BlockFlowError: a request that should have been served was not.
        """
        self._other.ask(tasks=tasks, requests=requests, unknown=unknown)
        found = self._other.answer()
        return {name: [float(ms) for ms in found[name]] for name in ("first", "request", "refusal")}

    def close(self) -> None:
        """End the process."""
        self._other.close()


def serve(client: Client, order: Mapping[str, Any]) -> dict[str, list[float]]:
    """See :meth:`TaskClient.ask`."""
    tasks, x = list(order["tasks"]), np.zeros((1, 4), np.float32)
    client.wait_ready(tasks, timeout_s=_PATIENCE_S)

    def timed(act: Callable[[], object]) -> float:
        began = time.perf_counter()
        act()
        return (time.perf_counter() - began) * 1e3

    def refused(name: str) -> None:
        try:
            client.infer(name, x)
        except RequestError as e:
            if e.code == "UNKNOWN_TASK":
                return
            raise
        raise RequestError("INVALID_REQUEST", f"{name} is not there, and has answered")

    first = [timed(lambda: client.infer(name, x)) for name in tasks]  # noqa: B023 (at once)
    further = (tasks[n % len(tasks)] for n in range(order["requests"]))
    request = [timed(lambda: client.infer(name, x)) for name in further]  # noqa: B023
    refusal = [timed(lambda: refused(name)) for name in order["unknown"]]  # noqa: B023
    return {"first": first, "request": request, "refusal": refusal}


def obey(orders: Iterator[dict[str, Any]], say: Say) -> None:
    endpoint = next(orders)["endpoint"]
    say({})
    for order in orders:
        with Client(endpoint) as client:
            say(serve(client, order))
