"""Children: the processes that the Manager launched, watched by pidfd, and their logs."""

from __future__ import annotations

import logging
import math
import resource
import select
import signal
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

from blockflow.control.events import Exited, Kill, Launch, Launched, LaunchFailed
from blockflow.control.fleet import Life
from blockflow.control.logfiles import LogFiles
from blockflow.control.memory import Shortage, killed
from blockflow.core.errors import BlockFlowError, SystemError_
from blockflow.launch.base import Child, Launcher, stop_all
from blockflow.launch.ends import TEMPLATE_STATUS
from blockflow.launch.process import certain_start_time
from blockflow.launch.refused import not_started

log = logging.getLogger("blockflow.control")

_ASK_NS = 20_000_000
"""How often the launcher is asked for what was deferred."""

_TOLD_KEPT = 256
"""Whose end was told lately: for longer than it takes to act on it."""

_END_S = 1.0
"""For a process that was started just now to be gone once it is killed."""

_OWN_DESCRIPTORS = 32
_DESCRIPTORS_PER_CHILD = 8
"""For its pidfd, its connections and its readiness probe. Without a descriptor for a connection
libzmq would end this process: a further child is refused before."""


class Children:
    """Launches, kills and reaps; owned by the Manager's thread, which is not made to wait for long.

    A launch that the launcher cannot carry out yet (its template is importing) is deferred, and so
    are those that come after it. Nothing is known of them to anybody else: to the journal they are
    lives without a process. So it is with one whose order cannot be completed yet, but that only
    holds up others of which this is true as well.

    Args:
        launcher: how processes are started.
        complete: gives an order what the process needs to know from the disk; None = not yet. What
            it raises of BlockFlow's own fails the launch.
        poll: the poller of the owner's loop; pidfds are registered in it.
        log_dir: where the launch orders put the log files; the oldest are removed.
        warn: told of what people should know.
        claim: whether the kernel has killed for want of memory (:class:`KillWatch`).
    """

    def __init__(
        self,
        launcher: Launcher,
        complete: Callable[[Launch], Launch | None],
        poll: select.poll,
        log_dir: Path,
        warn: Callable[[str], None],
        claim: Callable[[int], Shortage | None],
    ) -> None:
        self._launcher = launcher
        self._complete = complete
        self._poll = poll
        self._logs = LogFiles(log_dir, warn)
        self._claim = claim
        self._by_fd: dict[int, int] = {}
        self._children: dict[int, tuple[Child, str]] = {}
        self._incomplete: dict[int, Launch] = {}
        self._deferred: dict[int, Launch] = {}
        self._unborn: list[Exited] = []
        self._told: deque[int] = deque(maxlen=_TOLD_KEPT)

    def __len__(self) -> int:
        return len(self._children) + len(self._incomplete) + len(self._deferred)

    def deadline(self, now_ns: int) -> int | None:
        """When to ask again (:meth:`go_on`, :meth:`reap`) although no descriptor is ready."""
        waiting = self._incomplete or self._deferred or self._unborn
        return now_ns + _ASK_NS if waiting else None

    def launch(self, order: Launch) -> Launched | LaunchFailed | None:
        """Start the process; None = later, :meth:`go_on` will tell."""
        try:
            self._check_descriptors(order)
        except SystemError_ as e:
            return self._failed(order, e)
        log_path = str(order.spec.get("log_path", ""))
        if log_path:
            self._logs.prune(path for _, path in self._children.values())
            if not self._logs.make(log_path, order.name):
                order = replace(order, spec={**order.spec, "log_path": ""})
        return self._begin(order)

    def go_on(self) -> Iterator[Launched | LaunchFailed]:
        """Carry out what was deferred, in order, as far as that is possible by now."""
        while self._deferred:
            order = next(iter(self._deferred.values()))
            event = self._attempt(order)
            if event is None:
                break
            del self._deferred[order.incarnation]
            yield event
        while self._incomplete:
            order = next(iter(self._incomplete.values()))
            event = self._begin(order)
            if event is not None:
                yield event
            elif order.incarnation in self._incomplete:
                return

    def _begin(self, order: Launch) -> Launched | LaunchFailed | None:
        try:
            completed = self._complete(order)
        except BlockFlowError as e:
            self._incomplete.pop(order.incarnation, None)
            return self._failed(order, e)
        except Exception as e:
            self._incomplete.pop(order.incarnation, None)
            return self._defect(order, e)
        if completed is None:
            self._incomplete[order.incarnation] = order
            return None
        self._incomplete.pop(order.incarnation, None)
        event = None if self._deferred else self._attempt(completed)
        if event is None:
            log.info("launch of %s waits for the launcher", order.name)
            self._deferred[order.incarnation] = completed
        return event

    def _attempt(self, order: Launch) -> Launched | LaunchFailed | None:
        try:
            child = self._launcher.attempt(order.entry, order.spec, order.name)
        except BlockFlowError as e:
            return self._failed(order, e)
        except Exception as e:
            return self._defect(order, e)
        if child is None:
            return None
        try:
            started = certain_start_time(child.pid)
        except OSError as e:
            # A successor could not tell whose number it is: it would end a sound process later.
            stop_all([child], _END_S)
            child.close()
            what = f"launch of {order.name!r}"
            return self._failed(order, not_started(what, str(e), e.errno or 0, order.name))
        self._watch(order.incarnation, child, str(order.spec.get("log_path", "")))
        return Launched(order.incarnation, child.pid, started)

    def _defect(self, order: Launch, error: Exception) -> LaunchFailed:
        """An option that no message can carry, or a defect. The life that waits for it ends, as
        after any launch that failed: else it would be neither here nor gone for ever."""
        log.exception("defect in the launch of %s", order.name)
        text = f"launch of {order.name!r}: {type(error).__name__}: {error}"
        return self._failed(order, SystemError_("INTERNAL", text, where=order.name))

    def _failed(self, order: Launch, error: BlockFlowError) -> LaunchFailed:
        if error.details.get(TEMPLATE_STATUS) == -signal.SIGKILL:
            shortage = self._claim(time.monotonic_ns())
            if shortage is not None and shortage.own:
                error = killed(order.name, shortage, f"{error.message}: {shortage}")
        self._told.append(order.incarnation)
        log.error("launch of %s failed: %s", order.name, error)
        return LaunchFailed(order.incarnation, error)

    def _check_descriptors(self, order: Launch) -> None:
        soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        most = most_children(soft)
        if len(self) >= most:
            raise SystemError_(
                "NO_SPACE",
                f"{most} processes are all that {soft} file descriptors are enough for",
                where=order.name,
                hint="raise the limit: ulimit -n",
            )

    def _watch(self, incarnation: int, child: Child, log_path: str) -> None:
        self._children[incarnation] = (child, log_path)
        self._by_fd[child.pidfd] = incarnation
        self._poll.register(child.pidfd, select.POLLIN)

    def adopt(self, life: Life, log_path: str) -> Exited | None:
        """Take over what a former Manager has launched; its end, if it is gone."""
        found = self._launcher.adopt(life.name, life.pid, life.started)
        if isinstance(found, int):
            self._told.append(life.incarnation)
            return Exited(life.incarnation, found, self._logs.tail(log_path))
        self._watch(life.incarnation, found, log_path)
        return None

    @property
    def template_pid(self) -> int:
        """Of the process that the launcher forks from, 0 = none."""
        return self._launcher.template_pid

    def pids(self) -> set[int]:
        """Of all that are watched."""
        return {child.pid for child, _ in self._children.values()}

    def kill(self, order: Kill) -> None:
        """End a process; a deferred one will never be, and :meth:`reap` tells its end as well. So
        it does of one that was never heard of: whoever wants its end waits for that."""
        entry = self._children.get(order.incarnation)
        if entry is not None:
            entry[0].kill()
        elif order.incarnation not in self._told:
            self._incomplete.pop(order.incarnation, None)
            self._deferred.pop(order.incarnation, None)
            self._told.append(order.incarnation)
            self._unborn.append(Exited(order.incarnation, -signal.SIGKILL))

    def kill_all(self, timeout_s: float) -> None:
        """Kill what is left and wait until it is gone; for the end of the control plane."""
        self._incomplete.clear()
        self._deferred.clear()
        stop_all([child for child, _ in self._children.values()], timeout_s)
        for child, _ in self._children.values():
            child.close()
        self._children.clear()
        self._by_fd.clear()

    def reap(self, ready_fds: list[int]) -> Iterator[Exited]:
        """The deaths behind these descriptors; others in the list are not ours."""
        while self._unborn:
            yield self._unborn.pop(0)
        for fd in ready_fds:
            incarnation = self._by_fd.get(fd)
            if incarnation is None:
                continue
            child, log_path = self._children[incarnation]
            status = child.poll()
            if status is None:
                continue
            # What may fail comes before, or after: nobody would tell this death once more.
            said = self._logs.tail(log_path)
            self._poll.unregister(fd)
            del self._by_fd[fd], self._children[incarnation]
            self._told.append(incarnation)
            yield Exited(incarnation, status, said)
            child.close()
            if log_path:
                self._logs.closed(log_path, status)

    def tend(self, now_ns: int) -> None:
        """Look after what launches rely on, and after the logs. Called often."""
        self._launcher.tend()
        self._logs.look((path for _, path in self._children.values() if path), now_ns)


def most_children(descriptors: int) -> float:
    """How many processes a control plane can have that may have so many descriptors."""
    if descriptors == resource.RLIM_INFINITY:
        return math.inf
    return max(0, descriptors - _OWN_DESCRIPTORS) // _DESCRIPTORS_PER_CHILD
