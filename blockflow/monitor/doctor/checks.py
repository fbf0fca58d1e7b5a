"""Doctor: what on this machine would keep BlockFlow from serving, or from serving well.

Pure: the facts are given (:mod:`blockflow.monitor.doctor.gather` finds them), a check makes
findings of them, and every finding that is not well says what to do. So each check is tested with a
planted fault, and none needs a broken machine for it.
"""

from __future__ import annotations

import os
import shlex
from collections.abc import Callable, Iterator
from typing import Any

from blockflow.control.store import CORRUPT_HINT
from blockflow.core.engines import ENGINES
from blockflow.dispatcher.cpu_latency import DEVICE
from blockflow.engine.extras import how_to_install
from blockflow.monitor.doctor.block_checks import profiles, repository
from blockflow.monitor.doctor.facts import GIB, MIB, Facts, Finding, Level
from blockflow.tensormq.janitor import MAX_ROOT_BYTES

OLDEST_PYTHON = (3, 11)
OLDEST_ZMQ = (4, 3, 3)
LEAST_SHM = 32 * MIB
"""Container engines give 64 MiB by default, which is enough for small models."""
GOOD_SHM = GIB
GOOD_FDS = 1024
LEAST_FDS = 128
GOOD_TASKS = 256
LEAST_TASKS = 64
"""The control plane has some forty threads, the Dispatcher and a worker half a dozen each."""
GOOD_DISK = 100 * MIB
LEAST_DISK = MIB
"""Of a state that is small; a save writes the whole of it once or twice beside the old one."""
LEAST_INODES = 64
"""A system makes two dozen files in shared memory, and some more for each worker."""
_MORE_DISK = "free some space, or choose another --state-dir"
SLOW_CLOCKS = ("acpi_pm", "hpet", "jiffies", "refined-jiffies")

Check = Callable[[Facts], Iterator[Finding]]


def examine(facts: Facts) -> list[Finding]:
    """All findings, in the order of the checks."""
    return [finding for check in CHECKS for finding in check(facts)]


def worst(findings: list[Finding]) -> Level:
    """The worst level among ``findings``."""
    order = list(Level)
    return max((f.level for f in findings), key=order.index, default=Level.OK)


# --- the platform ---------------------------------------------------------------------------------


def platform(f: Facts) -> Iterator[Finding]:
    name = "platform"
    if f.system != "Linux":
        yield Finding(name, Level.ERROR, f"{f.system} is not Linux", "run it in a Linux container")
        return
    if f.python < OLDEST_PYTHON:
        text = f"Python {_dotted(f.python)} is too old"
        yield Finding(name, Level.ERROR, text, "use Python 3.11 or newer: make PYTHON=python3.11")
    for there, what in ((f.pidfd, "pidfd_open"), (f.memfd, "memfd_create")):
        if not there:
            yield Finding(
                name,
                Level.ERROR,
                f"the kernel, or the container's seccomp profile, does not allow {what}",
                "use Linux 5.4 or newer; allow the call in the container's seccomp profile",
            )
    if not f.counted:
        yield Finding(
            name,
            Level.WARNING,
            "the kernel, or a sandbox in its place, does not count the bytes of TCP connections: "
            "what clients send and nobody has read yet is not bounded",
            "use Linux 4.1 or newer, and no user-space network stack; or let clients in by the "
            "unix socket only",
        )
    if f.uid == 0:
        yield Finding(
            name,
            Level.WARNING,
            "running as root: workers run the code of blocks with root's rights",
            "run it as a user of its own; nothing here needs root",
        )
    elif f.python >= OLDEST_PYTHON and f.pidfd and f.memfd and f.counted:
        yield Finding(name, Level.OK, f"Linux, Python {_dotted(f.python)}")


def libzmq(f: Facts) -> Iterator[Finding]:
    reinstall = "pip install --upgrade --force-reinstall pyzmq; its wheels bring libzmq along"
    if f.zmq < OLDEST_ZMQ:
        text = f"libzmq {_dotted(f.zmq)} has known holes (CVE-2019-13132)"
        yield Finding("libzmq", Level.ERROR, text, reinstall)
    elif not f.curve:
        text = "libzmq was built without CURVE: the links of a system cannot be closed to others"
        yield Finding("libzmq", Level.ERROR, text, reinstall)
    elif f.threads:
        remedy = (
            "raise ulimit -u and the control group's pids.max; allow clone3, sched_getparam, "
            "sched_getscheduler and sched_setscheduler in the container's seccomp profile"
        )
        yield Finding("libzmq", Level.ERROR, f.threads, remedy)
    else:
        yield Finding("libzmq", Level.OK, f"{_dotted(f.zmq)} with CURVE")


