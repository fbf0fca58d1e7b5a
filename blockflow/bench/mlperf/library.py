"""Library: what LoadGen's sample numbers stand for: a task and a row of its inputs. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import gcd, sqrt

from blockflow.bench.options import nonsense

MANY = 1 << 16
"""Entries of a library whose queries hold several samples: see :func:`shares`."""
MOST = 1 << 22
"""Entries of a library at most: half a GiB in either process."""


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
    def weighted(
        cls, rows: Mapping[str, int], weights: Mapping[str, int], per_query: int = 1
    ) -> Library:
        """Entries in the proportion of the weights, every row at least once.

        LoadGen draws samples uniformly, so that a task is asked as often as it has entries. It
        leaves out what does not make a whole query of ``per_query`` samples: here that is nothing.

        Raises:
            RequestError: INVALID_REQUEST: more entries than LoadGen's process should hold.
        """
        total = sum(weights[task] for task in rows)
        rounds = max(-(-n // weights[task]) for task, n in rows.items())
        if per_query > 1:
            whole = per_query // gcd(per_query, total)
            rounds = -(-max(rounds, -(-MANY // total)) // whole) * whole
        if rounds * total > MOST:
            told = ", ".join(f"{task}={weights[task]}: {n}" for task, n in rows.items())
            raise nonsense(
                f"every row by these weights makes {rounds * total:,} samples (rows: {told})",
                "--task, --data",
                f"at most {MOST:,}: weights that lie less apart, or fewer rows",
            )
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


def shares(weights: Mapping[str, int], per_query: int = 1) -> dict[str, float]:
    """Share of the queries (0..1) that ask for each task, at the least.

    A query of several samples asks for neighbours in LoadGen's shuffled library, from anywhere on.
    How many of these places hold a task is a matter of that one shuffle: in a library of
    :data:`MANY` entries it is what the weights say, but for three standard deviations.
    """
    total = sum(weights.values())
    found = {}
    for task, weight in weights.items():
        share = weight / total
        without = (1 - share) ** per_query
        chance = 3 * sqrt(per_query * without * (1 - without) / MANY) if per_query > 1 else 0.0
        found[task] = max(share, 1 - without - chance)
    return found
