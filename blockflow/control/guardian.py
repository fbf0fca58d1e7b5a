"""Guardian: the small process of ``blockflow up`` that outlives the Manager's and starts it again.

It holds what must not end with a Manager (:mod:`blockflow.launch.ward`) and does next to nothing,
so that there is next to nothing in it that could fail: it forks the Manager's process, waits, reaps
orphans, and passes signals on. It imports neither sockets' nor tensors' libraries and starts no
thread. When a Manager that was serving dies without having been told to end, another one is forked,
which takes over what runs (:mod:`blockflow.control.succession`). One that hangs is killed
(:mod:`blockflow.control.vigil`), and the same follows. When the guardian itself dies, the kernel
kills the Manager and the lifeline ends the rest.
"""

from __future__ import annotations

import logging
import os
import select
import signal
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from blockflow.control.memory import KillWatch
from blockflow.control.numbers import NumbersFile
from blockflow.control.release import refuse_mixture
from blockflow.control.supervision import GiveUp, RestartLedger, RestartPolicy, given_up, spread
from blockflow.control.vigil import Vigil, gone_since, was_killed
from blockflow.core.errors import SystemError_
from blockflow.launch.base import Lifeline
from blockflow.launch.process import (
    INSTANCE_ENV,
    become_subreaper,
    descendants,
    describe_exit,
    die_with,
    ending_signals,
    kill_process,
    set_process_name,
    start_time,
)
from blockflow.launch.refused import not_started
from blockflow.launch.vitals import read_vitals
from blockflow.launch.ward import LASTING, REST, TEMPLATE, Kept, Line, Reaped, Ward, awaited
from blockflow.launch.whereabouts import leave_what_is_gone
from blockflow.tensormq.janitor import RunDir, sweep_stale

log = logging.getLogger("blockflow.guardian")

MANAGER_POLICY = RestartPolicy(first_s=0.05, cap_s=5.0, crashes=5, window_s=60.0)
"""The first successor comes at once: nobody supervises the workers meanwhile."""

ADOPTIONS = 2
"""How many Managers may die, and not hang, before one has taken over; then it is begun anew."""

_AGAIN_S = 1.0  # between two tries to start a successor that the machine has no room for
_LEAVE_S = 2.0  # after the lifeline is cut, before who does not end by itself is killed
_KILL_S = 5.0
_STOP_S = 60.0  # for a Manager that was told to end, with all that it ends


