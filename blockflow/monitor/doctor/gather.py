"""Gather the doctor's facts from this machine. Nothing is changed, nothing of torch is loaded."""

from __future__ import annotations

import fcntl
import os
import platform
import resource
import shutil
import socket
import stat
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from datetime import UTC, datetime
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from pathlib import Path

import psutil
import zmq

from blockflow.control.auth import read_token
from blockflow.control.generations import CURRENT, MISSING, latest_generation
from blockflow.control.profiles import ProfileShelf
from blockflow.control.settings import (
    DEFAULT_CLIENT_PORT,
    DEFAULT_HOST,
    DEFAULT_REST_PORT,
    default_keys,
    default_state_dir,
)
from blockflow.control.store import LOCK
from blockflow.core.engines import ENGINES
from blockflow.core.errors import BlockFlowError
from blockflow.core.specs import BlockSpec
from blockflow.dispatcher.cpu_latency import DEVICE
from blockflow.dispatcher.descriptors import bytes_received
from blockflow.launch import cgroup
from blockflow.monitor.doctor.facts import MIB, BlockFacts, Facts, Folder, Leftover, Port
from blockflow.repository.machine import ENGINE_PACKAGES, fingerprint, version_of
from blockflow.repository.repository import BlockRepository
from blockflow.tensormq.cuda_here import DOUBLE_ENV, devices_here, has_mps
from blockflow.tensormq.janitor import LOCK_NAME, ROOT_ENV, run_root
from blockflow.tensormq.keys import Keyring
from blockflow.tensormq.zmq_threads import THREADS, check_threads

HASHED_BYTES = 512 * MIB
"""Artifacts are hashed up to this sum; that takes less than a second."""

_CLOCKSOURCE = Path("/sys/devices/system/clocksource/clocksource0/current_clocksource")
_UNLIMITED = 1 << 60


def gather(
    repository: Path,
    *,
    state_dir: Path | None = None,
    keys: Path | None = None,
    rest_port: int = DEFAULT_REST_PORT,
    client_port: int = DEFAULT_CLIENT_PORT,
    hash_bytes: int = HASHED_BYTES,
) -> Facts:
    """The facts of this machine.

    Args:
        repository: folder of the blocks.
        state_dir: of the control plane, by default the user's.
        keys: folder of keys; by default the user's, if there is one.
        rest_port, client_port: what ``blockflow up`` would take.
        hash_bytes: artifacts are read up to this sum.
    """
    root, soft_hard = run_root(), resource.getrlimit(resource.RLIMIT_NOFILE)
    blocks, hashed = _blocks(repository, hash_bytes)
    stored, usable = _stored(state_dir or default_state_dir())
    soft, hard = (_UNLIMITED if n == resource.RLIM_INFINITY else n for n in soft_hard)
    return Facts(
        python=sys.version_info[:2],
        system=platform.system(),
        uid=os.geteuid(),
        pidfd=_has_pidfd(),
        memfd=_has_memfd(),
        counted=_counts_bytes(),
        zmq=zmq.zmq_version_info(),
        curve=bool(zmq.has("curve")),
        threads=_threads(),
        packages={name: version_of(name) for name in ENGINE_PACKAGES},
        shm=look_at(_shared_memory(root)),
        run_root=look_at(root.absolute()),
        state_dir=look_into(state_dir or default_state_dir()),
        repository=look_into(repository),
        blocks=blocks,
        hashed=hashed,
        leftovers=tuple(find_leftovers(root)),
        fds_soft=soft,
        fds_hard=hard,
        ports=(
            _port("REST", rest_port, "--port"),
            _port("clients", client_port, "--client-port"),
        ),
        clocksource=_read(_CLOCKSOURCE),
        clock_step_ns=round(time.clock_getres(time.CLOCK_MONOTONIC) * 1e9),
        year=datetime.now(UTC).year,
        cores=len(os.sched_getaffinity(0)),
        cpus=os.cpu_count() or 1,
        quota=cgroup.cpu_quota(),
        cpu_latency=_cpu_latency(),
        gpus=_gpus(),
        mps=has_mps(os.environ),
        cuda=has_cuda(find_spec("torch")),
        memory=os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"),
        memory_limit=cgroup.memory_limit(),
        tasks=_tasks(),
        keys=_keys(keys),
        stored=stored,
        stored_usable=usable,
        stored_bytes=_nbytes((state_dir or default_state_dir()) / CURRENT),
    )


def _threads() -> str:
    try:
        check_threads(THREADS)
    except BlockFlowError as e:
        return e.message
    return ""


def _cpu_latency() -> str:
    if os.access(DEVICE, os.W_OK):
        return ""
    return f"{DEVICE}: {'permission denied' if DEVICE.exists() else 'there is none'}"


def _tasks() -> int:
    found = [cgroup.tasks_limit()]
    if os.geteuid():  # root's are not counted
        found.append(resource.getrlimit(resource.RLIMIT_NPROC)[0])
    return min((n for n in found if n > 0), default=0)


def _gpus() -> int:
    if os.environ.get(DOUBLE_ENV):
        return 0
    devices = devices_here(os.environ)
    return 0 if devices is None else devices.count


def has_cuda(torch: ModuleSpec | None) -> bool:
    """Whether a ``torch`` that is not loaded was built for CUDA: its library for that lies beside
    the others. Versions do not say so: PyPI's have no label."""
    if torch is None or torch.origin is None:
        return False
    return (Path(torch.origin).parent / "lib" / "libtorch_cuda.so").exists()


