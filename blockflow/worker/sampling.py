"""StageSampler: figures of a worker's stages for its monitor thread; used by the data thread."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from blockflow.core.roster import Roster
from blockflow.worker.accounts import Accounts
from blockflow.worker.scheduler import Scheduler
from blockflow.worker.stage import Stage, StageSnapshot


@dataclass(frozen=True, slots=True)
class StageSample:
    """One moment.

    Attributes:
        stages: of some stages, by number (:mod:`blockflow.core.roster`).
        news: something has happened at one of them.
        rows: of all stages since the start.
    """

    stages: Mapping[int, StageSnapshot] = field(default_factory=dict)
    news: bool = False
    rows: int = 0


class StageSampler:
    """Looks at the stages. A worker may have a thousand, and computes nothing meanwhile."""

    def __init__(
        self, stages: Mapping[int, Stage], scheduler: Scheduler, accounts: Accounts
    ) -> None:
        self._stages = stages
        self._scheduler = scheduler
        self._accounts = accounts
        self._roster = Roster(stages)
        self._seen: dict[int, object] = {}

    def mark(self) -> list[object]:
        """Whatever :meth:`sample` takes for news changes it; from any thread."""
        states = [self._state(number, stage) for number, stage in self._stages.items()]
        return [len(self._accounts), *states]

    def _state(self, number: int, stage: Stage) -> object:
        return self._scheduler.queued(number), stage.meter.counts

    def sample(self, now: int) -> StageSample:
        """``now`` is the monotonic clock in nanoseconds."""
        self._accounts.settle()
        queue, rows = self._scheduler, 0
        for number, stage in self._stages.items():
            rows += stage.meter.rows
            seen = self._state(number, stage)
            if self._seen.get(number) != seen:
                self._seen[number] = seen
                self._roster.note(number)
        news, others = self._roster.take()
        stages = {}
        for number in (*news, *others):
            waiting = queue.queued(number), queue.queued_rows(number)
            width = queue.width(number)
            found = self._stages[number].meter.snapshot(now, *waiting, width)
            stages[number] = found
            arriving, _, served = found.rates
            if arriving or served:
                self._roster.fades(number)
        return StageSample(stages, bool(news), rows)
