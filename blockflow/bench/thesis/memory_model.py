"""Memory of modular and of traditional deployment (thesis, section 4.3). Pure.

A model of four blocks serves N tasks. Traditionally each task has a whole model in a process of its
own (eq. 4.6). Modular, tasks share the processes of the first blocks and own the rest, by class:

* class A: a whole model of its own;
* class B: blocks 1 and 2 shared, 3 and 4 its own;
* class C: blocks 1 to 3 shared, 4 its own (the thesis's text says "3 specialised", its tables need
  three shared ones).

Memory is a sum over processes of what each takes with the blocks that it hosts (eq. 4.7-4.9; where
eq. 4.12-4.14 print a product, the thesis's own tables need this sum). Fused blocks are one process.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

Blocks = tuple[int, ...]
"""The blocks that a process hosts, by their numbers from 1."""

FIRST, LAST = (1, 2), (3, 4)
FULL = (1, 2, 3, 4)
PROCESSES: tuple[Blocks, ...] = ((1,), (2,), (3,), (4,), FIRST, LAST, FULL)
"""Every process that some deployment has."""

NOTHING: Blocks = ()
"""A process without a block of the model: it takes the context C."""


class Fusion(enum.StrEnum):
    """Which neighbours of one owner run in one process."""

    NONE = "modular"
    FIRST = "blocks 1+2 fused"
    BOTH = "1+2 and 3+4 fused"


@dataclass(frozen=True, slots=True)
class Counts:
    """Tasks of each class."""

    a: int
    b: int
    c: int

    @property
    def total(self) -> int:
        return self.a + self.b + self.c


@dataclass(frozen=True, slots=True)
class Scenario:
    """How tasks spread over the classes (thesis, table 4.4).

    Attributes:
        number: 1 to 8.
        weights: of the classes A, B and C; per cent, but for rounding.
    """

    number: int
    weights: tuple[int, int, int]

    def counts(self, tasks: int) -> Counts:
        """All ``tasks``, by the largest remainder, ties to the first class."""
        whole = sum(self.weights)
        parts = [divmod(w * tasks, whole) for w in self.weights]
        numbers = [quotient for quotient, _ in parts]
        order = sorted(range(len(parts)), key=lambda i: -parts[i][1])
        for i in order[: tasks - sum(numbers)]:
            numbers[i] += 1
        return Counts(*numbers)


SCENARIOS: Sequence[Scenario] = (
    Scenario(1, (33, 33, 33)),
    Scenario(2, (10, 30, 60)),
    Scenario(3, (5, 20, 75)),
    Scenario(4, (5, 5, 90)),
    Scenario(5, (1, 4, 95)),
    Scenario(6, (60, 30, 10)),
    Scenario(7, (75, 20, 5)),
    Scenario(8, (90, 5, 5)),
)


@dataclass(frozen=True, slots=True)
class Occupancy:
    """What a process takes with the blocks that it hosts.

    Attributes:
        model: whose blocks.
        unit: of all numbers.
        processes: one number per entry of ``PROCESSES``: the blocks' own memory and the context.
        context: C, what a process takes before it has a block.
    """

    model: str
    unit: str
    processes: Mapping[Blocks, float]
    context: float

    def own(self, blocks: Blocks) -> float:
        """The blocks' own memory in a process of theirs: o_j of eq. 4.5."""
        return self.processes[blocks] - self.context

    def predicted(self, blocks: Blocks) -> float:
        """A fused process by the sum of its blocks: every block after the first saves C."""
        return sum(self.own((b,)) for b in blocks) + self.context

    def traditional(self, tasks: int) -> float:
        """Eq. 4.6."""
        return tasks * self.processes[FULL]

    def modular(self, counts: Counts, fusion: Fusion) -> float:
        """Eq. 4.7-4.9, and with ``fusion`` the sums that eq. 4.12-4.14 mean.

        A class B task's blocks 3 and 4 have one owner and can be fused; the shared block 3 stays
        apart, because it serves class C alone.
        """
        take = self.processes
        first = take[(1,)] + take[(2,)] if fusion is Fusion.NONE else take[FIRST]
        last = take[LAST] if fusion is Fusion.BOTH else take[(3,)] + take[(4,)]
        shared = first + take[(3,)]
        return shared + counts.a * take[FULL] + counts.b * last + counts.c * take[(4,)]


def saving(modular: float, traditional: float) -> float:
    """Per cent that modular deployment saves; negative where it costs more."""
    return (1 - modular / traditional) * 100
