"""The client of ``make bench-tasks``, in a process of its own (:mod:`other_process`): in the
benchmark's the control plane works, and would keep the interpreter from it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from blockflow.bench.other_process import OtherProcess, Say
from blockflow.bench.turns import took_ms
from blockflow.client import Client
from blockflow.core.errors import RequestError

_PATIENCE_S = 60.0


class TaskClient(OtherProcess):
    """Seen from the benchmark's process.

    Raises:
        BlockFlowError: it cannot be started.
    """

    def __init__(self, endpoint: str) -> None:
        super().__init__("blockflow.bench.tasks_client", {"endpoint": endpoint})

    def times(
        self, tasks: Sequence[str], requests: int, unknown: Sequence[str]
    ) -> dict[str, list[float]]:
        """Milliseconds of: the ``first`` request of each of these tasks, further ``request``s for
        them in turn, and each ``refusal`` for tasks that are not there; one at a time.

        Raises:
            BlockFlowError: a request that should have been served was not.
        """
        self.ask(tasks=tasks, requests=requests, unknown=unknown)
        found = self.answer()
        return {name: [float(ms) for ms in found[name]] for name in ("first", "request", "refusal")}


def serve(client: Client, order: Mapping[str, Any]) -> dict[str, list[float]]:
    """See :meth:`TaskClient.times`."""
    tasks, x = list(order["tasks"]), np.zeros((1, 4), np.float32)
    client.wait_ready(tasks, timeout_s=_PATIENCE_S)

    def refused(name: str) -> None:
        try:
            client.infer(name, x)
        except RequestError as e:
            if e.code == "UNKNOWN_TASK":
                return
            raise
        raise RequestError("INVALID_REQUEST", f"{name} is not there, and has answered")

    first = [took_ms(lambda: client.infer(name, x)) for name in tasks]  # noqa: B023 (at once)
    further = (tasks[n % len(tasks)] for n in range(order["requests"]))
    request = [took_ms(lambda: client.infer(name, x)) for name in further]  # noqa: B023
    refusal = [took_ms(lambda: refused(name)) for name in order["unknown"]]  # noqa: B023
    return {"first": first, "request": request, "refusal": refusal}


def obey(orders: Iterator[dict[str, Any]], say: Say) -> None:
    endpoint = next(orders)["endpoint"]
    say({})
    for order in orders:
        with Client(endpoint) as client:
            say(serve(client, order))