def engines(f: Facts) -> Iterator[Finding]:
    version = f.packages.get("torch", "")
    if not version:
        yield Finding("engines", Level.ERROR, "torch is not installed", "pip install -e .")
        return
    missing = sorted({k.extra for k in ENGINES.values() if k.extra and not f.packages.get(k.extra)})
    there = ", ".join(f"{n} {v}" for n, v in f.packages.items() if v)
    yield Finding("engines", Level.OK, there)
    for extra in missing:
        users = [b.name for b in f.blocks if b.extra == extra]
        if users:
            text = f"{extra} is not installed, and these blocks use it: {', '.join(users)}"
            yield Finding("engines", Level.ERROR, text, how_to_install(extra))
        else:
            text = f"{extra} is not installed: one engine less to choose from"
            yield Finding("engines", Level.NOTE, text, how_to_install(extra))


# --- space and limits -----------------------------------------------------------------------------


def shared_memory(f: Facts) -> Iterator[Finding]:
    name, shm = "shared memory", f.shm
    larger = f"enlarge the file system of {shm.path}"
    if shm.path == "/dev/shm":
        larger = "docker run --shm-size=2g, or mount -o remount,size=2g /dev/shm"
    missing = not shm.exists and shm.path == "/dev/shm"  # a folder elsewhere is made when needed
    if missing or not shm.writable:
        why = "is not there" if not shm.exists else "cannot be written to"
        remedy = "mount a tmpfs there, or set BLOCKFLOW_RUN_ROOT to a folder in another tmpfs"
        yield Finding(name, Level.ERROR, f"{shm.path} {why}", remedy)
    elif shm.free < LEAST_SHM:
        text = f"{shm.path}: {_size(shm.free)} free of {_size(shm.size)}, too little for arenas"
        yield Finding(name, Level.ERROR, text, larger)
    elif shm.inodes < LEAST_INODES:
        text = f"{shm.path}: room for {shm.inodes} more files only (inodes: df -i)"
        yield Finding(name, Level.ERROR, text, f"remove files from {shm.path}")
    elif shm.free < GOOD_SHM:
        of = f"{_size(shm.free)} free of {_size(shm.size)}"
        text = f"{shm.path}: {of}; large tensors, or many, may not fit"
        yield Finding(name, Level.WARNING, text, larger)
    else:
        yield Finding(name, Level.OK, f"{shm.path}: {_size(shm.free)} free of {_size(shm.size)}")


def gpus(f: Facts) -> Iterator[Finding]:
    if f.gpus and not f.cuda and f.packages.get("torch"):
        yield Finding(
            "GPUs",
            Level.WARNING,
            f"{f.gpus}, which no block can be placed on: this torch was built without CUDA",
            "install torch's build for CUDA",
        )
    elif f.gpus and f.mps:
        yield Finding("GPUs", Level.OK, f"{f.gpus}, with NVIDIA's multi-process service")
    elif f.gpus:
        yield Finding(
            "GPUs",
            Level.NOTE,
            f"{f.gpus}, without NVIDIA's multi-process service: a GPU switches between the workers "
            "on it, which costs a hop about 0.14 ms and keeps their kernels apart",
            "nvidia-cuda-mps-control -d, before blockflow up (docs/cuda-ipc.md)",
        )


def descriptors(f: Facts) -> Iterator[Finding]:
    name, text = "descriptors", f"at most {f.fds_soft} open files per process"
    remedy = f"ulimit -n {min(f.fds_hard, 65536)}, or LimitNOFILE= of the service"
    if f.fds_soft < LEAST_FDS:
        yield Finding(name, Level.ERROR, text, remedy)
    elif f.fds_soft < GOOD_FDS:
        yield Finding(name, Level.WARNING, f"{text}: enough for few clients only", remedy)
    else:
        yield Finding(name, Level.OK, text)


