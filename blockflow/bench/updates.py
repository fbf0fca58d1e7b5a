"""Updates under load: is any request lost, failed, or answered by two versions at once?

Two blocks in a row, each a process of its own. Every update replaces both by a new version that
adds its number to what passes, the second a thousandfold: an answer that two versions had a hand in
gives itself away by its value, and so does one that bears the number of another epoch. Clients ask
without a pause all the while and keep their own ledger.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console

from blockflow.bench import options
from blockflow.bench.interrupts import orderly
from blockflow.bench.own_system import own_settings, workplace
from blockflow.bench.results import Figure, ResultFile, figure_table, latency_figure, make_command
from blockflow.client import Client
from blockflow.control.system import System
from blockflow.core.errors import BlockFlowError
from blockflow.core.model import TensorSpec
from blockflow.repository.echo import save_echo
from blockflow.repository.repository import BlockRepository

SPEC = TensorSpec("float32", ("rows", 4))
TASK = "t"
SECOND = 1000
"""What the second block's version counts for; the first one's must stay below."""

BODY: Mapping[str, Any] = {"blocks": ["first", "second"], "tasks": {TASK: ["first", "second"]}}
_DEADLINE_S = 30.0
_UPDATES = 100


@dataclass(slots=True)
class Ledger:
    """What the clients were told, judged against what was true.

    Attributes:
        versions: epoch -> version of both blocks in it.
        failed: errors by code.
        mixed: answers that no epoch can have given as it says it did.
        served: versions that have answered.
    """

    versions: dict[int, int] = field(default_factory=dict)
    answered: int = 0
    failed: Counter[str] = field(default_factory=Counter)
    mixed: list[str] = field(default_factory=list)
    latency_ms: list[float] = field(default_factory=list)
    served: set[int] = field(default_factory=set)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def result(self, epoch: int, added: float, latency_ms: float) -> None:
        """An answer came: ``added`` is by how much it differs from its input."""
        version = self.versions.get(epoch)
        with self._lock:
            self.answered += 1
            self.latency_ms.append(latency_ms)
            if version is None or added != version * (SECOND + 1):
                second, first = divmod(added, SECOND)
                self.mixed.append(f"epoch {epoch}: versions {first:g} and {second:g}")
            else:
                self.served.add(version)

    def error(self, code: str) -> None:
        with self._lock:
            self.answered += 1
            self.failed[code] += 1

    @property
    def clean(self) -> bool:
        """Nothing failed and nothing was mixed."""
        return not self.failed and not self.mixed


@dataclass(slots=True)
class Run:
    """What a run has found: the ledger and the documents of the updates."""

    ledger: Ledger
    updates: list[dict[str, Any]]


def save_version(repository: BlockRepository, version: int) -> None:
    """Store both blocks in a version of their own, which becomes the current one."""
    for name, weight in (("first", 1), ("second", SECOND)):
        settings = {"add": version * weight}
        save_echo(repository, name, SPEC, settings=settings, version=str(version))


def ask(address: str, ledger: Ledger, stop: threading.Event) -> None:
    """One client: asks, waits for the answer, asks again."""
    x = np.arange(4, dtype=np.float32).reshape(1, 4)
    with Client(address) as client:
        while not stop.is_set():
            try:
                result = client.infer(TASK, x, deadline_s=_DEADLINE_S)
            except BlockFlowError as e:
                ledger.error(e.code)
                continue
            added = {float(v) for v in (result.value - x).ravel()}
            value = added.pop() if len(added) == 1 else float("nan")
            ledger.result(result.epoch, value, result.rtt_ms)


def run(
    folder: Path,
    updates: int,
    clients: int = 4,
    advance: Callable[[], None] = lambda: None,
    system: System | None = None,
) -> Run:
    """Apply ``updates`` updates one after the other under load.

    Args:
        folder: where blocks and state go.
        updates: how many, less than :data:`SECOND`.
        clients: that ask at once.
        advance: called after each.
        system: not started yet, over ``folder / "blocks"``; by default one of its own.

    Raises:
        TopologyError: an update failed.
    """
    repository = BlockRepository(folder / "blocks")
    ledger, documents = Ledger(), []
    stop = threading.Event()
    with ExitStack() as stack:
        running = stack.enter_context(system or System(own_settings(folder)))
        for version in range(1, updates + 2):
            save_version(repository, version)
            # Before the flip: answers of the new epoch come before the update says that it is done.
            ledger.versions[version] = version
            outcome = running.apply(BODY)
            if version == 1:
                asking = [
                    threading.Thread(target=ask, args=(running.client_endpoint, ledger, stop))
                    for _ in range(clients)
                ]
                stack.callback(_end, asking, stop)
                for thread in asking:
                    thread.start()
            else:
                documents.append(outcome["update"])
                advance()
            _await_answer(ledger, version, asking)
    return Run(ledger, documents)


def _await_answer(ledger: Ledger, version: int, asking: Sequence[threading.Thread]) -> None:
    """Every version shall have served: the next update comes when this one has answered."""
    while version not in ledger.served and ledger.clean and any(t.is_alive() for t in asking):
        for thread in asking:
            thread.join(0.005)


def _end(asking: Sequence[threading.Thread], stop: threading.Event) -> None:
    stop.set()
    for thread in asking:
        thread.join()


def figures(found: Run) -> list[Figure]:
    """Counts, and how long updates, their flips and requests took."""
    ledger = found.ledger

    def count(name: str, n: int, unit: str) -> Figure:
        return Figure.of(name, TASK, float(n), unit, n)

    times = {
        "update": [float(u["duration_ms"]) for u in found.updates],
        "flip": [float(u["phases_ms"]["publishing"]) for u in found.updates],
        "request": ledger.latency_ms,
    }
    return [
        count("updates", len(found.updates), "updates"),
        count("requests", ledger.answered, "requests"),
        count("failed requests", ledger.failed.total(), "requests"),
        count("mixed requests", len(ledger.mixed), "requests"),
        *(
            latency_figure(name, TASK, None, samples)
            for name, samples in times.items()
            if samples  # where every request failed there are none
        ),
    ]


@orderly
def main(arguments: list[str]) -> int:
    """Run, print, write the figures; status 1 if a request failed or was mixed."""
    parser = options.make_parser("updates", __doc__)
    parser.add_argument(
        "--updates", type=options.count, default=_UPDATES, help=f"how many (default {_UPDATES})"
    )
    parser.add_argument(
        "--clients", type=options.count, default=4, help="that ask at once (default 4)"
    )
    args = parser.parse_args(arguments)
    if args.updates >= SECOND - 1:
        parser.error(f"--updates is from 1 to {SECOND - 2}")
    console = Console()
    with workplace(console) as (folder, bar):
        step = bar.add_task("updating under load", total=args.updates)
        found = run(folder, args.updates, args.clients, lambda: bar.advance(step))
    made = figures(found)
    console.print(figure_table(f"{args.updates} updates under load", made))
    for code, n in found.ledger.failed.items():
        console.print(f"failed: {code} x {n}", highlight=False)
    for text in found.ledger.mixed[:20]:
        console.print(f"mixed: {text}", highlight=False)
    path = options.result_path(args, "updates", whole=args.updates >= _UPDATES)
    ResultFile(path, "updates", make_command("bench-updates", arguments)).write(made)
    return 0 if found.ledger.clean else 1


if __name__ == "__main__":
    raise SystemExit(main())
