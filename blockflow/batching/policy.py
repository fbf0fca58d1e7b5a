"""Policy: the interface of all batching policies, and the plain data that they see.

A policy decides which waiting queries run through which stage as one batch, and when. It is pure:
it is told what happened and what time it is, keeps its own books, and is *asked* whenever the
engine could start a batch. It never sees tensors, sockets or clocks, so that a worker and a
simulator drive the very same code.

Join and split need no actions of their own: a query waits at a stage boundary until some ``Run``
names it, so naming queries of several former batches joins them, and naming a part of a former
batch splits it. Nor does forwarding: a query that has left its last stage in this worker goes on
at once.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from operator import itemgetter
from typing import Any, ClassVar, Final, NamedTuple

from blockflow.batching.facts import StageFacts
from blockflow.batching.row_costs import RowCosts
from blockflow.batching.shares import TaskShare
from blockflow.core.errors import Problem
from blockflow.core.records import record

ELSEWHERE: Final = -1
"""No query has this key."""


class Query(NamedTuple):
    """One request's rows waiting at one stage (a tuple: one is made for each, on the hot path).

    Attributes:
        key: names the query in this worker; it keeps its key from stage to stage.
        stage: where it waits.
        rows: how many rows it has; batches are counted in rows, not in queries.
        arrival_ns: when it came into this worker (monotonic).
        ready_ns: when it began to wait at this stage.
        deadline_ns: no block starts it after this time; the worker takes it away then.
        shape: dims after the rows. Only queries of one shape can share a batch, unless the policy
            pads.
        first: it came from outside; False when it has done another stage of this worker.
        task: index into the policy's shares; one that is out of range counts as 0.
        ahead: stages of this worker that it has still to run after this one, in the order of the
            worker's blocks; None = unknown (all later ones are assumed).
        origin: of a branch of a path that has forked, the key of the query that it came from;
            :data:`ELSEWHERE` when the stage before is another policy's. None: it has kept its key.
    """

    key: int
    stage: int
    rows: int
    arrival_ns: int
    ready_ns: int
    deadline_ns: int
    shape: tuple[int, ...] = ()
    first: bool = True
    task: int = 0
    ahead: tuple[int, ...] | None = None
    origin: int | None = None


key_of: Callable[[Query], int] = itemgetter(Query._fields.index("key"))
stage_of: Callable[[Query], int] = itemgetter(Query._fields.index("stage"))
rows_of: Callable[[Query], int] = itemgetter(Query._fields.index("rows"))
shape_of: Callable[[Query], tuple[int, ...]] = itemgetter(Query._fields.index("shape"))
ahead_of: Callable[[Query], tuple[int, ...] | None] = itemgetter(Query._fields.index("ahead"))
"""For the queries of a batch, which are many: cheaper than a look-up by name for each."""


@record
class Run:
    """Run these waiting queries through ``stage`` as one batch, in this order.

    ``pad_to``: dims after the rows that every input is padded to at its far ends, with the block's
    own padding value; each query's share of the output is cut back to its own extent. Empty when
    all have one shape. A policy pads only where the block says that padding changes no result.
    """

    stage: int
    keys: tuple[int, ...]
    pad_to: tuple[int, ...] = ()


@record
class WaitUntil:
    """Nothing to run yet: ask again at ``at_ns``, or when something happens before."""

    at_ns: int


Decision = Run | WaitUntil | None
"""``None``: nothing to run until something happens."""


class Policy(ABC):
    """Batching of one or several stages of a worker.

    The caller's side of the bargain: a key is waiting from :meth:`arrive` until a ``Run`` names
    it or :meth:`drop` takes it away; each ``Run`` is answered by one :meth:`done`. A worker with
    several lanes asks again before that: it runs batches of different stages side by side, and
    tells which stages are busy. Their ``done`` may come in any order. A policy that is made for it
    (:attr:`SIDE_BY_SIDE`) may find a stage free that runs a batch: its engine computes several.

    The policy's side: it runs nothing at a busy stage. With a free one it answers as it would with
    an idle worker, for what waits there; or with less than that, if its definition says so.

    Args:
        stages: the stages it schedules, in the order of the worker's blocks, which is an order in
            which every path visits them; where paths contradict each other, what is predicted
            along it does not come true, and nobody waits for ever all the same.
        options: its options from the topology, already checked by :meth:`problems`.
        facts: what is known of each stage; a stage that is missing has the defaults.
        shares: of the tasks; index 0 is the share of queries whose task is not told.

    Attributes:
        NAME: as a topology says it.
        SIDE_BY_SIDE: it may run batches of one stage side by side.
        lanes: how many batches the worker runs side by side at most; its owner sets it, also while
            batches run.
        costs_of_rows: what tasks are charged for their rows; its owner measures them.

    The order that all policies share (priority, shares, earliest deadline) is that of
    ``room.WaitingRoom``, for whoever lets queries wait; ``queueing.QueueingPolicy`` has limits,
    classes of lengths and predictions as well.
    """

    NAME: ClassVar[str]
    SIDE_BY_SIDE: ClassVar[bool] = False

    def __init__(
        self,
        stages: Sequence[int],
        options: Mapping[str, Any],
        facts: Mapping[int, StageFacts] | None = None,
        shares: Sequence[TaskShare] = (),
    ) -> None:
        self.stages = tuple(stages)
        self.options = dict(options)
        known = facts or {}
        self.facts = {s: known.get(s) or StageFacts() for s in self.stages}
        self.shares = tuple(shares) or (TaskShare(),)
        self.lanes = 1
        self.costs_of_rows = RowCosts(self.stages)

    @classmethod
    @abstractmethod
    def problems(cls, options: Mapping[str, Any], path: str) -> list[Problem]:
        """What is wrong with ``options``; ``path`` is their JSON path.

        Those of ``registry.RESERVED`` mean the same for every policy, and may be left out only.
        """

    @classmethod
    def unfit(
        cls,
        options: Mapping[str, Any],
        stages: Sequence[StageFacts],
        path: str,
        ways: Sequence[Sequence[int]],
    ) -> list[Problem]:
        """Why valid ``options`` cannot work for these stages (a missing profile, a bound that
        cannot be met).

        Args:
            options: checked by :meth:`problems`.
            stages: as in :meth:`__init__`.
            path: JSON path of the options.
            ways: which of ``stages``, by position, a query of each task runs.
        """
        return []

    @classmethod
    def idle(
        cls, options: Mapping[str, Any], stages: Sequence[StageFacts], path: str
    ) -> list[Problem]:
        """Which valid ``options`` mean nothing to any of the stages that share them: a mistake of
        who has posted them, and no obstacle to work. (A worker is told its policies block by
        block, so that a block may be without those it shares them with for a moment.)"""
        return []

    @abstractmethod
    def arrive(self, query: Query, now: int) -> None:
        """``query`` waits at its stage from now on."""

    @abstractmethod
    def drop(self, key: int, now: int) -> None:
        """A waiting query is gone: expired, cancelled or handed to another policy."""

    @abstractmethod
    def done(self, stage: int, keys: Sequence[int], now: int) -> None:
        """A batch has left ``stage``; ``keys`` are all that its ``Run`` has named.

        Those that go on within this worker arrive again right after this call, before the next
        :meth:`decide`; who does not is gone, or has failed. Branches of their paths arrive with
        them, under keys of their own (``Query.origin``).
        """

    @classmethod
    def overlap(cls, options: Mapping[str, Any]) -> int:
        """How many batches it wants under way at once, given as many stages and cores."""
        return 1

    @classmethod
    def boundaries(cls, options: Mapping[str, Any]) -> frozenset[str]:
        """What it may do with a batch between two stages: of ``join`` and ``split``."""
        return frozenset()

    @classmethod
    def batch_rows(cls, options: Mapping[str, Any], laid_out: int) -> int:
        """Rows of its largest batch at a block whose worker is laid out for ``laid_out``; 1 and
        more. Dispatcher and simulator plan with it, so one that batches says so here."""
        return 1

    @abstractmethod
    def decide(self, now: int, busy: Collection[int] = ()) -> Decision:
        """The engine could start a batch now: which one?

        Args:
            now: the time.
            busy: stages that run a batch at this moment, whoever has asked for it, once for each
                (so that its length is that of lanes in use); with :attr:`SIDE_BY_SIDE` those that
                can run no further one. No ``Run`` may name one of them.
        """

    @abstractmethod
    def waiting(self) -> Iterable[Query]:
        """The queries that wait, by arrival and, where that is the same, by key."""