def processes(f: Facts) -> Iterator[Finding]:
    name, text = "processes", f"at most {f.tasks} processes and threads"
    remedy = "docker run --pids-limit, TasksMax= of the service, or ulimit -u"
    if 0 < f.tasks < LEAST_TASKS:
        yield Finding(name, Level.ERROR, f"{text}: too few for any block", remedy)
    elif 0 < f.tasks < GOOD_TASKS:
        yield Finding(name, Level.WARNING, f"{text}: enough for few blocks only", remedy)
    else:
        yield Finding(name, Level.OK, text if f.tasks else "no limit")


def processors(f: Facts) -> Iterator[Finding]:
    name = "cores"
    if 0 < f.quota < f.cores:
        most = max(1, int(f.quota))
        remedy = f"give the service {most} core(s) of its own: taskset, or cpuset of the group"
        text = f"{f.cores} cores, but the control group allows the time of {f.quota:g}"
        if f.quota < 1:
            yield Finding(name, Level.WARNING, f"{text}: all stalls in each period", remedy)
        else:
            told = f"{text}: threads are planned for {most}; more workers than that may stall"
            yield Finding(name, Level.NOTE, told, remedy)
    elif f.cores < 2:
        remedy = "give it a core per block that shall work at the same time"
        yield Finding(name, Level.NOTE, "one core: blocks take turns on it", remedy)
    else:
        yield Finding(name, Level.OK, f"{f.cores} of {f.cpus}")


def idle_cores(f: Facts) -> Iterator[Finding]:
    if f.cpu_latency:
        yield Finding(
            "idle cores",
            Level.NOTE,
            f"a task's cpu_latency_us has no effect ({f.cpu_latency}): idle cores sleep as usual",
            f"let this user write to {DEVICE} (a udev rule), where hops shall be quick",
        )
    else:
        yield Finding("idle cores", Level.OK, "tasks may keep them awake (cpu_latency_us)")


def memory(f: Facts) -> Iterator[Finding]:
    limit = f.memory_limit or f.memory
    if limit < GIB:
        text = f"{_size(limit)} of memory; a process with torch alone takes about 200 MiB"
        yield Finding("memory", Level.WARNING, text, "give the machine or the container more")
    else:
        where = " (limit of the control group)" if f.memory_limit else ""
        yield Finding("memory", Level.OK, f"{_size(limit)}{where}")


def clock(f: Facts) -> Iterator[Finding]:
    if f.clocksource in SLOW_CLOCKS or f.clock_step_ns > 1_000_000:
        text = f"the clock source {f.clocksource or '?'} is slow or coarse: times will be off"
        remedy = "boot with clocksource=tsc, or use a machine whose clock is sound"
        yield Finding("clock", Level.WARNING, text, remedy)
    elif f.year < 2025:
        text = f"the wall clock says {f.year}: durations are right all the same, dates are not"
        yield Finding("clock", Level.WARNING, text, "set the clock: chronyd, or systemd-timesyncd")
    else:
        yield Finding("clock", Level.OK, f.clocksource or "sound")


# --- folders and ports ----------------------------------------------------------------------------


def run_root(f: Facts) -> Iterator[Finding]:
    name, root = "run folder", f.run_root
    if len(os.fsencode(root.path)) > MAX_ROOT_BYTES:
        text = f"{root.path} is longer than {MAX_ROOT_BYTES} bytes: no socket can be made below it"
        yield Finding(name, Level.ERROR, text, "set BLOCKFLOW_RUN_ROOT to a shorter path")
    elif not root.exists:
        yield Finding(name, Level.OK, f"{root.path} is made when it is needed")
    elif not root.ours:
        remedy = f"see whose it is (ls -ld {root.path}), or set BLOCKFLOW_RUN_ROOT to one of yours"
        yield Finding(name, Level.ERROR, f"{root.path} belongs to another user", remedy)
    elif root.mode & 0o022:
        text = f"{root.path} can be written to by others (mode {root.mode:03o})"
        yield Finding(name, Level.ERROR, text, f"chmod 700 {root.path}")
    elif root.mode & 0o055:
        text = f"{root.path} can be looked into by others (mode {root.mode:03o})"
        yield Finding(name, Level.WARNING, text, f"chmod 700 {root.path}")
    else:
        yield Finding(name, Level.OK, f"{root.path} is private")


