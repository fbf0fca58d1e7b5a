"""Small Linux calls that launchers and children share: names, adoption, descriptors, pidfds."""

from __future__ import annotations

import ctypes
import errno
import math
import os
import resource
import select
import signal
from contextlib import suppress
from pathlib import Path

from blockflow.core.errors import SystemError_
from blockflow.core.scarcity import is_scarcity

_PR_SET_PDEATHSIG = 1
_PR_SET_NAME = 15
_PR_SET_CHILD_SUBREAPER = 36
_PR_CAPBSET_DROP = 24
_PR_SET_NO_NEW_PRIVS = 38
_PR_CAP_AMBIENT = 47
_PR_CAP_AMBIENT_CLEAR_ALL = 4
_CAPABILITY_VERSION_3 = 0x20080522
_CAPABILITY_WORDS = 6
"""Effective, permitted and inheritable, twice 32 of each."""

_MOST_CAPABILITIES = 64
_SHOWN = 15

DESCRIPTORS = 65_536
"""File descriptors of one process, where it may have so many."""

OOM_SHARE = 100
"""Thousandths of the memory (of the machine, or of the container) that a worker counts as larger
than it is where the kernel looks for whom to kill."""

_OOM_SCORE = Path("/proc/self/oom_score_adj")
_OOM_MOST = 1000

EXIT_START_FAILED = 2
"""Of a process that has told its controller why it could not start."""

INSTANCE_ENV = "BLOCKFLOW_INSTANCE"
"""Environment variable with an instance's run directory: the mark of all that its Manager starts,
and of what these fork. A process keeps what it was executed with."""

EXIT_UNKNOWN = 255
"""Reported for a process that is certainly dead, but whose status somebody else collected."""


_LIBC = ctypes.CDLL(None, use_errno=True)


def _prctl(option: int, value: int | bytes) -> None:
    arg = ctypes.c_char_p(value) if isinstance(value, bytes) else ctypes.c_ulong(value)
    _check(_LIBC.prctl(option, arg, 0, 0, 0))


def _demand(option: int, value: int, name: str) -> None:
    """:func:`_prctl` for what nothing can run without. Raises SystemError_: it is not granted."""
    try:
        _prctl(option, value)
    except OSError as exc:
        why = f"the kernel, or a sandbox's filter, refuses prctl({name}): {exc.strerror}"
        hint = "allow the call in the container's seccomp profile"
        raise SystemError_("INTERNAL", why, where="prctl", hint=hint) from exc


def _check(status: int) -> None:
    if status != 0:
        err = ctypes.get_errno()
        raise OSError(err, os.strerror(err))


def set_process_name(name: str) -> None:
    """Show ``name`` in ps and top, where that is allowed: :func:`shown_name`."""
    with suppress(OSError):
        _prctl(_PR_SET_NAME, shown_name(name))


def shown_name(name: str) -> bytes:
    """The 15 bytes that the kernel keeps. A replica's number is what tells it from its siblings, so
    it is the name before it that is cut short."""
    base, mark, number = name.rpartition("#")
    kept = (mark + number).encode() if base else b""
    return (base or name).encode()[: max(0, _SHOWN - len(kept))] + kept[:_SHOWN]


def volunteer() -> None:
    """Where memory runs out, the kernel shall take this process before the one that forked it.

    The kernel takes the largest. That may be the template, which holds most pages of the libraries
    that its children share, or the Dispatcher; a worker's death costs least. Whoever is larger than
    a worker by more than :data:`OOM_SHARE` still goes first, be it another program.
    """
    with suppress(OSError, ValueError):  # where /proc is not to be written it stays as it is
        now = int(_OOM_SCORE.read_text())
        _OOM_SCORE.write_text(str(min(now + OOM_SHARE, _OOM_MOST)))


def become_subreaper() -> None:
    """Adopt orphaned descendants: workers of a dead template become children of this process.

    The manager calls it once before its first launch, so that it can still collect how they ended.

    Raises:
        SystemError_: INTERNAL: it may not.
    """
    _demand(_PR_SET_CHILD_SUBREAPER, 1, "PR_SET_CHILD_SUBREAPER")


class Adoption:
    """Notices that this process's parent, the template, has died and the manager has adopted it.

    Nobody is then left who would kill it if it were stuck when the manager dies: from there on the
    kernel does, with the manager's process. Not before, for the template's death is no reason.
    """

    def __init__(self) -> None:
        self._parent = os.getppid()

    def check(self) -> None:
        """Look now; called now and then."""
        parent = os.getppid()
        if parent != self._parent:
            self._parent = parent
            _demand(_PR_SET_PDEATHSIG, signal.SIGKILL, "PR_SET_PDEATHSIG")