def look_into(path: Path) -> Folder:
    """:func:`look_at`, and whose the files and folders in it are."""
    loose, foreign = [], []
    trusted = {os.geteuid(), 0}  # root can do everything anyway
    for folder, _, files in os.walk(path):
        for found in (folder, *(os.path.join(folder, name) for name in files)):
            with suppress(OSError):
                status = os.lstat(found)
                if stat.S_ISLNK(status.st_mode):
                    continue
                if status.st_mode & stat.S_IWOTH and found != str(path):
                    loose.append(found)
                if status.st_uid not in trusted:
                    foreign.append(found)
    return replace(look_at(path), loose=tuple(sorted(loose)), foreign=tuple(sorted(foreign)))


def look_at(path: Path) -> Folder:
    """A folder's facts; of one that is not there, those of the place where it would be made."""
    exists = os.path.lexists(path)
    there = path.absolute()
    while not os.path.exists(there) and there != there.parent:
        there = there.parent
    status, disk, files = there.lstat(), shutil.disk_usage(there), os.statvfs(there)
    return Folder(
        path=str(path),
        exists=exists,
        ours=status.st_uid == os.geteuid() and not stat.S_ISLNK(status.st_mode),
        mode=stat.S_IMODE(status.st_mode),
        writable=os.access(there, os.W_OK | os.X_OK),
        free=disk.free,
        size=disk.total,
        inodes=files.f_favail if files.f_files else sys.maxsize,  # no fixed number of them
    )


def find_leftovers(root: Path) -> Iterator[Leftover]:
    """Run directories below ``root`` whose lock nobody holds. They are left as they are."""
    with suppress(OSError):
        for path in sorted(root.iterdir()):
            if path.is_symlink() or not _unlocked(path / LOCK_NAME):
                continue
            nbytes = 0
            for folder, _, files in os.walk(path):
                for name in files:
                    with suppress(OSError):
                        nbytes += os.lstat(os.path.join(folder, name)).st_blocks * 512
            yield Leftover(str(path), nbytes)


def _unlocked(lock: Path) -> bool:
    try:
        fd = os.open(lock, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError:
        return False
    finally:
        os.close(fd)  # and with it the lock
    return True


def _blocks(root: Path, budget: int) -> tuple[tuple[BlockFacts, ...], bool]:
    store, shelf, machine = BlockRepository(root), ProfileShelf(root), fingerprint()
    found: list[BlockFacts] = []
    hashed = True
    for name in store.names():
        try:
            manifest = store.manifest(name)
            if manifest.size <= budget:
                store.verify(name)
                budget -= manifest.size
            else:
                hashed = False
        except BlockFlowError as e:
            found.append(BlockFacts(name, f"{e.code}: {e.message}", e.hint))
            continue
        info = manifest.to_info()
        choice = info.choices.get(machine)
        kind = ENGINES.get(str(choice["engine"])) if choice else None
        profile = ""
        if manifest.format != "echo":  # which computes nothing that could be measured
            told = shelf.state(BlockSpec(name=name), info)
            profile = "" if told["fresh"] else str(told["reason"])
        found.append(BlockFacts(name, extra=kind.extra if kind else "", profile=profile))
    return tuple(found), hashed


def _port(what: str, port: int, option: str) -> Port:
    address = f"{DEFAULT_HOST}:{port}"
    try:
        socket.create_server((DEFAULT_HOST, port)).close()
    except PermissionError:
        return Port(what, address, option, "the kernel, for root alone")
    except OSError:
        return Port(what, address, option, _holder(port))
    return Port(what, address, option)


def _holder(port: int) -> str:
    """Who listens on a port, as far as this user may know."""
    with suppress(psutil.Error, OSError):
        for entry in psutil.net_connections("tcp"):
            if entry.status != psutil.CONN_LISTEN or entry.laddr.port != port or not entry.pid:
                continue
            process = psutil.Process(entry.pid)
            # The script or the module; a folder of that name may be anybody's.
            named = "blockflow" in (os.path.basename(word) for word in process.cmdline()[:4])
            ours = named or process.name().startswith("bf:")
            return "blockflow" if ours else f"{process.name()} (process {entry.pid})"
    return "another user's process"


def _keys(folder: Path | None) -> str:
    if folder is None:
        try:
            folder = default_keys()
        except BlockFlowError:  # a user without a home has no keys there, and needs none
            return ""
        if not folder.exists():
            return ""
    try:
        ring = Keyring(folder)
        ring.server()
        read_token(ring.token_file)
    except BlockFlowError as e:
        return f"{e.message} ({e.where})" if e.where else e.message
    return ""


def _stored(root: Path) -> tuple[str, bool]:
    """What is wrong with the state in ``root``, and whether a start could do without."""
    state, found = latest_generation(root)
    new = set(found.values()) == {MISSING} and not _nbytes(root / LOCK)
    problem = "" if new else "; ".join(f"{name}: {why}" for name, why in found.items())
    return problem, state is not None or new


def _nbytes(path: Path) -> int:
    try:
        return path.lstat().st_size
    except OSError:
        return 0


def _shared_memory(run_root: Path) -> Path:
    shm = Path("/dev/shm")
    named = os.environ.get(ROOT_ENV)  # else it is elsewhere only where there is no shared memory
    return run_root if named and not run_root.is_relative_to(shm) else shm


def _has_pidfd() -> bool:
    try:
        os.close(os.pidfd_open(os.getpid()))
    except (OSError, AttributeError):
        return False
    return True


def _has_memfd() -> bool:
    try:
        os.close(os.memfd_create("blockflow-doctor"))
    except (OSError, AttributeError):
        return False
    return True


def _counts_bytes() -> bool:
    try:
        with (
            socket.create_server(("127.0.0.1", 0)) as server,
            socket.create_connection(server.getsockname(), 1.0) as near,
        ):
            return bytes_received(near.fileno()) is not None
    except OSError:
        return False


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="ascii", errors="replace").strip()
    except OSError:
        return ""
