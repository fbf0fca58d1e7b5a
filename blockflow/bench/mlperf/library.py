"""Library: what LoadGen's sample numbers stand for: a task and a row of its inputs. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Library:
    """Entry i is what sample i asks: ``tasks[task[i]]`` with row ``row[i]`` of its inputs."""

    tasks: tuple[str, ...]
    task: tuple[int, ...]
    row: tuple[int, ...]

    def __len__(self) -> int:
        return len(self.task)

    @classmethod
    def once(cls, rows: Mapping[str, int]) -> Library:
        """Every row of every task once: the data set of an accuracy run."""
        pairs = [(t, r) for t, n in enumerate(rows.values()) for r in range(n)]
        return cls(tuple(rows), tuple(t for t, _ in pairs), tuple(r for _, r in pairs))

    @classmethod
    def weighted(cls, rows: Mapping[str, int], weights: Mapping[str, int]) -> Library:
        """Entries in the proportion of the weights, every row at least once.

        LoadGen draws samples uniformly, so that a task is asked as often as it has entries.
        """
        rounds = max(-(-n // weights[task]) for task, n in rows.items())
        pairs = [
            (t, (turn * weights[task] + i) % n)
            for turn in range(rounds)
            for t, (task, n) in enumerate(rows.items())
            for i in range(weights[task])
        ]
        return cls(tuple(rows), tuple(t for t, _ in pairs), tuple(r for _, r in pairs))

    def groups(
        self, indices: Sequence[int], most: Mapping[str, int], kinds: Mapping[str, Sequence[int]]
    ) -> Iterator[tuple[str, list[int]]]:
        """Parts ``indices`` into requests: positions in it that may travel as rows of one tensor.

        Args:
            indices: sample numbers.
            most: rows of one request, per task.
            kinds: per task and row a number: rows with the same one have the same dims.
        """
        open_: dict[tuple[int, int], list[int]] = {}
        for position, index in enumerate(indices):
            name = self.tasks[self.task[index]]
            key = (self.task[index], kinds[name][self.row[index]])
            group = open_.setdefault(key, [])
            group.append(position)
            if len(group) >= most[name]:
                yield name, open_.pop(key)
        for (task, _), group in open_.items():
            yield self.tasks[task], group