class Guardian:
    """The life of ``blockflow up``.

    Args:
        run_root: below which the instance's run directory is made.
    """

    def __init__(self, run_root: Path) -> None:
        self._run_root = run_root
        self._pid = os.getpid()
        self._ledger = RestartLedger(MANAGER_POLICY)
        self._kills = KillWatch()
        self._kept, self._seen = dict[str, Kept](), dict[int, int]()
        self._reaped = Reaped()  # also those of whom no Manager came to read
        self._manager = self._client_port = self._began_ns = 0
        self._served = False  # some Manager was
        self._took_over = True  # the present one is
        self._failed = 0  # Managers that died before they had taken over, in a row
        self._anew = self._hung = self._told = ""
        self._short: SystemError_ | None = None  # what the present one lacks; another may come
        self._no_room = False  # a Manager has failed for want of room since the last one served
        self._spoke_ns = self._killed_ns = 0  # the present one, for the last time
        self._stop_ns: int | None = None

    def run(self) -> Ward | int:
        """Fork Managers until one ends in order.

        Returns:
            In a Manager's process what it is given, in the guardian's the exit status at the end.

        Raises:
            SystemError_: INTERNAL when Managers die too often, or the first one at its start;
                NO_SPACE where they cannot start for want of room.
            BlockFlowError: the run directory cannot be made.
        """
        become_subreaper()  # whom a dead template or Manager leaves is still below this process
        sweep_stale(self._run_root)
        self._wake, wake = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        self._listen(wake)
        self._begin()
        ward: Ward | None = None
        adopt, died_ns, cause = False, 0, ""
        try:
            while True:
                try:
                    ward = self._fork(adopt, died_ns, cause)
                    if ward is not None:
                        return ward
                    status = self._watch()
                    over = self._took_over or self._anew or self._stopping()
                    if adopt and self._short and not over:
                        raise self._short
                except SystemError_ as e:
                    self._await_room(e)
                    if self._stopping():
                        return 0
                    refuse_mixture(cause)  # an installation that is mended may be of another one
                    continue
                now_ns = time.monotonic_ns()
                if self._took_over:  # else nobody has been there since the one before it
                    died_ns = gone_since(self._spoke_ns, now_ns)
                cause = self._anew or self._hung or self._how(status, now_ns)
                if status == 0 or self._stopping() or not self._served:
                    return self._outcome(status, cause)
                log.warning("the control plane ended: %s", cause)
                refuse_mixture(cause)
                self._pause(now_ns)
                if self._stopping():
                    return 0
                # What one that hangs waits for would keep a new start waiting, too.
                self._failed = 0 if self._took_over else self._failed + (not self._hung)
                adopt = not self._anew and self._failed < ADOPTIONS
                if not adopt:
                    log.warning("what runs is ended, and begun anew from the stored state")
                    self._begin_anew()
        finally:
            if ward is None and os.getpid() == self._pid:
                self._end()
                for kept in self._kept.values():
                    os.close(kept.fd)

    # --- a Manager's life -----------------------------------------------------------------------

    def _fork(self, adopt: bool, died_ns: int, cause: str) -> Ward | None:
        """Start a Manager; None in the guardian. Raises SystemError_: it gets no process."""
        self._anew, self._hung, self._short = "", "", None
        self._took_over, self._spoke_ns = False, 0
        try:
            mine, theirs = Line.pair(self._reaped)
            try:
                pid = os.fork()
            except OSError:
                mine.close()
                theirs.close()
                raise
        except OSError as e:
            raise not_started("the control plane", str(e), e.errno or 0, "up") from e
        if pid:
            theirs.close()
            self._line, self._manager = mine, pid
            self._vigil = Vigil(time.monotonic_ns())
            if self._stopping():  # by a signal that found nobody to pass it on to, perhaps
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGTERM)
            return None
        die_with(self._pid)
        set_process_name("bf:manager")
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        leave_what_is_gone()
        mine.close()
        os.close(self._wake)
        os.environ[INSTANCE_ENV] = str(self._run_dir.path)
        self._run_dir.leave()
        return Ward(
            guardian=self._pid,
            run_dir=self._run_dir.path,
            lifeline_fd=self._lifeline.read_only(),
            line=theirs,
            kept=self._kept,
            deaths=self._ledger.total,
            adopt=adopt,
            died_ns=died_ns,
            began_ns=self._began_ns,
            client_port=self._client_port,
            cause=cause,
            stop_asked=self._stopping,
        )

    def _await_room(self, error: SystemError_) -> None:
        """Try again soon where a successor lacks room, or its state; else raise ``error``."""
        if not self._served or not (error is self._short or awaited(error)):
            raise error
        self._no_room |= error.code == "NO_SPACE"
        if str(error) != self._told:  # it is said once
            self._told = str(error)
            log.error("%s; who is served is served without", error)
        select.select([self._wake], [], [], _AGAIN_S)
        self._drain_wakes()
        self._reap()

    def _watch(self) -> int:
        """Serve the Manager until it ends; returns its exit status, or minus the signal."""
        poll = select.poll()
        poll.register(self._wake, select.POLLIN)
        poll.register(self._line.fileno(), select.POLLIN)
        while True:
            poll.poll(self._wait_ms())
            self._drain_wakes()
            self._kills.look(time.monotonic_ns())
            # First its messages: what it said before its end counts.
            if not self._hear():
                with suppress(KeyError):
                    poll.unregister(self._line.fileno())
            status = self._reap()
            if status is not None:
                self._hear()
                self._line.close()
                return status
            if self._hung:  # in a system call that does not end it lives on for a while
                if self._wait_ms() == 0:
                    log.error("the control plane waits for a disk or the like, and is left to that")
                    self._line.close()
                    return -signal.SIGKILL
            elif self._stop_ns is not None and self._wait_ms() == 0:
                self._kill("it does not end")
                log.error("the control plane does not end and is killed")
            elif self._served and self._stop_ns is None:
                self._look()

    def _look(self) -> None:
        """Kill the Manager if it hangs."""
        now = time.monotonic_ns()
        if now < self._vigil.deadline():
            return
        if why := self._vigil.look(read_vitals(self._manager, every_thread=True), now):
            self._kill(why)
            log.error("the control plane is killed: %s", why)

    def _kill(self, why: str) -> None:
        """Before it is said, which may take a while."""
        self._hung, self._killed_ns = why, time.monotonic_ns()
        os.kill(self._manager, signal.SIGKILL)

    def _hear(self) -> bool:
        """Take the Manager's messages; False once its end is closed."""
        while select.select([self._line], [], [], 0)[0]:
            message, fds = self._line.take()
            match message:
                case ["keep", str(name), int(pid), int(started)] if fds:
                    self._drop(name)
                    self._kept[name] = Kept(fds.pop(), pid, started)
                case ["serving", int(port)]:
                    self._served = self._took_over = True
                    self._client_port, self._no_room, self._told = port, False, ""
                case ["alive", int(when)]:
                    self._spoke_ns = when
                    self._vigil.heard(time.monotonic_ns())
                case ["stopping"]:
                    self._stop()
                    self._drop(REST)  # nobody shall wait at a door that nobody opens
                case ["failing", str(code), str(what), str(where), str(hint)]:
                    self._short = SystemError_(code, what, where=where, hint=hint)
                    self._no_room |= code == "NO_SPACE"
                case ["claimed"]:
                    self._kills.claim(time.monotonic_ns())  # it was not the Manager
                case ["anew", str(reason)]:
                    self._anew = reason
            for fd in fds:
                os.close(fd)
            if not message:
                return False
        return True

    def _reap(self) -> int | None:
        """Collect who has ended; the Manager's status if it is among them."""
        ended: int | None = None
        while True:
            try:
                pid, raw = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return ended
            if pid == 0:
                return ended
            status = os.waitstatus_to_exitcode(raw)
            if TEMPLATE in self._kept and self._kept[TEMPLATE].pid == pid:
                self._drop(TEMPLATE)  # from here on its number may be another one's
            if pid == self._manager:
                self._manager, ended = 0, status
            else:
                self._reaped.note(pid, status)
                if self._manager:
                    self._line.tell_reaped(pid, status)

    def _pause(self, now_ns: int) -> None:
        """Wait until the next Manager may be started. Raises SystemError_ when none may be."""
        verdict = self._ledger.crashed(now_ns, chance=spread(self._ledger.total))
        if isinstance(verdict, GiveUp):
            raise given_up(verdict.reason, self._no_room)
        while self._stop_ns is None and (left := verdict.at_ns - time.monotonic_ns()) > 0:
            select.select([self._wake], [], [], left / 1e9)
            self._drain_wakes()
            self._reap()

    def _how(self, status: int, now_ns: int) -> str:
        """Why a Manager ended; a SIGKILL may be the kernel's, for want of memory."""
        how = describe_exit(status) + " while it started" * (not self._served)
        short = self._kills.claim(now_ns) if status == -signal.SIGKILL else None
        self._no_room |= short is not None and short.own
        return how if short is None else f"{how}: {short}"

    def _outcome(self, status: int, cause: str) -> int:
        if status < 0 and not self._stopping():
            raise was_killed(status, cause, self._no_room)
        return status if status >= 0 else 1

    # --- signals --------------------------------------------------------------------------------

    def _listen(self, wake: int) -> None:
        def wanted(number: int, _frame: Any) -> None:
            self._stop()
            if self._manager and os.getpid() == self._pid:
                with suppress(ProcessLookupError):
                    os.kill(self._manager, number)

        signal.set_wakeup_fd(wake, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        for number in ending_signals():
            signal.signal(number, wanted)

    def _stop(self) -> None:
        if self._stop_ns is None:
            self._stop_ns = time.monotonic_ns()

    def _stopping(self) -> bool:
        return self._stop_ns is not None

    def _wait_ms(self) -> int | None:
        """Until the Manager is to be looked at, killed, or left; None = for its death only."""
        if self._stop_ns is None:
            if self._hung or not self._served:
                return None
            due = self._vigil.deadline()
        elif self._hung:
            due = self._killed_ns + int(_KILL_S * 1e9)
        else:
            due = self._stop_ns + int(_STOP_S * 1e9)
        return max(0, -(-(due - time.monotonic_ns()) // 1_000_000))

    def _drain_wakes(self) -> None:
        with suppress(BlockingIOError):
            os.read(self._wake, 4096)

    # --- the instance ---------------------------------------------------------------------------

    def _begin(self) -> None:
        self._run_dir = RunDir.create(self._run_root)
        self._lifeline = Lifeline()
        self._began_ns = time.monotonic_ns()

    def _begin_anew(self) -> None:
        numbers = NumbersFile(self._run_dir.path).read()
        self._end()
        self._begin()
        self._failed = 0
        if numbers:
            with suppress(OSError):  # they are for a disk that is full as well
                NumbersFile(self._run_dir.path).write(numbers)

    def _end(self) -> None:
        """End whatever of the instance lives, and remove the run directory."""
        self._lifeline.cut()
        for name in [n for n in self._kept if n not in LASTING]:
            self._drop(name)
        self._await_all(_LEAVE_S)
        for pid, started in self._ours().items():
            kill_process(pid, started)
        self._await_all(_KILL_S)
        self._run_dir.remove()

    def _await_all(self, timeout_s: float) -> None:
        """Reap until nobody of the instance is left, or the time is over."""
        end = time.monotonic() + timeout_s
        while self._ours() and (left := end - time.monotonic()) > 0:
            # Those of a template are not ours to reap: look again, also without a signal.
            select.select([self._wake], [], [], min(left, 0.05))
            self._drain_wakes()
            self._reap()
        self._reap()  # who had died by the last look was none of them any more

    def _ours(self) -> dict[int, int]:
        """What Managers have started, and one that lives, as last seen: number -> start time. Other
        children may have been there before, or be orphans of others, left to this process."""
        with suppress(OSError):  # no room for a look: there is another one soon
            self._seen = descendants(self._pid, self._run_dir.path)
        return self._seen | ({self._manager: start_time(self._manager)} if self._manager else {})

    def _drop(self, name: str) -> None:
        if kept := self._kept.pop(name, None):
            os.close(kept.fd)
