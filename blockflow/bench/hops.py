"""``make bench-hops``: what one hop costs, by size and way, beside a bare message.

Every round visits every way at every size in every condition, in balanced order; bare ZeroMQ
messages and torch's own queue take their turns in the same rounds. A hop is *transit + wait +
overhead* as the results account it, and, as a check, the slope of the end-to-end time over the
number of hops (:mod:`blockflow.bench.echo_chain`).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from rich.console import Console

from blockflow.bench import legs
from blockflow.bench.bare import BareLink
from blockflow.bench.calibration import calibrate, calibration_figures, compare
from blockflow.bench.echo_chain import (
    CONDITIONS,
    IDLE_MS,
    MIDDLES,
    SHORT,
    TOUCHED_MIB,
    WARM,
    WAYS,
    EchoChain,
    Way,
    save_blocks,
    topology,
)
from blockflow.bench.hop_figures import (
    AGAIN,
    BARE,
    BARE_TCP,
    FRAME,
    POLLED,
    QUEUE,
    Key,
    Track,
    Tracks,
    aim_grid,
    check_grid,
    figures,
    leg_grid,
    remarks,
    time_grid,
)
from blockflow.bench.interrupts import orderly
from blockflow.bench.kpi_reader import Counted
from blockflow.bench.options import parse_rounds, result_path
from blockflow.bench.own_system import own_settings, workplace
from blockflow.bench.queue_link import QueueLink
from blockflow.bench.results import ResultFile, make_command
from blockflow.bench.turns import balanced
from blockflow.client import Client
from blockflow.control.system import System
from blockflow.repository.repository import BlockRepository

KIB, MIB = 2**10, 2**20
SIZES = (KIB, 16 * KIB, 256 * KIB, MIB, 4 * MIB, 16 * MIB, 100 * MIB)
HEAVY = 16 * MIB
"""From here on whole tensors take so long that they take part in every fourth round, warm only."""

_EVERY = 4
_TURN_S = 0.3


@dataclass(frozen=True, slots=True)
class Plan:
    """How much is measured.

    Attributes:
        sizes: of the tensors, in bytes.
        rounds: visits of every way.
        burst: requests per visit when warm; half of it in the other conditions.
    """

    sizes: tuple[int, ...] = SIZES
    ways: tuple[Way, ...] = WAYS
    rounds: int = 12
    burst: int = 8

    def takes_part(self, number: int, size: int, heavy: bool, condition: str) -> bool:
        """Whether a way is visited in this round; ``heavy`` ways copy the tensor."""
        if not heavy or size < HEAVY:
            return True
        return condition == WARM and number % _EVERY == 0

    def count(self, condition: str) -> int:
        return self.burst if condition == WARM else max(1, self.burst // 2)


FULL = Plan()
QUICK = Plan(
    sizes=(KIB, MIB), ways=tuple(w for w in WAYS if w.transport == "ipc"), rounds=2, burst=2
)


class Rest:
    """What this process does before a bare message, as a middle block does before its output."""

    def __init__(self) -> None:
        self._memory = np.zeros(TOUCHED_MIB * MIB, dtype=np.uint8)

    def before(self, condition: str) -> Callable[[], None] | None:
        if condition == "idle":
            return lambda: time.sleep(IDLE_MS / 1e3)
        if condition == "worked":
            return self._work
        return None

    def _work(self) -> None:
        np.add(self._memory, 1, out=self._memory)


@contextmanager
def chains(plan: Plan, folder: Path) -> Iterator[list[EchoChain]]:
    """One running system per transport, with its ways."""
    with ExitStack() as stack:
        found = []
        for transport in dict.fromkeys(w.transport for w in plan.ways):
            ways = [w for w in plan.ways if w.transport == transport]
            state_dir = folder / f"state-{transport}"
            # Bare messages are not encrypted either, with which the hops are compared.
            settings = own_settings(folder, state_dir=state_dir, plain_links=True)
            system = stack.enter_context(System(settings))
            system.apply(topology(ways, plan.sizes))
            client = stack.enter_context(Client(system.client_endpoint))
            found.append(EchoChain(system, client, ways))
        yield found


@contextmanager
def links(plan: Plan, folder: Path) -> Iterator[tuple[dict[str, BareLink], QueueLink]]:
    """The other processes of the bare messages, by transport, and of torch's queue."""
    with ExitStack() as stack:
        bare = {"ipc": stack.enter_context(BareLink(folder))}
        if any(w.transport == "tcp" for w in plan.ways):
            bare["tcp"] = stack.enter_context(BareLink(folder, "tcp"))
        yield bare, stack.enter_context(QueueLink())


