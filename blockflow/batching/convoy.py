"""Convoy: queries that travel through a worker's stages together; Convoys: the books of them all.

A query of a convoy waits at a stage, or runs, or has just landed: its batch is done, and it either
arrives again at its next stage before the next decision or has left the worker.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence

from blockflow.batching.policy import Query, key_of, rows_of


class Convoy:
    """Queries that a policy moves together.

    Attributes:
        waiting: by key, those that wait, in the order of a batch.
        running: by key, those in the batch that runs.
        landed: by key, those that have run and may arrive again.
        stage: where it runs or ran last.
        rows: of those that wait or run; of those that have landed, until they settle.
    """

    __slots__ = ("landed", "rows", "running", "stage", "waiting")

    def __init__(self) -> None:
        self.waiting: dict[int, Query] = {}
        self.running: dict[int, Query] = {}
        self.landed: dict[int, Query] = {}
        self.stage = 0
        self.rows = 0

    @property
    def empty(self) -> bool:
        return not (self.waiting or self.running or self.landed)


class Convoys:
    """Who travels with whom."""

    def __init__(self) -> None:
        self._of: dict[int, Convoy] = {}
        self._running: list[Convoy] = []
        self._landed: list[Convoy] = []

    def __iter__(self) -> Iterator[Query]:
        """All queries that wait in some convoy."""
        return (c.waiting[key] for key, c in self._of.items() if key in c.waiting)

    def join(self, convoy: Convoy, queries: Collection[Query]) -> None:
        """Let waiting queries travel in ``convoy`` from now on."""
        joining = dict(zip(map(key_of, queries), queries, strict=True))
        if not self._of.keys().isdisjoint(joining):
            for key in joining.keys() & self._of.keys():
                left = self._of[key]
                if left.waiting.pop(key, None) is not None:
                    left.rows -= joining[key].rows
        convoy.waiting |= joining
        convoy.rows += sum(map(rows_of, queries))
        self._of |= dict.fromkeys(joining, convoy)

    def start(self, convoy: Convoy, queries: Sequence[Query]) -> None:
        """These of its queries run as one batch."""
        convoy.stage = queries[0].stage
        if len(queries) == len(convoy.waiting):
            convoy.running, convoy.waiting = convoy.waiting, {}
        else:
            for query in queries:
                convoy.running[query.key] = convoy.waiting.pop(query.key)
        self._running.append(convoy)

    def done(self, stage: int, keys: Sequence[int]) -> Convoy | None:
        """The convoy whose batch of ``keys`` has left ``stage``; None when it is none of ours."""
        for convoy in self._running:
            if convoy.stage == stage and keys and keys[0] in convoy.running:
                break
        else:
            return None
        self._running.remove(convoy)
        convoy.landed, convoy.running = convoy.running, {}
        self._landed.append(convoy)
        return convoy

    def arrive(self, query: Query) -> bool:
        """True when ``query`` goes on in the convoy that it landed with."""
        key, origin = query.key, query.origin
        convoy = self._of.get(key if origin is None else origin)
        if convoy is None:
            return False  # from another policy's stage, or it has run alone
        if key not in convoy.landed:
            if convoy not in self._landed:
                return False
            self._of[key] = convoy  # a branch of a path that has just forked: with the trunk's
        convoy.waiting[key] = query
        return True

    def settle(self) -> list[Convoy]:
        """Convoys that have landed since the last call; what has not arrived has left."""
        settled, self._landed = self._landed, []
        for convoy in settled:
            if convoy.landed.keys() != convoy.waiting.keys():  # some left, or have branched
                for key in convoy.landed.keys() - convoy.waiting.keys():
                    self._of.pop(key, None)
                convoy.rows = sum(map(rows_of, convoy.waiting.values()))
            convoy.landed = {}
        return settled

    def drop(self, key: int) -> Convoy | None:
        """A waiting query is gone; the convoy that has lost it, unless it is yet to settle."""
        convoy = self._of.get(key)
        if convoy is None or key not in convoy.waiting:
            return None
        convoy.rows -= convoy.waiting[key].rows
        del convoy.waiting[key], self._of[key]
        return None if convoy in self._landed else convoy
