"""A parallel run goes on when one of its processes dies in a test, and says what it died of.

pytest-xdist 3.8 puts all that a dead process was ever given back into the queue, what it had done
as well: work of which nothing is left to be done, for whose end everybody waits in the end (its
issues 1323, 1327 and 1378).
"""

from __future__ import annotations

import signal
import subprocess
from contextlib import suppress

from xdist.scheduler import LoadFileScheduling
from xdist.workermanage import WorkerController

ENDS_S = 5.0


class CrashProof(LoadFileScheduling):
    """A file's tests go to one process. If that dies, the test that it was in is reported, and run
    once more if ``--reruns`` says so; what was left of its files comes next."""

    def remove_node(self, node: WorkerController) -> str | None:
        workload = self.assigned_work.pop(node)
        left = {name: unit for name, unit in workload.items() if not all(unit.values())}
        # A process takes its tests in order: the first that is not done is the one that it died in.
        crashed = next((test for u in left.values() for test, done in u.items() if not done), None)
        if crashed is None:
            return None
        left[self._split_scope(crashed)][crashed] = True
        for name, unit in reversed(left.items()):
            if not all(unit.values()):
                self._put_first(name, unit)
        return crashed

    def mark_test_pending(self, item: str) -> None:  # type: ignore[override]
        """The test that a process died in is to be run again."""
        name = self._split_scope(item)
        self._put_first(name, {**self.workqueue.get(name, {}), item: False})

    def _put_first(self, name: str, unit: dict[str, bool]) -> None:
        self.workqueue[name] = unit
        self.workqueue.move_to_end(name, last=False)

    def _reschedule(self, node: WorkerController) -> None:
        if node not in self.registered_collections:  # it has just been started, and is still to say
            return
        # A process begins a test when it knows the next one, or that there is none. A new one that
        # was given a single test would wait for what others have.
        super()._reschedule(node)
        while not node.shutting_down and self._pending_of(self.assigned_work[node]) < 2:
            super()._reschedule(node)


def cause_of_death(node: WorkerController) -> str:
    """How the process of ``node``, which nobody has told to end, ended."""
    process = getattr(getattr(node.gateway, "_io", None), "popen", None)
    if not isinstance(process, subprocess.Popen):
        return "not known"
    with suppress(subprocess.TimeoutExpired):
        status = process.wait(ENDS_S)
        return signal.Signals(-status).name if status < 0 else f"exit status {status}"
    return "it lives"