def die_with(parent: int, number: int = signal.SIGKILL) -> None:
    """Get this signal when ``parent``, whose main thread started this process, dies; be killed if
    it has. Raises SystemError_: INTERNAL: it may not have that."""
    _demand(_PR_SET_PDEATHSIG, number, "PR_SET_PDEATHSIG")
    if os.getppid() != parent:
        os.kill(os.getpid(), signal.SIGKILL)


def give_up_privileges() -> None:
    """Drop what no worker needs, for this process and whatever it starts; irrevocable.

    No program that it executes can gain rights (setuid, file capabilities); a crash leaves no
    core file with clients' tensors in it; files that it makes are this user's alone. The process
    stays *dumpable*: without that, /proc/self belongs to root, and verified artifacts are opened
    through /proc/self/fd, while the control plane reads the memory figures there.
    """
    _demand(_PR_SET_NO_NEW_PRIVS, 1, "PR_SET_NO_NEW_PRIVS")
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    os.umask(0o077)


def drop_capabilities() -> None:
    """Give up what root may do beyond the files that it owns, and whatever else was granted.

    Called while the process has one thread: the kernel keeps capabilities per thread. What it opens
    afterwards it must be able to open as its user: a file of somebody else by that file's mode.
    """
    for capability in range(_MOST_CAPABILITIES):
        # So that root does not have them back with the next program that it executes: no_new_privs
        # says so as well, this holds by itself.
        try:
            _prctl(_PR_CAPBSET_DROP, capability)
        except OSError as exc:
            # The kernel has no more of them; or this is not root, who alone gets any by executing.
            if exc.errno in (errno.EINVAL, errno.EPERM):
                break
            raise
    with suppress(OSError):  # EINVAL: before Linux 4.3 there were none of these
        _prctl(_PR_CAP_AMBIENT, _PR_CAP_AMBIENT_CLEAR_ALL)
    header = (ctypes.c_uint32 * 2)(_CAPABILITY_VERSION_3, 0)
    held, none = ((ctypes.c_uint32 * _CAPABILITY_WORDS)() for _ in range(2))
    _check(_LIBC.capget(header, held))
    if any(held):  # a service's filter may forbid to set any, also where there is none to give up
        _check(_LIBC.capset(header, none))


def own_what_is_made() -> None:
    """Whatever this process makes it may use itself, also where the umask would not let it."""
    os.umask(os.umask(0o077) & 0o077)


def ending_signals() -> tuple[signal.Signals, ...]:
    """What a person, a service or a terminal that is closed ends a system with. SIGHUP is none
    where whoever started this process has had it ignored (nohup)."""
    kept = signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    return (signal.SIGTERM, signal.SIGINT, *(() if kept else (signal.SIGHUP,)))


