"""Trunk: the stages of a worker that whoever comes to it runs. Pure.

A lane that computes is not to be had before it is done. So a block of one task's own, however much
is asked of it, gets one lane at a time: the other tasks must not wait for it in all of them. Who
waits for a block that everybody runs would do so anyway.
"""

from __future__ import annotations

from collections.abc import Collection

from blockflow.core.routing import PathTree

_PATHS_KEPT = 4096


class Trunk:
    """Stages on all ways that have been seen.

    Args:
        stages: of the worker.
    """

    def __init__(self, stages: Collection[int]) -> None:
        self._local = frozenset(stages)
        self._seen: set[tuple[bytes, int]] = set()
        self._common: frozenset[int] | None = None

    def __contains__(self, stage: int) -> bool:
        return self._common is not None and stage in self._common

    def note(self, path: PathTree, hop: int) -> None:
        """A newcomer begins here, at node ``hop`` of its path."""
        key = (path.wire, hop)
        if key in self._seen:
            return
        if len(self._seen) >= _PATHS_KEPT:
            self._seen.clear()
        self._seen.add(key)
        way: set[int] = set()
        todo = [hop]
        while todo:
            node = todo.pop()
            way.add(path.nodes[node].stage)
            todo += path.children(node)
        self._common = self._local & way if self._common is None else self._common & way

    def forget(self) -> None:
        """The tasks are other ones from now on."""
        self._seen.clear()
        self._common = None
