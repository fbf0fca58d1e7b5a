"""``make bench-neighbours``: what a task that asks too much of its own block does to others.

Two tasks share a trunk. One has a slow head and is offered three times what that can do; the other
has a quick one, and one request of it at a time is under way. Its times beside the first one's
overload are laid beside its times alone, round by round in turns: in workers of their own, with
both heads in one worker, and with whole tensors in the place of handles.
"""

from __future__ import annotations

import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console

from blockflow.bench.interrupts import orderly
from blockflow.bench.options import SOUND, make_parser, result_path
from blockflow.bench.own_system import own_settings
from blockflow.bench.results import (
    LESS_IS_BETTER,
    Figure,
    ResultFile,
    figure_table,
    interval_figure,
    make_command,
)
from blockflow.bench.statistics import percentile, ratio_interval
from blockflow.bench.turns import in_turn
from blockflow.client import Client
from blockflow.control.system import System
from blockflow.core.model import TensorSpec
from blockflow.repository.echo import save_echo
from blockflow.repository.repository import BlockRepository

SPEC = TensorSpec("float32", ("rows", 1000))
ROW = np.zeros((1, 1000), np.float32)
APART, TOGETHER, WHOLE = "workers apart", "heads in one worker", "whole tensors"
WAYS = (APART, TOGETHER, WHOLE)
ALONE, BESIDE = "alone", "beside an overload"
TIME, RATIO, OFFERED = "neighbour", "neighbour, of alone", "slow task"
_DEADLINE_S = 30.0
"""So long that everything that is admitted waits, and is not given up."""


@dataclass(frozen=True, slots=True)
class Plan:
    """What to do.

    Attributes:
        pairs: of rounds, alone and beside the overload.
        fill_s: that the slow task's queue grows before a round.
        slow_ms: that its head takes per row; the quick one's takes a fiftieth of that.
        times: what it is offered, as a multiple of what its head can do.
    """

    pairs: int = 6
    seconds: float = 3.0
    fill_s: float = 1.0
    slow_ms: float = 50.0
    times: float = 3.0


QUICK = Plan(pairs=1, seconds=0.5, fill_s=0.3, slow_ms=20.0)


def topology(way: str) -> dict[str, Any]:
    """The two tasks on their trunk."""
    worker = {"worker": "heads"} if way == TOGETHER else {}
    return {
        "mode": "zeromq" if way == WHOLE else "tensormq",
        "blocks": [{"name": "trunk"}, {"name": "slow", **worker}, {"name": "quick", **worker}],
        "tasks": {name: {"path": ["trunk", name]} for name in ("slow", "quick")},
        "oversubscribe": True,  # nobody computes: echoes sleep
    }


class Greedy:
    """Sends on, whether answers come or not.

    Args:
        client: of its own.
        rate: requests per second.

    Attributes:
        ended: outcomes by their code.
    """

    def __init__(self, client: Client, rate: float) -> None:
        self._client = client
        self._rate = rate
        self.ended: dict[str, int] = {}

    @contextmanager
    def sending(self, fill_s: float) -> Iterator[None]:
        """While this lasts; what is under way at its end is cancelled."""
        over = threading.Event()
        sent: list[Future[Any]] = []
        thread = threading.Thread(target=self._send, args=(over, sent), daemon=True)
        thread.start()
        try:
            over.wait(fill_s)
            yield
        finally:
            over.set()
            thread.join()
            for pending in sent:
                if not pending.cancel():
                    code = getattr(pending.exception(), "code", "ok")
                    self.ended[code] = self.ended.get(code, 0) + 1

    def _send(self, over: threading.Event, sent: list[Future[Any]]) -> None:
        begin = time.monotonic()
        while not over.wait(max(0.0, begin + len(sent) / self._rate - time.monotonic())):
            sent.append(self._client.submit("slow", ROW, deadline_s=_DEADLINE_S))


def ask(client: Client, seconds: float) -> list[float]:
    """Milliseconds of one request after the other; at least one."""
    took: list[float] = []
    end = time.monotonic() + seconds
    while not took or time.monotonic() < end:
        begin = time.monotonic()
        client.infer("quick", ROW, deadline_s=_DEADLINE_S)
        took.append(1e3 * (time.monotonic() - begin))
    return took


def measure(plan: Plan, say: Any) -> list[Figure]:
    """All ways."""
    found: list[Figure] = []
    with tempfile.TemporaryDirectory(prefix="bf-bench-") as folder:
        root = Path(folder)
        repository = BlockRepository(root / "blocks")
        save_echo(repository, "trunk", SPEC)
        save_echo(repository, "slow", SPEC, settings={"row_ms": plan.slow_ms})
        save_echo(repository, "quick", SPEC, settings={"row_ms": plan.slow_ms / 50})
        with System(own_settings(root)) as system:
            for way in WAYS:
                system.apply(topology(way))
                with Client(system.client_endpoint) as greedy, Client(system.client_endpoint) as c:
                    sender = Greedy(greedy, plan.times * 1e3 / plan.slow_ms)
                    rounds = _rounds(plan, c, sender)
                new = figures(way, rounds)
                for code, count in sender.ended.items():
                    new.append(Figure.of(OFFERED, f"{way}: {code}", count, "", count, batch=1))
                say(f"{way}: {', '.join(f'{f.value:.3g} {f.unit}' for f in new[:2])}")
                found += new
    return found


def _rounds(plan: Plan, client: Client, sender: Greedy) -> dict[str, list[list[float]]]:
    def beside() -> list[float]:
        with sender.sending(plan.fill_s):
            found = ask(client, plan.seconds)
        ask(client, plan.fill_s)  # until the slow head is done with what it has begun
        return found

    ask(client, plan.seconds / 4)
    ways: dict[str, Callable[[], list[float]]] = {
        ALONE: partial(ask, client, plan.seconds),
        BESIDE: beside,
    }
    return in_turn(ways, plan.pairs, lambda: None)


def figures(way: str, rounds: Mapping[str, Sequence[Sequence[float]]]) -> list[Figure]:
    """Median and 99th percentile of the rounds, and what the overload makes of them."""
    out: list[Figure] = []
    for p in (50, 99):
        each = {name: [percentile(r, p) for r in those] for name, those in rounds.items()}
        for name, values in each.items():
            out.append(interval_figure(f"{TIME}, p{p}", f"{way}: {name}", 1, values, "ms"))
        ratio = ratio_interval(each[ALONE], each[BESIDE])
        out.append(interval_figure(f"{RATIO}, p{p}", way, 1, ratio, "x", LESS_IS_BETTER))
    return out


@orderly
def main(arguments: list[str]) -> int:
    """Measure, print the table, write the figures."""
    args = make_parser("neighbours", __doc__, quick=SOUND).parse_args(arguments)
    console = Console()
    found = measure(
        QUICK if args.quick else Plan(), lambda line: console.print(line, highlight=False)
    )
    console.print(figure_table("neighbours", found))
    path = result_path(args, "neighbours", whole=True)
    ResultFile(path, "neighbours", make_command("bench-neighbours", arguments)).write(found)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
