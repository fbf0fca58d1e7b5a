"""Table 4.2 as the thesis prints it, and as the model is cut here. Pure.

The thesis has the classifier (``class_h``) as a fifth block in this table; elsewhere it is a part
of the fourth, as it is here.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

SOURCE = "table 4.2"
SCRIPTED, TRACED = "scripted", "traced"
CLASSIFIER, LAST = "class_h", "block4"


@dataclass(frozen=True, slots=True)
class Row:
    """A block by itself on a GPU: its forward in ms, and memory in MB as the thesis prints it.

    Attributes:
        ms, std_ms: mean and standard deviation of the forward.
        allocated, allocated_std: by torch.
        reserved: by torch.
        process: all that the process occupies there.
    """

    ms: float
    std_ms: float
    allocated: float
    allocated_std: float
    reserved: float
    process: float


PRINTED: Mapping[str, Mapping[str, Row]] = {
    SCRIPTED: {
        "block1": Row(2.401, 0.142, 4.858, 1.230, 26.0, 394.0),
        "block2": Row(2.718, 0.154, 9.689, 1.046, 26.0, 394.0),
        "block3": Row(4.021, 0.253, 29.755, 0.967, 56.0, 424.0),
        "block4": Row(2.276, 0.161, 59.612, 2.619, 110.0, 478.0),
        CLASSIFIER: Row(0.287, 0.055, 16.328, 0.000, 22.0, 396.0),
    },
    TRACED: {
        "block1": Row(2.254, 0.176, 4.896, 1.362, 26.0, 394.0),
        "block2": Row(2.641, 0.145, 9.536, 0.763, 26.0, 394.0),
        "block3": Row(3.914, 0.575, 29.746, 1.040, 56.0, 424.0),
        "block4": Row(2.233, 0.170, 59.442, 0.989, 110.0, 478.0),
        CLASSIFIER: Row(0.287, 0.067, 16.339, 0.104, 22.0, 396.0),
    },
}
"""Form -> block -> its row."""

OFFLINE_SUM_MS = round(sum(row.ms for row in PRINTED[SCRIPTED].values()), 3)
"""The blocks called in turn, without anything between them."""


def cut(form: str) -> dict[str, Row]:
    """The rows of a form in four blocks; none where the thesis did not measure that form.

    What two processes take is not added up: that of the fourth stays, and the classifier's stands
    in ``PRINTED``. Deviations are those of a sum of two independent times or sizes.
    """
    rows = dict(PRINTED.get(form, {}))
    if not rows:
        return {}
    last, head = rows[LAST], rows.pop(CLASSIFIER)
    rows[LAST] = replace(
        last,
        ms=last.ms + head.ms,
        std_ms=round(math.hypot(last.std_ms, head.std_ms), 3),
        allocated=last.allocated + head.allocated,
        allocated_std=round(math.hypot(last.allocated_std, head.allocated_std), 3),
        reserved=last.reserved + head.reserved,
    )
    return rows
