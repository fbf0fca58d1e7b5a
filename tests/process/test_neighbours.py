"""Tasks that share a trunk: one whose own block stands still holds up no other."""

from __future__ import annotations

import numpy as np
import pytest

from tests import worker_rig
from tests.worker_rig import Rig, at_work, echo

rig = worker_rig.rig

TRUNK, SLOW, QUICK = 1, 2, 3
SLOTS = 4
ROW_MS, LONG = 100, 1000
"""A forward of so many rows takes longer than any test waits; it ends with the process."""
LATE_MS = 60_000


@pytest.mark.parametrize("together", [False, True], ids=["workers apart", "one worker"])
def test_who_waits_for_a_slow_block_holds_no_slots_that_others_need(
    rig: Rig, together: bool
) -> None:
    """Several times as many wait at the slow block as the trunk has slots."""
    slow, quick = echo(rig, "slow", row_ms=ROW_MS), echo(rig, "quick")
    rig.start(13, {TRUNK: echo(rig, "trunk")}, slots=SLOTS)
    if together:
        rig.start(11, {SLOW: slow, QUICK: quick}, lanes=2)
    else:
        rig.start(11, {SLOW: slow})
        rig.start(12, {QUICK: quick})
    rig.publish()
    x = np.zeros((1, 4), np.float32)
    rig.send(x, [TRUNK, QUICK])
    rig.result()  # now the trunk has sent to both kinds of readers
    rig.send(np.zeros((LONG, 4), np.float32), [SLOW], remaining_ms=LATE_MS)
    at_work(rig, SLOW)
    for n in range(5 * SLOTS):
        rig.send(x, [TRUNK, SLOW], remaining_ms=LATE_MS)
        sent = rig.send(np.full((1, 4), n, np.float32), [TRUNK, QUICK])[0]
        message, y = rig.result()
        assert message.items[0].request_id == sent
        np.testing.assert_array_equal(y, np.full((1, 4), n, np.float32))
