"""Findings: what a chaos run has found, and which promises it shows to be broken. Pure."""

from __future__ import annotations

from dataclasses import dataclass, field
from math import isfinite

from blockflow.bench.chaos.faults import NETWORK_KINDS, POISONED, STALL_S, Injected, Takeover
from blockflow.bench.chaos.growth import growths
from blockflow.bench.chaos.lag import LagBook
from blockflow.bench.chaos.ledger import Death, Ended, Ledger, Span
from blockflow.bench.chaos.watch import MemorySample

GRACE_S = 0.1
"""A reply is due by the deadline and this (docs/reliability.md)."""

LEAST_OK = 0.9
"""Of all requests, so many are answered with their results: a system that refuses what it is asked
loses nothing, and serves nobody. (Five minutes have 99.7% and more; half a minute on a machine that
others load has had 95%: much was refused while a Dispatcher's clients all asked again.)"""

OUTAGE_S = 10.0
"""No Dispatcher is away for longer: one that is killed is back within a second or two, one that is
stopped is noticed first."""
BEHIND_S = 1.0
"""After its first answer a new Dispatcher has what clients sent again to work off."""

LINGERS_S = 10.0
"""After a worker was stopped, or a poison sent, so late a worker may die of it at the latest."""
AT_ONCE_S = 0.1
"""A killed one has died so shortly before the note of it at the earliest."""

TOLD = 5
"""Of late requests so many are described."""

JUDGED_S = 600.0
"""A shorter run says little about growth: its figures are shown, and not judged."""


@dataclass(slots=True)
class Findings:
    """What a run has found.

    Attributes:
        faults: in order.
        memory: samples over the run.
        survivors: processes that outlived the system.
        files: paths that it left behind.
        recovered: the system was ready again at the end.
        takeovers: by a new Manager, each time that one was killed.
        lag: how late this machine woke a waiting thread, and when: no reply can be judged closer.
        grace_s: what a reply may come after its deadline.
        least_ok: the share of the requests that shall be answered with a result.
        ready_again: kind of fault -> seconds until everything was ready again, where the run
            waited for that.
        defects: what else should not have been, in words.
    """

    ledger: Ledger
    faults: list[Injected] = field(default_factory=list)
    memory: list[MemorySample] = field(default_factory=list)
    survivors: list[str] = field(default_factory=list)
    files: list[str] = field(default_factory=list)
    recovered: bool = True
    lag: LagBook = field(default_factory=LagBook)
    grace_s: float = GRACE_S
    least_ok: float = LEAST_OK
    ready_again: dict[str, list[float]] = field(default_factory=dict)
    takeovers: list[Takeover] = field(default_factory=list)
    defects: list[str] = field(default_factory=list)

    def violations(self) -> list[str]:
        """The promises that were broken, in words; empty if none was."""
        return [*self.broken(), *self.slow()]

    def broken(self) -> list[str]:
        """Those that hold on any machine, however busy it is."""
        ledger = self.ledger
        out = []
        if ledger.missing:
            out.append(f"{ledger.missing} requests never ended")
        if ledger.doubled:
            out.append(f"{ledger.doubled} requests ended twice")
        if ledger.garbled:
            out.append(f"{ledger.garbled} messages to clients made no sense")
        if self.lost:
            out.append(f"{self.lost} requests got no reply, though somebody was there to reply")
        if blamed := ledger.blamed(self.deaths()):
            out.append(f"{blamed} requests were blamed without two deaths")
        if ledger.unanswered:
            out.append(f"{ledger.unanswered} cancelled requests got no reply")
        out += [f"{n} requests ended with {o}" for o, n in sorted(ledger.unexplained().items())]
        if ledger.answered < self.least_ok:
            share = f"{ledger.answered:.1%} of {ledger.sent_count:,}"
            out.append(f"only {share} requests were answered with a result")
        if abandoned := sum(not isfinite(t.took_s) for t in self.takeovers):
            out.append(f"{abandoned} times no new manager took over")
        if alone := sum(isfinite(t.took_s) and not t.adopted for t in self.takeovers):
            out.append(f"{alone} times a new manager began anew, without what had served")
        if not self.recovered:
            out.append("the system was not ready again at the end")
        out += self.defects
        out += [f"left behind: process {p}" for p in self.survivors]
        out += [f"left behind: {f}" for f in self.files]
        if self.memory and self.memory[-1].at_s >= JUDGED_S:
            out += [g.sentence() for g in growths(self.memory) if g.grows]
        return out

    def slow(self) -> list[str]:
        """Those about time, which a machine that others share may break as well. Each reply is
        judged by the lag around it: what the machine did to others is no excuse."""
        late = len(self.late)
        return [f"{late} requests ended later than their deadline allows"] if late else []

    def examples(self) -> list[str]:
        """The first of those that were late: when, and by how much."""
        return [
            f"late: {e.task}, due at {e.due_s:.1f} s, {e.outcome} {e.done_s - e.due_s:.2f} s later"
            for e in self.late[:TOLD]
        ]

    @property
    def late(self) -> list[Ended]:
        """Requests that ended later than their deadline allows, the lag and the cuts around it."""
        return self.ledger.late(self.grace_s, self.lag, self.cuts())

    @property
    def lost(self) -> int:
        """Requests that nobody has ever answered, though the Dispatcher lived when their time was
        over."""
        return self.ledger.alone(self.outages(), self.cuts())

    def cuts(self) -> list[Span]:
        """When the network between the Dispatcher and those clients that are far from it failed,
        until what it held had been worked off."""
        return [
            (f.at_s, f.at_s + STALL_S + BEHIND_S) for f in self.faults if f.kind in NETWORK_KINDS
        ]

    def outages(self) -> list[Span]:
        """When clients had no Dispatcher: from the moment at which one was killed or stopped until
        a request that was sent after it was answered."""
        recovery_s = self.ledger.recoveries()
        out = []
        for fault in self.faults:
            if fault.tasks and fault.kind.startswith("dispatcher"):
                again = [s for t in fault.tasks if (s := recovery_s(t, fault.at_s)) is not None]
                away = min([*again, OUTAGE_S])
                out.append((fault.at_s, fault.at_s + away + BEHIND_S))
        return out

    def deaths(self) -> list[Death]:
        """When workers may have died, by each task that led through them."""
        out: list[Death] = []
        for fault in self.faults:
            tasks, lingers = fault.tasks, LINGERS_S
            if fault.kind.startswith("worker killed"):
                lingers = 0.0
            elif fault.kind.startswith("manager"):
                tasks, lingers = fault.beside, 0.0
            elif not fault.kind.startswith("worker") and fault.kind != POISONED:
                continue
            # Of the two deaths by a poison its batch mates are at work in one at most.
            out += [((fault.at_s - AT_ONCE_S, fault.at_s + lingers), task) for task in tasks]
        return out