def leftovers(f: Facts) -> Iterator[Finding]:
    if f.leftovers:
        total = _size(sum(left.nbytes for left in f.leftovers))
        paths = shlex.join(left.path for left in f.leftovers)
        text = f"{len(f.leftovers)} dead system(s) left {total} of shared memory behind"
        remedy = f"the next `blockflow up` removes it; at once: rm -r {paths}"
        yield Finding("leftovers", Level.WARNING, text, remedy)
    else:
        yield Finding("leftovers", Level.OK, "nothing of dead systems is left")


def state(f: Facts) -> Iterator[Finding]:
    name, folder = "state", f.state_dir
    if folder.exists and (not folder.ours or not folder.writable):
        remedy = f"chown it to this user, or choose another one: --state-dir (now {folder.path})"
        yield Finding(name, Level.ERROR, f"{folder.path} cannot be written by this user", remedy)
    elif not folder.exists and not folder.writable:
        remedy = "choose a place that this user may write to: --state-dir, XDG_STATE_HOME or HOME"
        yield Finding(name, Level.ERROR, f"{folder.path} cannot be made by this user", remedy)
    elif folder.free < max(LEAST_DISK, 2 * f.stored_bytes):
        text = f"{folder.path}: {_size(folder.free)} left on its disk; updates could not be stored"
        yield Finding(name, Level.ERROR, text, _MORE_DISK)
    elif folder.inodes < LEAST_INODES:
        text = f"{folder.path}: room for {folder.inodes} more files only (inodes: df -i)"
        yield Finding(name, Level.ERROR, text, "remove files, or choose another --state-dir")
    elif folder.exists and (folder.mode & 0o022 or folder.loose or folder.foreign):
        text = f"others can write to {folder.path}: they decide what is deployed next time"
        remedy = f"chmod -R go-w {folder.path}; chown -R what is not this user's"
        yield Finding(name, Level.ERROR, text, remedy)
    elif not f.stored_usable:
        yield Finding(name, Level.ERROR, f"no stored state can be read: {f.stored}", CORRUPT_HINT)
    elif folder.free < GOOD_DISK:
        text = (
            f"{folder.path}: {_size(folder.free)} left on its disk; "
            "when logs have taken that, no update can be stored"
        )
        yield Finding(name, Level.WARNING, text, _MORE_DISK)
    elif f.stored:
        text = f"the previous generation of the state would be in force: {f.stored}"
        remedy = "see after the start what runs (blockflow history), and post the topology again"
        yield Finding(name, Level.WARNING, text, remedy)
    else:
        made = "" if folder.exists else " is made when it is needed"
        yield Finding(name, Level.OK, f"{folder.path}{made}")


def ports(f: Facts) -> Iterator[Finding]:
    for port in f.ports:
        if not port.holder:
            yield Finding("ports", Level.OK, f"{port.address} is free for {port.what}")
        elif port.holder == "blockflow":
            text = f"{port.address}: a BlockFlow system serves {port.what}"
            yield Finding("ports", Level.OK, text)
        else:
            text = f"{port.address} for {port.what} is taken by {port.holder}"
            remedy = f"free it, or choose another port: blockflow up {port.option} N"
            yield Finding("ports", Level.ERROR, text, remedy)


def keys(f: Facts) -> Iterator[Finding]:
    if f.keys:
        remedy = "mend what it says; `blockflow keys init --keys FOLDER` makes a new folder"
        yield Finding("keys", Level.ERROR, f"the keys cannot be used: {f.keys}", remedy)


CHECKS: tuple[Check, ...] = (
    platform,
    libzmq,
    engines,
    shared_memory,
    memory,
    processors,
    idle_cores,
    gpus,
    descriptors,
    processes,
    clock,
    run_root,
    leftovers,
    state,
    ports,
    keys,
    repository,
    profiles,
)


def summary(findings: list[Finding]) -> dict[str, Any]:
    """What ``blockflow doctor --json`` prints."""
    return {"worst": str(worst(findings)), "findings": [f.to_dict() for f in findings]}


def _dotted(version: tuple[int, ...]) -> str:
    return ".".join(str(n) for n in version)


def _size(nbytes: int) -> str:
    return f"{nbytes / GIB:.1f} GiB" if nbytes >= GIB else f"{nbytes / MIB:.0f} MiB"
