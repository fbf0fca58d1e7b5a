"""``make bench-front-door``: what a request costs in client, Dispatcher and worker, by size and by
how many are outstanding.

A block that gives its input back takes next to no time, so what is left is BlockFlow's own: the
processor time of three processes. A small tensor travels in the message, one of the size of an
image through memory that the Dispatcher has granted. With one request outstanding every process
sleeps and is woken for each; with many it finds several at once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

from rich.console import Console

from blockflow.bench.front_door_client import TASK, FrontDoorClient
from blockflow.bench.grid import Grid, size_text, with_bounds
from blockflow.bench.interrupts import orderly
from blockflow.bench.options import parse_rounds, result_path
from blockflow.bench.own_system import own_settings, workplace
from blockflow.bench.results import Figure, ResultFile, interval_figure, make_command
from blockflow.bench.sampler import cpu_seconds
from blockflow.bench.turns import balanced
from blockflow.control.system import System
from blockflow.core.model import TensorSpec
from blockflow.repository.echo import save_echo
from blockflow.repository.repository import BlockRepository

SMALL, IMAGE = 1024, 3 * 224 * 224 * 4
"""Bytes of an input: some features, and an image as models take it (float32)."""

PROCESSES = ("client", "dispatcher", "worker")
BLOCK = "echo"
RATE, CPU = "requests", "cpu"
_MANY_S = 60


@dataclass(frozen=True, slots=True)
class Plan:
    """What to do.

    Attributes:
        sizes: of the inputs, in bytes.
        outstanding: requests at once.
        rounds: each has every size with every number.
        requests: of each in one round; the processors' time is counted in hundredths of a second.
        warm: requests before them, which do not count.
    """

    sizes: tuple[int, ...] = (SMALL, IMAGE)
    outstanding: tuple[int, ...] = (1, 8, 32)
    rounds: int = 12
    requests: int = 2000
    warm: int = 100

    @property
    def cases(self) -> list[tuple[int, int]]:
        """(bytes, outstanding)."""
        return [(size, count) for size in self.sizes for count in self.outstanding]


QUICK = Plan(outstanding=(1, 4), rounds=2, requests=50, warm=5)


@dataclass(slots=True)
class Found:
    """Of one case, a number per round: requests per second, and microseconds of processor time per
    request by process."""

    rates: list[float] = field(default_factory=list)
    cpu_us: dict[str, list[float]] = field(default_factory=lambda: {name: [] for name in PROCESSES})


def measure(
    plan: Plan,
    folder: Path,
    advance: Callable[[], None] = lambda: None,
    system: System | None = None,
) -> dict[tuple[int, int], Found]:
    """All rounds.

    Args:
        folder: where blocks and state go.
        advance: called after each case in each round.
        system: not started yet, over ``folder / "blocks"``; by default one of its own.
    """
    spec = TensorSpec("uint8", ("rows", "bytes"), {"bytes": (1, max(plan.sizes))})
    save_echo(BlockRepository(folder / "blocks"), BLOCK, spec, settings={"still": True})
    found = {case: Found() for case in plan.cases}
    with ExitStack() as stack:
        running = stack.enter_context(system or System(own_settings(folder)))
        tasks = {TASK: {"path": [BLOCK], "deadline_ms": _MANY_S * 1000}}
        running.apply({"blocks": [{"name": BLOCK, "threads": 1}], "tasks": tasks})
        client = stack.enter_context(FrontDoorClient(running.client_endpoint))
        places = (running.commands.worker(name)["pid"] for name in ("dispatcher", f"{BLOCK}#0"))
        pids = dict(zip(PROCESSES, (client.pid, *places), strict=True))
        for number in range(plan.rounds):
            for case in balanced(plan.cases, number):
                client.took_s(*case, plan.warm)
                before = cpu_seconds(pids)
                took_s = client.took_s(*case, plan.requests)
                after = cpu_seconds(pids)
                found[case].rates.append(plan.requests / took_s)
                for name in PROCESSES:
                    used_us = (after[name] - before[name]) * 1e6
                    found[case].cpu_us[name].append(used_us / plan.requests)
                advance()
    return found


def figures(found: dict[tuple[int, int], Found]) -> list[Figure]:
    """Rates and processor time by requests outstanding (``mode``) and size."""
    out = []
    for (nbytes, outstanding), one in found.items():
        mode, labels = str(outstanding), {"bytes": nbytes}
        out.append(interval_figure(RATE, mode, 1, one.rates, "1/s", labels))
        out += [
            interval_figure(CPU, mode, 1, used, "us", {**labels, "process": name})
            for name, used in one.cpu_us.items()
        ]
    return out


def grid(found: Sequence[Figure]) -> Grid:
    """A row per size and number of requests outstanding."""
    at = {(f.labels["bytes"], f.mode, f.labels.get("process")): f for f in found}
    heads = ("input", "outstanding", "requests/s", *(f"{name} us" for name in PROCESSES))
    rows = []
    for nbytes, mode in dict.fromkeys((f.labels["bytes"], f.mode) for f in found):
        shown = [at[nbytes, mode, name] for name in (None, *PROCESSES)]
        cells = [with_bounds(f.value, f.low, f.high, places=0) for f in shown]
        rows.append((size_text(nbytes), mode, *cells))
    return Grid("the front door", heads, rows, frozenset({"input"}), keys=2)


@orderly
def main(arguments: list[str]) -> int:
    """Run, print, write the figures."""
    plan, args = parse_rounds(arguments, "front_door", __doc__, Plan(), QUICK)
    console = Console()
    with workplace(console) as (folder, bar):
        step = bar.add_task("front door", total=plan.rounds * len(plan.cases))
        made = figures(measure(plan, folder, lambda: bar.advance(step)))
    console.print(grid(made).rich())
    path = result_path(args, "front_door", whole=plan.rounds >= Plan().rounds)
    ResultFile(path, "front_door", make_command("bench-front-door", arguments)).write(made)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
