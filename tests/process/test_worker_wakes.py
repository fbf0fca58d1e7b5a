"""Which requests wake a worker's data thread: it costs the forward beside it its core."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from dispatcher_rig import wait_until

from blockflow.wire.control import Ping, Pong
from tests import worker_rig
from tests.worker_rig import WAIT_S, Rig, echo

rig = worker_rig.rig


def test_a_blocks_time_out_wakes_nobody_for_each_forward(rig: Rig) -> None:
    """The data thread, woken by a ping, had gone to sleep for ever; who began a forward then had to
    wake it for the time-out's sake."""
    rig.start(11, {1: echo(rig, "bounded")}, stage={"timeout_ms": 60_000})
    rig.publish()
    pid = rig.children[11].pid
    status = Path(f"/proc/{pid}/task/{pid}/status")

    def sleeps() -> int:
        """How often its main thread, which is that one, has gone to sleep."""
        lines = dict(line.split(":", 1) for line in status.read_text().splitlines())
        return int(lines["voluntary_ctxt_switches"])

    woken = []
    for n in range(12):
        before = sleeps()
        rig.tell(11, Ping(n))
        rig.expect(Pong, 11)
        wait_until(lambda before=before: sleeps() > before, WAIT_S)  # type: ignore[misc]
        before = sleeps()
        rig.send(np.zeros((1, 4), np.float32), [1])
        rig.result()
        woken.append(sleeps() > before)
    assert woken.count(False) >= 6, "but by what else happens meanwhile"
