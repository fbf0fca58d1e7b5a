"""What a pipeline can do: load and stability limit from its blocks' times (thesis, 4.2.1). Pure.

The thesis: a block's load is rho = lambda / mu with mu the reciprocal of its computing time (eq.
4.2), and a path is stable while lambda < min mu. That holds where every block has a processor of
its own. With fewer cores than blocks they share: no more than ``seats`` seconds of computing can be
done in a second, so lambda < seats / (sum of 1 / mu) as well.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from blockflow.client.collector import OK, Record


@dataclass(frozen=True, slots=True)
class Capacity:
    """A pipeline's blocks, alone on an idle machine.

    Attributes:
        service_ms: computing time by block.
        seats: cores that the blocks share; None where each has a device's time of its own.
    """

    service_ms: Mapping[str, float]
    seats: int | None

    def mu(self, block: str) -> float:
        """Requests per second."""
        return 1e3 / self.service_ms[block]

    def rho(self, block: str, rate: float) -> float:
        """Eq. 4.2."""
        return rate / self.mu(block)

    @property
    def bottleneck(self) -> str:
        """The slowest block."""
        return max(self.service_ms, key=lambda b: self.service_ms[b])

    @property
    def least_mu(self) -> float:
        """The thesis's limit."""
        return self.mu(self.bottleneck)

    @property
    def shared(self) -> float | None:
        """What the cores can do together; None where nothing is shared."""
        if self.seats is None:
            return None
        return self.seats * 1e3 / sum(self.service_ms.values())

    @property
    def limit(self) -> float:
        """The lower one."""
        shared = self.shared
        return self.least_mu if shared is None else min(self.least_mu, shared)


@dataclass(frozen=True, slots=True)
class Calm:
    """What is found in a round before anything is asked too much of.

    Attributes:
        callers: answers per second to a few callers that wait for theirs.
    """

    capacity: Capacity
    callers: float


def typical(capacities: Sequence[Capacity]) -> Capacity:
    """The medians of the blocks' times."""
    blocks = capacities[0].service_ms
    middle = {b: statistics.median(c.service_ms[b] for c in capacities) for b in blocks}
    return Capacity(middle, capacities[0].seats)


@dataclass(frozen=True, slots=True)
class Flow:
    """What came of an open loop's requests in the part of its time that counts.

    Attributes:
        offered: requests that came, per second.
        answered: answers, per second (whenever their requests came).
        refused: share of the requests that came and got an error.
        latency_ms: of the answers, from when the requests were due.
    """

    offered: float
    answered: float
    refused: float
    latency_ms: tuple[float, ...]

    @property
    def carried(self) -> float:
        """Answers as a share of what came: 1 is the law of conservation, below it is saturation."""
        return self.answered / self.offered if self.offered else 0.0


def refused_of(records: Sequence[Record]) -> float:
    """Share of the requests that got an error."""
    return sum(r.outcome != OK for r in records) / len(records) if records else 0.0


def refusals(shares: Iterable[tuple[str, Sequence[float]]]) -> list[str]:
    """A note for each of whose requests some were refused: who they are, and the visits' shares."""
    means = ((who, statistics.fmean(share)) for who, share in shares)
    return [
        f"{m:.1%} of the requests {who} were refused: they have no time" for who, m in means if m
    ]


def flow_of(records: Iterable[Record], seconds: float, settling_s: float) -> Flow:
    """From the records of an open loop that sent for ``seconds``, of which the first
    ``settling_s`` fill queues and do not count."""
    begin, end = settling_s * 1e3, seconds * 1e3
    found = list(records)
    came = [r for r in found if begin <= r.intended_ms < end]
    done = [r for r in found if r.outcome == OK and begin <= r.done_ms < end]
    per_s = 1e3 / (end - begin)
    return Flow(
        offered=len(came) * per_s,
        answered=len(done) * per_s,
        refused=refused_of(came),
        latency_ms=tuple(r.latency_ms for r in done),
    )