def raise_descriptor_limit() -> None:
    """As many file descriptors as this process may allow itself, up to a bound; its children get
    the same. The usual soft limit of 1024 is for programs that still call ``select``."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = DESCRIPTORS if hard == resource.RLIM_INFINITY else min(DESCRIPTORS, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def close_descriptors(keep: frozenset[int]) -> None:
    """Close every open descriptor but 0, 1, 2 and ``keep``."""
    for text in os.listdir("/proc/self/fd"):
        fd = int(text)
        if fd > 2 and fd not in keep:
            with suppress(OSError):  # the listing's own descriptor
                os.close(fd)


def thread_count() -> int:
    """Threads of this process, those of native libraries included."""
    return len(os.listdir("/proc/self/task"))


def gpu_descriptors(devices: str = "/dev/nvidia") -> list[str]:
    """Device files of a GPU that this process has open: with a CUDA context there are some, and
    after a fork neither process can use it."""
    found = []
    for name in os.listdir("/proc/self/fd"):
        with suppress(OSError):  # the folder's own descriptor is closed by now
            found.append(os.readlink(f"/proc/self/fd/{name}"))
    return sorted(path for path in found if path.startswith(devices))


def start_time(pid: int) -> int:
    """When a process was started, in ticks since the machine's boot; 0 = there is none.

    With it a process id means one process only: the kernel gives numbers out again.
    """
    try:
        return certain_start_time(pid)
    except OSError:
        return 0


def certain_start_time(pid: int) -> int:
    """:func:`start_time`. Raises OSError: there is no room to find out; nobody is dead for want of
    a descriptor."""
    try:
        found = _looked_up(pid)
    except OSError as e:
        if is_scarcity(e):
            raise
        return 0
    return 0 if found is None else found[1]


def _parent_and_start(pid: int) -> tuple[int, int] | None:
    try:
        return _looked_up(pid)
    except OSError:
        return None


def _looked_up(pid: int) -> tuple[int, int] | None:
    # The name in parentheses may hold anything, blanks and parentheses too.
    fields = Path("/proc", str(pid), "stat").read_bytes().rpartition(b")")[2].split()
    return (int(fields[1]), int(fields[19])) if fields[0] not in (b"Z", b"X") else None


def open_process(pid: int, started: int) -> int:
    """A pidfd of the process with this number that was started then; -1 = it is gone.

    Raises:
        OSError: there is no room to find out.
    """
    pidfd = -1
    try:
        pidfd = os.pidfd_open(pid)
        # Looked up once it is held: from here on the number stands for nobody else.
        if started and certain_start_time(pid) == started:
            held, pidfd = pidfd, -1
            return held
    except OSError as e:
        if is_scarcity(e):
            raise
    finally:
        if pidfd >= 0:
            os.close(pidfd)
    return -1


def kill_process(pid: int, started: int) -> None:
    """SIGKILL to this process, if it still is the one that was started then, and there is room to
    find that out."""
    pidfd = -1
    with suppress(OSError):
        pidfd = open_process(pid, started)
    if pidfd >= 0:
        try:
            with suppress(ProcessLookupError):
                signal.pidfd_send_signal(pidfd, signal.SIGKILL)
        finally:
            os.close(pidfd)


def descendants(pid: int, instance: Path | None = None) -> dict[int, int]:
    """The living processes below ``pid``: number -> start time (:func:`start_time`).

    Args:
        pid: of the process above them, which is not among them.
        instance: run directory; then only those with its mark (:data:`INSTANCE_ENV`) and all that
            are below one of these. Others may share the parent: a shell's jobs before it executed
            ``blockflow up``, or a container's orphans where that is its first process.
    """
    mark = None if instance is None else f"{INSTANCE_ENV}={instance}".encode()
    children: dict[int, list[int]] = {}
    started: dict[int, int] = {}
    for text in os.listdir("/proc"):
        found = _parent_and_start(int(text)) if text.isdecimal() else None
        if found is not None:
            children.setdefault(found[0], []).append(int(text))
            started[int(text)] = found[1]
    out: dict[int, int] = {}
    todo = [(pid, mark is None)]
    while todo:
        parent, meant = todo.pop()
        for child in children.get(parent, ()):
            ours = meant or _was_given(child, mark)
            if ours:
                out[child] = started[child]
            todo.append((child, ours))
    return out


def _was_given(pid: int, variable: bytes | None) -> bool:
    """Whether this was in the environment of its last exec, as far as this user may know that."""
    try:
        return variable in Path("/proc", str(pid), "environ").read_bytes().split(b"\0")
    except OSError:
        return False


def describe_exit(status: int) -> str:
    """``exit status 1`` or ``killed by SIGKILL``."""
    if status >= 0:
        return f"exit status {status}"
    try:
        return f"killed by {signal.Signals(-status).name}"
    except ValueError:
        return f"killed by signal {-status}"


def has_exited(pidfd: int) -> bool:
    """True once the process of ``pidfd`` has ended; never blocks."""
    return readable(pidfd, 0)


def readable(fd: int, timeout_s: float | None) -> bool:
    """Wait until there is something to read, an end of file among it, or the time is over (None =
    never). ``select.select`` refuses descriptors beyond 1023, and a process may have more."""
    poll = select.poll()
    poll.register(fd, select.POLLIN)
    return bool(poll.poll(None if timeout_s is None else math.ceil(timeout_s * 1000)))


def collect_own_child(pidfd: int) -> int | None:
    """Reap a child of this process.

    Returns:
        Exit code (0..255), minus the signal that killed it, :data:`EXIT_UNKNOWN` when it is not (or
        no longer) ours to reap, or None while it runs.
    """
    try:
        result = os.waitid(os.P_PIDFD, pidfd, os.WEXITED | os.WNOHANG)
    except ChildProcessError:
        return EXIT_UNKNOWN if has_exited(pidfd) else None
    if result is None:
        return None
    return result.si_status if result.si_code == os.CLD_EXITED else -result.si_status
