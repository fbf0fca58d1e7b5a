"""Every rule of the fault simulation catches a defect that is planted in a core."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from blockflow.bench.faultsim import judge, worker
from blockflow.bench.faultsim.faults import KINDS
from blockflow.bench.faultsim.outcome import Found, run_seed
from blockflow.control import brain, crew
from blockflow.control.heartbeat import Heartbeat
from blockflow.control.supervision import RestartAt, RestartLedger
from blockflow.core.placement import WorkerSpec
from blockflow.dispatcher import entrance, inflight, waiting
from blockflow.dispatcher.admission import Admission
from blockflow.dispatcher.entry import Drop, Entry
from blockflow.dispatcher.exchange import Exchange
from blockflow.dispatcher.inflight import InFlightTable
from blockflow.dispatcher.plan import Planner
from blockflow.dispatcher.tensors import TensorDesk
from blockflow.launch.vitals import Vitals
from blockflow.wire.data import Item
from blockflow.worker.parting import next_item
from blockflow.worker.scheduler import Scheduler
from blockflow.worker.ticket import Batch, Ticket

Patch = pytest.MonkeyPatch
SHORT_H = 0.001
"""One episode."""
MOST_SEEDS = 60


def answers_twice(patch: Patch) -> None:
    real = Exchange._reply

    def reply(self: Exchange, entry: Entry) -> None:
        real(self, entry)
        real(self, entry)

    patch.setattr(Exchange, "_reply", reply)


def forgets_answers(patch: Patch) -> None:
    real, count = Exchange._reply, itertools.count(1)

    def reply(self: Exchange, entry: Entry) -> None:
        if next(count) % 10:
            real(self, entry)

    patch.setattr(Exchange, "_reply", reply)


def forgets_deadlines(patch: Patch) -> None:
    patch.setattr(InFlightTable, "tick", lambda self, now_ns: [])
    # The next event would be due at once, again and again.
    patch.setattr(InFlightTable, "next_deadline", lambda self: None)


def keeps_credits(patch: Patch) -> None:
    patch.setattr(Admission, "leave", lambda self, key, now_ns: None)


def keeps_slots(patch: Patch) -> None:
    patch.setattr(TensorDesk, "release", lambda self, retained: None)


def keeps_slots_of_what_is_not_sent(patch: Patch) -> None:
    patch.setattr(TensorDesk, "unsent", lambda self, payload: None)


def takes_any_attempt(patch: Patch) -> None:
    def current(self: InFlightTable, ticket: bytes, attempt: int, hop: int) -> Entry | Drop:
        entry = self._by_ticket.get(ticket)
        if entry is None or entry.waits_for or hop >= len(entry.plan.blocks):
            return Drop("unknown")
        return entry

    def expecting(
        self: InFlightTable, ticket: bytes, attempt: int, hop: int, sender: int
    ) -> Entry | Drop:
        entry = current(self, ticket, attempt, hop)
        if isinstance(entry, Drop) or hop not in entry.plan.ends or hop in entry.outcomes:
            return Drop("unknown")
        return entry

    patch.setattr(InFlightTable, "_current", current)
    patch.setattr(InFlightTable, "expecting", expecting)


def mixes_answers(patch: Patch) -> None:
    """Rows of a batch are cut out from its beginning, whosever they are."""
    real = TensorDesk.cut

    def cut(self: TensorDesk, buffer: Any, start: int, *rest: Any) -> Any:
        return real(self, buffer, 0, *rest)

    patch.setattr(TensorDesk, "cut", cut)


def changes_epochs(patch: Patch) -> None:
    """Items say another epoch at every hop."""
    count = itertools.count(1)

    def moved(ticket: Ticket, batch: Batch, hop: int, sent_ns: int) -> Item:
        return replace(next_item(ticket, batch, hop, sent_ns), epoch=next(count))

    patch.setattr(worker, "next_item", moved)


def blames_at_once(patch: Patch) -> None:
    patch.setattr(inflight, "DEADLY", 1)


def blames_nobody(patch: Patch) -> None:
    patch.setattr(inflight, "DEADLY", 99)
    patch.setattr("blockflow.dispatcher.recovery.MAX_ATTEMPTS", 99)


def repeats_all(patch: Patch) -> None:
    patch.setattr(inflight, "begun_once", lambda entry, end, not_begun: "")


def runs_what_came_again(patch: Patch) -> None:
    """Under another ticket it counts as never run."""
    for module in (entrance, waiting):
        patch.setattr(module, "may_have_run", lambda request_id, plan: None)


def never_expires(patch: Patch) -> None:
    patch.setattr(Scheduler, "expire", lambda self, now: [])
    patch.setattr(Scheduler, "next_deadline", lambda self: None)


def counts_from_the_receipt(patch: Patch) -> None:
    """What a message spends under way is given to the request once more."""

    def deadline_of(item: Item, sent_ns: int, now: int) -> int:
        return now + item.remaining_ms * 1_000_000

    patch.setattr(worker, "deadline_of", deadline_of)


def keeps_what_is_replaced(patch: Patch) -> None:
    """An update does not notice that an artifact is another one."""
    patch.setattr(WorkerSpec, "identity", lambda self: self.name)


def refuses_what_could_wait(patch: Patch) -> None:
    patch.setattr(Planner, "way", Planner.plan)


def restarts_at_once(patch: Patch) -> None:
    def crashed(self: RestartLedger, now_ns: int, **_: Any) -> RestartAt:
        return RestartAt(now_ns)

    patch.setattr(RestartLedger, "crashed", crashed)


def condemns_the_slow(patch: Patch) -> None:
    """One unanswered ping is enough."""
    real = Heartbeat._judge

    def judged(self: Heartbeat, pulse: Any, seen: Vitals, now: int) -> str:
        return real(self, pulse, seen, now) or ("hung: no answer" if pulse.asked_ns else "")

    patch.setattr(Heartbeat, "_judge", judged)


def overlooks_hangs(patch: Patch) -> None:
    patch.setattr(Heartbeat, "look", lambda self, vitals, now_ns: [])


def restarts_nothing(patch: Patch) -> None:
    patch.setattr(crew.Crew, "supervise", lambda self, replica, crash, now_ns: None)


def leaves_the_dead_untold(patch: Patch) -> None:
    """A Manager's successor takes for said what was written down."""
    patch.setattr(brain, "tell_again", lambda realm: None)


