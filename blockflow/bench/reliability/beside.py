"""What a client that reads nothing does to the others: their p99, round by round, beside one that
does not read and beside one that does.

A round is as long as it takes to cut one off. Both kinds of neighbour take turns from round to
round while the same client asks on: what a shared machine does for seconds then falls upon both.
"""

from __future__ import annotations

import threading
import time
from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field

from blockflow.bench.reliability import figures as names
from blockflow.bench.reliability.peer import BURST, Account, Array, Peer
from blockflow.bench.results import Figure, interval_figure
from blockflow.bench.statistics import median_interval, noise_of, percentile, ratio_interval
from blockflow.client import Client

ROUND_S = 2.0
"""Longer than it takes to cut one off that reads nothing: half a second, and a second for 4 MiB."""
_PATIENCE_S = 30.0
_FIGURES_S = 0.6
"""Until the Dispatcher's figures, which come four times a second, tell of what was before."""
_WARM = 50


@dataclass(frozen=True, slots=True)
class Round:
    """From ``begin_s`` until the next round begins there was a neighbour that ``reads``."""

    begin_s: float
    reads: bool


def turns(pairs: int) -> list[bool]:
    """Whether the neighbour of each round reads: A B B A A B B A ..., so that rounds 0 and 1, 2 and
    3, ... are pairs of both, and 1 and 2, 3 and 4, ... of the same."""
    return [bool((i + 1) // 2 % 2) for i in range(2 * pairs)]


def tails(took: Sequence[tuple[float, float]], rounds: Sequence[Round]) -> list[float]:
    """99th percentile of each round's requests, which are (begin in s, duration in ms). One that
    lasted beyond its round was felt in the next as well.

    Raises:
        ValueError: a round without requests.
    """
    begins = [r.begin_s for r in rounds]
    parts: list[list[float]] = [[] for _ in rounds]
    for begin_s, ms in took:
        first = max(0, bisect_right(begins, begin_s) - 1)
        for part in parts[first : bisect_right(begins, begin_s + ms / 1e3)]:
            part.append(ms)
    return [percentile(part, 99) for part in parts]


def compare(
    p99: Sequence[float], rounds: Sequence[Round], labels: Mapping[str, float]
) -> list[Figure]:
    """The p99 beside one that does not read, as a ratio to that beside one that does; and what a
    neighbour of the same kind seems to make of it, which is noise (none of a single pair)."""
    pairs = [
        (p99[i], p99[i + 1]) if rounds[i].reads else (p99[i + 1], p99[i])
        for i in range(0, len(p99), 2)
    ]
    beside = ratio_interval([a for a, _ in pairs], [b for _, b in pairs])
    p99_ms = median_interval([a for a, _ in pairs]).value
    same = [(p99[i], p99[i + 1]) for i in range(1, len(p99) - 1, 2)]
    found, noise = [], 0.0
    if same:
        itself = ratio_interval([a for a, _ in same], [b for _, b in same])
        found.append(interval_figure(names.OTHERS, names.ITSELF, None, itself, "x"))
        noise = noise_of(itself)
    labels = {"noise": round(noise, 3), "p99_ms": round(p99_ms, 3), **labels}
    return [*found, interval_figure(names.OTHERS, names.BESIDE, None, beside, "x", labels)]


@dataclass(slots=True)
class Neighbours:
    """A modest client's requests beside two kinds of neighbour.

    The one that reads, to compare with, must be no heavier load: it asks for as much at the same
    moments, and reads what the one that reads nothing had got until it was cut off.

    Args:
        peer: makes a neighbour whose socket takes in so many messages that nobody reads.
        given_up: clients that were cut off so far, by the Dispatcher's figures.
        round_s: seconds of a round.
    """

    peer: Callable[[int], Peer]
    given_up: Callable[[], int]
    round_s: float = ROUND_S
    readers: Account = field(default_factory=Account)
    idlers: Account = field(default_factory=Account)

    def run(self, endpoint: str, task: str, x: Array, pairs: int) -> list[Figure]:
        """The client at ``endpoint`` asks for ``task`` on and on, for 2 * ``pairs`` rounds."""
        before = self.given_up()
        stop = threading.Event()
        with ThreadPoolExecutor(1) as pool, Client(endpoint) as client:
            # The first one does not count: it tells how much those get that do not read.
            self._round(False, stop)
            for _ in range(_WARM):
                client.infer(task, x)
            turn = pool.submit(self._rounds, turns(pairs), stop)
            try:
                took = _ask(client, task, x, turn)
            finally:
                stop.set()
            rounds = turn.result()
        time.sleep(_FIGURES_S)
        self.idlers.cut = self.given_up() - before - self.readers.cut
        return compare(tails(took, rounds), rounds, self._labels())

    def _labels(self) -> dict[str, float]:
        return {
            "reader_mib": round(self.readers.mib(), 2),
            "other_mib": round(self.idlers.mib(), 2),
            "reader_cut": self.readers.cut,
            "other_cut": round(self.idlers.cut / max(1, self.idlers.rounds), 3),
        }

    def _rounds(self, plan: Sequence[bool], stop: threading.Event) -> list[Round]:
        rounds: list[Round] = []
        for reads in plan:
            rounds.append(Round(time.monotonic(), reads))
            self._round(reads, stop)
            if stop.is_set():
                break
        return rounds

    def _round(self, reads: bool, stop: threading.Event) -> None:
        """The same requests either way."""
        end = time.monotonic() + self.round_s
        peer = self.peer(1000 if reads else 1)
        try:
            if reads:
                quota = self.readers.quota(self.idlers, BURST)
                got, whole = peer.heed(BURST, quota, _PATIENCE_S)
                self.readers.cut += not whole
            else:
                peer.burst(BURST)
            stop.wait(max(0.0, end - time.monotonic()))
            # What a socket has taken in is there although its connection has ended.
            (self.readers if reads else self.idlers).note(got if reads else peer.count())
        finally:
            peer.close()


def _ask(
    client: Client, task: str, x: Array, until: Future[list[Round]]
) -> list[tuple[float, float]]:
    took: list[tuple[float, float]] = []
    while not until.done():
        begin = time.monotonic()
        client.infer(task, x)
        took.append((begin, 1e3 * (time.monotonic() - begin)))
    return took