def measure(
    plan: Plan,
    hosts: Sequence[EchoChain],
    bare: Mapping[str, BareLink],
    queue: QueueLink,
    advance: Callable[[], None],
) -> Tracks:
    """All rounds."""
    tracks: Tracks = {}
    rest = Rest()
    visits = [(host, way) for host in hosts for way in host.ways]
    for number in range(plan.rounds):
        for condition in CONDITIONS:
            _messages(tracks, number, condition, plan, bare, rest)
        for size in plan.sizes:
            for host, way in balanced(visits, number):
                for condition in CONDITIONS:
                    if plan.takes_part(number, size, way.whole, condition):
                        count = plan.count(condition)
                        short = host.turn(way, size, condition, SHORT, count, _TURN_S)
                        long = host.turn(way, size, condition, MIDDLES, count, _TURN_S)
                        track = tracks.setdefault(Key(way.name, size, condition), Track())
                        track.add(number, short, long)
            if plan.takes_part(number, size, True, WARM):
                count = plan.burst if size < HEAVY else max(1, plan.burst // 4)
                times = bare["ipc"].burst(count, size=max(size, KIB))
                tracks.setdefault(Key(FRAME, size, WARM), Track()).hop[number] = times
                times = queue.burst(count, size)
                tracks.setdefault(Key(QUEUE, size, WARM), Track()).hop[number] = times
            advance()
    return tracks


def _messages(
    tracks: Tracks,
    number: int,
    condition: str,
    plan: Plan,
    bare: Mapping[str, BareLink],
    rest: Rest,
) -> None:
    """Bare messages of one round; the first way twice, so that the run knows its own noise."""
    before = rest.before(condition)
    count = 2 * plan.count(condition)
    turns = [(BARE, "ipc", False), (POLLED, "ipc", True), (AGAIN, "ipc", False)]
    if "tcp" in bare:
        turns.append((BARE_TCP, "tcp", False))
    if number % 2:
        turns.reverse()
    for name, transport, spin in turns:
        times = bare[transport].burst(count, spin=spin, before=before)
        tracks.setdefault(Key(name, 0, condition), Track()).hop[number] = times


def warm_up(plan: Plan, hosts: Sequence[EchoChain]) -> dict[tuple[str, int], Counted]:
    """Every way once at every size, which commits its memory; what the KPIs count by way, size."""
    out = {}
    for size in plan.sizes:
        for host in hosts:
            for way, counted in host.count(size).items():
                out[way, size] = counted
    return out


@orderly
def main(arguments: list[str]) -> int:
    """Run the benchmark, print its tables, write its figures."""
    plan, args = parse_rounds(arguments, "hops", __doc__, FULL, QUICK)
    console = Console()
    begin = calibrate()
    with workplace(console) as (folder, bar):
        step = bar.add_task("starting", total=plan.rounds)
        save_blocks(BlockRepository(folder / "blocks"), plan.sizes)
        with chains(plan, folder) as hosts, links(plan, folder) as (bare, queue):
            bar.update(step, description="warming up")
            counted = warm_up(plan, hosts)
            bar.update(step, description="measuring")
            tracks = measure(plan, hosts, bare, queue, lambda: bar.advance(step))
        (folder / "legs").mkdir()
        step = bar.add_task("client legs", total=plan.rounds * len(plan.sizes))
        client_legs = legs.run(
            *(folder / "legs", plan.sizes, legs.WAYS, plan.rounds, plan.burst),
            lambda: bar.advance(step),
        )
    steady = compare(begin, calibrate())
    found = [*figures(tracks, counted), *client_legs, *calibration_figures(steady)]
    for grid in (time_grid(found), check_grid(found), leg_grid(found), aim_grid(found)):
        console.print(grid.rich())
    for line in remarks(found):
        console.print(line, highlight=False)
    path = result_path(args, "hops", whole=plan.rounds >= FULL.rounds)
    ResultFile(path, "hops", make_command("bench-hops", arguments)).write(found)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