def falls_over(patch: Patch) -> None:
    def fail(self: InFlightTable, *_: Any) -> Any:
        raise RuntimeError("planted")

    patch.setattr(InFlightTable, "_lost", fail)


KILLS = ("kill at work", "kill after output", "killed while late")
DEFECTS: list[tuple[Callable[[Patch], None], str, tuple[str, ...]]] = [
    (answers_twice, judge.ONE_REPLY, KINDS),
    (forgets_answers, judge.READY_AGAIN, KINDS),
    (forgets_deadlines, judge.IN_TIME, ("silence", "lost message")),
    (keeps_credits, judge.BOOKS, KINDS),
    (keeps_slots, judge.BOOKS, ("stop",)),
    (keeps_slots_of_what_is_not_sent, judge.BOOKS, ("full queue",)),
    (
        takes_any_attempt,
        judge.FENCED,
        ("kill after output", "late messages", "doubled message"),
    ),
    (mixes_answers, judge.RIGHT_ANSWER, KINDS),
    (changes_epochs, judge.ONE_EPOCH, KINDS),
    (blames_at_once, judge.BLAME, ("poison",)),
    (blames_nobody, judge.KILLS_TWO, ("poison",)),
    (repeats_all, judge.ONCE, KILLS),
    (runs_what_came_again, judge.ONCE, ("kill dispatcher",)),
    (never_expires, judge.NOT_LATE, ("stuck forward", "stop")),
    (counts_from_the_receipt, judge.NOT_LATE, ("late messages", "stop")),
    (keeps_what_is_replaced, judge.ONE_EPOCH, ("update",)),
    (refuses_what_could_wait, judge.WAITS, ("kill idle",)),
    (restarts_at_once, judge.INTENSITY, ("kill idle",)),
    (condemns_the_slow, judge.NO_FALSE_DEATH, ("late messages",)),
    (overlooks_hangs, judge.READY_AGAIN, ("silence",)),
    (restarts_nothing, judge.READY_AGAIN, ("kill idle",)),
    (leaves_the_dead_untold, judge.BOOKS, ("manager dies",)),
    (falls_over, judge.NO_DEFECT, ("kill at work",)),
]


BEGIN: dict[Callable[[Patch], None], int] = {
    takes_any_attempt: 12,
    never_expires: 3,
    leaves_the_dead_untold: 4,
    repeats_all: 2,
    runs_what_came_again: 2,
}
"""The first seed that met the defect when it was last looked; those before it come afterwards."""


def first_broken(kinds: tuple[str, ...], begin: int) -> Found | None:
    seeds = (*range(begin, MOST_SEEDS + 1), *range(1, begin))
    runs = (run_seed(seed, SHORT_H, kinds) for seed in seeds)
    return next((f for f in runs if f.rule), None)


@pytest.mark.parametrize(
    ("plant", "rule", "kinds"), DEFECTS, ids=[plant.__name__ for plant, _, _ in DEFECTS]
)
def test_a_planted_defect_is_caught(
    plant: Callable[[Patch], None], rule: str, kinds: tuple[str, ...], monkeypatch: Patch
) -> None:
    plant(monkeypatch)
    found = first_broken(kinds, BEGIN.get(plant, 1))
    assert found is not None, "nobody noticed"
    assert found.rule == rule, f"seed {found.seed}: {found.what}"
