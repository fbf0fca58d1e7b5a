"""Ways: which of a worker's blocks the tasks' queries run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence


class Ways:
    """The tasks' paths, found by block: each worker looks at those alone that lead through it.

    Args:
        paths: of each task, its canary's among them.
    """

    def __init__(self, paths: Mapping[str, Sequence[Sequence[str]]]) -> None:
        self._all = [(task, path) for task, ways in paths.items() for path in ways]
        self._hops: dict[str, list[tuple[int, int]]] = {}
        for number, (_, path) in enumerate(self._all):
            for at, block in enumerate(path):
                self._hops.setdefault(block, []).append((number, at))

    def through(self, blocks: Sequence[str]) -> list[tuple[int, ...]]:
        """Which of ``blocks`` of one worker, by position, the tasks' queries run between their
        arrival in it and their departure. (Who leaves it and comes back is a new query for it.)

        Args:
            blocks: in the worker's order.
        """
        hops = sorted((*hop, i) for i, b in enumerate(blocks) for hop in self._hops.get(b, ()))
        found: dict[tuple[int, ...], None] = {}
        visited: list[int] = []
        last = (-1, -1)
        for number, at, block in hops:
            if visited and (number, at - 1) != last:
                found[tuple(visited)] = None
                visited = []
            visited.append(block)
            last = (number, at)
        if visited:
            found[tuple(visited)] = None
        return list(found)

    def meeting(self, blocks: Sequence[str]) -> dict[str, list[Sequence[str]]]:
        """Of each task, the whole paths that run any of ``blocks``."""
        found: dict[str, list[Sequence[str]]] = {}
        for number in sorted({n for b in blocks for n, _ in self._hops.get(b, ())}):
            task, path = self._all[number]
            found.setdefault(task, []).append(path)
        return found
