"""The thesis's tables 4.5 and 4.6, and the constants that reproduce them. Pure.

Table 4.5 (ResNet-50) follows to the megabyte from whole numbers. They are those of table 4.2: the
memory that torch reserves (26, 26, 56 and 110 MB) and a context of 367 MB. A fused process and the
whole model reserve less than their blocks apart (29, 138 and 174 MB).

For ResNet-152 nothing but table 4.6 is printed. Its constants are solved from the table (least
largest error: every cell within half a megabyte); of blocks 1 and 2 it shows the sum only, so each
has half.

Three cells are misprints: each contradicts the rest of its table, two of them also the saving that
stands beside them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from blockflow.bench.thesis.memory_model import (
    FIRST,
    FULL,
    LAST,
    SCENARIOS,
    Counts,
    Fusion,
    Occupancy,
)

TASKS = 100
"""Of both tables."""

_CONTEXT = 367.0
"""MB: what table 4.5 needs. The thesis's text says "around 370"."""


def table_counts(number: int) -> Counts:
    """Tasks by class as both tables have them.

    Scenarios 1 and 5 hold 99 modular tasks, and are compared with 100 traditional ones.
    """
    if number == 1:
        return Counts(33, 33, 33)
    if number == 5:
        return Counts(1, 4, 94)
    return SCENARIOS[number - 1].counts(TASKS)


@dataclass(frozen=True, slots=True)
class Cell:
    """One printed cell: megabytes, and the saving in per cent beside it."""

    mb: int
    saving: float


@dataclass(frozen=True, slots=True)
class ThesisTable:
    """One of the two tables.

    Attributes:
        label: as the thesis numbers it.
        occupancy: the constants that reproduce it.
        traditional: megabytes, the same in every row.
        rows: scenario -> its cells as printed, in the order of ``Fusion``.
        misprints: (scenario, fusion) -> the cell that the rest of the table needs.
    """

    label: str
    occupancy: Occupancy
    traditional: int
    rows: Mapping[int, Sequence[Cell]]
    misprints: Mapping[tuple[int, Fusion], Cell]

    def printed(self, number: int, fusion: Fusion) -> Cell:
        return self.rows[number][list(Fusion).index(fusion)]

    def meant(self, number: int, fusion: Fusion) -> Cell:
        """The cell without its misprint."""
        return self.misprints.get((number, fusion), self.printed(number, fusion))


def _rows(*lines: tuple[int, int, int, float, float, float]) -> dict[int, tuple[Cell, ...]]:
    return {
        i: tuple(Cell(mb, share) for mb, share in zip(line[:3], line[3:], strict=True))
        for i, line in enumerate(lines, 1)
    }


RESNET50 = ThesisTable(
    "4.5",
    Occupancy(
        "resnet50",
        "MB",
        {
            (1,): 393.0,
            (2,): 393.0,
            (3,): 423.0,
            (4,): 477.0,
            FIRST: 396.0,
            LAST: 505.0,
            FULL: 541.0,
        },
        _CONTEXT,
    ),
    54100,
    _rows(
        (64503, 64113, 51078, -19.23, -18.51, 5.59),
        (62239, 61849, 49999, -15.04, -14.32, 7.58),
        (57889, 57299, 49399, -6.63, -5.91, 8.69),
        (51344, 50954, 48979, 5.09, 5.82, 9.47),
        (50188, 49798, 48218, 7.23, 7.95, 10.87),
        (65439, 65049, 53199, -20.96, -20.24, 1.67),
        (62169, 61779, 53879, -14.91, -14.19, 0.41),
        (56784, 56394, 54419, -4.96, -4.24, -0.59),
    ),
    {(3, Fusion.NONE): Cell(57689, -6.63)},
)
RESNET152 = ThesisTable(
    "4.6",
    Occupancy(
        "resnet152",
        "MB",
        {
            (1,): 394.104,
            (2,): 394.104,
            (3,): 543.712,
            (4,): 500.006,
            FIRST: 399.706,
            LAST: 631.018,
            FULL: 668.304,
        },
        _CONTEXT,
    ),
    66830,
    _rows(
        (74329, 73940, 60321, -11.22, -10.64, 9.74),
        (63027, 68938, 56557, 5.69, -3.15, 15.37),
        (63048, 62660, 54406, 5.66, 6.24, 18.59),
        (54893, 54504, 52441, 17.86, 18.44, 21.53),
        (53176, 52787, 51136, 20.43, 21.01, 23.48),
        (77742, 77353, 64972, -16.33, -15.75, 2.78),
        (74829, 74441, 66187, -11.97, -11.39, 0.96),
        (69198, 68801, 66746, -3.54, -2.96, 0.13),
    ),
    {(2, Fusion.NONE): Cell(69327, -3.74), (8, Fusion.FIRST): Cell(68809, -2.96)},
)
TABLES: Mapping[str, ThesisTable] = {t.occupancy.model: t for t in (RESNET50, RESNET152)}
