"""What all tests share: markers by folder, a private run root, a template and the leak check.

Every pytest process gets its own run root and its own mark in the environment. Whatever a test
starts inherits both, so that at the end of the session one can tell exactly which processes and
which shared-memory entries are this session's, also while other sessions run beside it. A session
that is killed cannot look: the next one ends and removes what it has left.
"""

from __future__ import annotations

import fcntl
import gc
import os
import re
import secrets
import shutil
import signal
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from blockflow.launch.base import Launcher
    from tests.warm_rig import Warm

# The suite starts some hundred interpreters: where the environment forbids to keep what was
# compiled, each would compile the package anew, and pytest every test.
sys.dont_write_bytecode = False
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
# Nor are its processes alone with the cores: threads of OpenMP that spin while others wait for
# theirs double what training and exports take. (Workers have one thread unless they are told.)
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
# Nor do tests ask the system that the shell of whoever runs them is set up for.
for _setting in (
    "BLOCKFLOW_URL",
    "BLOCKFLOW_ADDRESS",
    "BLOCKFLOW_TOKEN_FILE",
    "BLOCKFLOW_CA_FILE",
    "BLOCKFLOW_CLIENT_KEYS",
    "BLOCKFLOW_SERVER_KEY",
    "BLOCKFLOW_KEYS",
    "BLOCKFLOW_DEBUG",
    "COLUMNS",
    "LINES",
):
    os.environ.pop(_setting, None)

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    # A background job of a shell ignores Ctrl-C, and so would every process that a test starts.
    signal.signal(signal.SIGINT, signal.default_int_handler)
if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
    # So it is with SIGHUP below nohup. Who goes on to ignore it in its own test says so itself.
    signal.signal(signal.SIGHUP, signal.SIG_DFL)


def as_ctrl_c(number: int, frame: Any) -> None:
    """A SIGTERM (of ``timeout``, say) ends a session in order: fixtures stop what they started."""
    if os.getpid() != OWN_PID:  # of a fork, which whoever sent it wants dead
        signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)
        return
    signal.signal(number, lambda *_: None)  # once is enough
    raise KeyboardInterrupt


OWN_PID = os.getpid()
if (
    threading.current_thread() is threading.main_thread()
    and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
):
    signal.signal(signal.SIGTERM, as_ctrl_c)

FOLDERS = ("process", "fault", "contract", "unit", "gpu")
"""In the order in which they run: what takes long begins first, or the last process of a parallel
run would be left with it while the others have nothing more to do."""
SESSION_MARK = "BLOCKFLOW_TEST_SESSION"
RUN_ROOT = "BLOCKFLOW_RUN_ROOT"
LEAK_GRACE_S = 10.0
EXEC_S = 1.0
"""What a killed system is given to vanish by itself (its lifeline needs a moment)."""
ROOT_NAME = re.compile(r"bft-([0-9a-f]{16})")
"""Of a session's run root, with its mark."""


@pytest.hookimpl(trylast=True)  # when the plugin has connected
def pytest_configure(config: pytest.Config) -> None:
    """With ``--reruns`` each process asks and tells the first one before every test, on one
    connection: the next question would be held back until what was told is acknowledged, 40 ms.
    """
    connection: socket.socket | None = getattr(getattr(config, "failures_db", None), "sock", None)
    if connection is not None:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    if hasattr(config, "workerinput"):
        from tests.lean_reports import report_less

        report_less(config)


@pytest.hookimpl(wrapper=True)
def pytest_collection(session: pytest.Session) -> Iterator[None]:
    """Eight thousand tests are millions of objects, none of which is garbage: nobody looks for any
    while they are made, nor among them afterwards. (A full collection takes most of a second else.)
    """
    if session.config.pluginmanager.hasplugin("hypothesispytest"):
        take_time()
    share_compilation(session.config)
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


def share_compilation(config: pytest.Config) -> None:
    of_xdist: dict[str, Any] = getattr(config, "workerinput", {})
    if of_xdist and not sys.dont_write_bytecode:
        from tests.compiled import compile_share

        number = int(of_xdist["workerid"].removeprefix("gw"))
        compile_share(config, number, int(of_xdist["workercount"]))


def take_time() -> None:
    """The machine is shared: how long an example takes, or making one, says nothing of the code."""
    from hypothesis import HealthCheck, settings

    slow = [HealthCheck.too_slow]
    settings.register_profile("shared", deadline=None, suppress_health_check=slow)
    settings.load_profile("shared")


def pytest_collection_finish() -> None:
    if (torch := sys.modules.get("torch")) is not None:
        torch.set_num_threads(1)  # as in a worker


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    order = {folder: i for i, folder in enumerate(FOLDERS)}
    folders = {path: folder_of(path) for path in {item.path for item in items}}
    for item in items:
        if (folder := folders[item.path]) in order:
            item.add_marker(getattr(pytest.mark, folder))
    items.sort(key=lambda item: order.get(folders[item.path], len(order)))
    gpu = [item for item in items if item.get_closest_marker("gpu")]
    if gpu and not has_cuda():
        for item in gpu:
            item.add_marker(pytest.mark.skip(reason="no CUDA device on this machine"))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_setupnodes(config: pytest.Config) -> None:
    from tests.warm_workers import fork_workers

    fork_workers(config, config._tmp_path_factory.mktemp("workers"))  # type: ignore[attr-defined]


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    if config.getvalue("dist") != "loadfile":
        return None
    from tests.crashes import CrashProof

    return CrashProof(config, log)


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any, error: object | None) -> None:
    if error is None:
        return
    from tests.crashes import cause_of_death

    reporter = node.config.pluginmanager.getplugin("terminalreporter")
    reporter.write_line(f"\n[{node.gateway.id}] died: {cause_of_death(node)}")


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Why a test had to be run again: its name alone mends nothing."""
    for report in terminalreporter.stats.get("rerun", []):
        terminalreporter.section(f"first run of {report.nodeid}")
        terminalreporter.write_line(report.longreprtext)


def folder_of(path: Path) -> str:
    here = Path(__file__).parent
    return path.relative_to(here).parts[0] if path.is_relative_to(here) else ""


def has_cuda() -> bool:
    # On the double of the driver (docs/cuda-ipc.md) they run anywhere, and say nothing of speed.
    if os.environ.get("BLOCKFLOW_CUDA_DOUBLE"):
        return True
    # torch takes a second to import; without the driver's device node it need not be asked.
    if not (Path("/dev/nvidiactl").exists() or Path("/dev/dxg").exists()):  # WSL has the latter
        return False
    import torch

    return torch.cuda.is_available()


@pytest.fixture(scope="session", autouse=True)
def leak_check() -> Iterator[None]:
    """Fails the session's last test if a process or a /dev/shm entry of the session is left."""
    shm = Path("/dev/shm")
    base = shm if shm.is_dir() else Path(tempfile.gettempdir())
    sweep_dead_sessions(base)
    root, mark, held = private_root(base)
    before = {RUN_ROOT: os.environ.get(RUN_ROOT), SESSION_MARK: os.environ.get(SESSION_MARK)}
    os.environ[RUN_ROOT], os.environ[SESSION_MARK] = str(root), mark
    default_root = shm / f"blockflow-{os.getuid()}"
    default_before = entries(default_root)
    yield
    deadline = time.monotonic() + LEAK_GRACE_S
    while True:
        processes = marked_processes(mark)
        left = entries(root)
        if not (processes or left) or time.monotonic() > deadline:
            break
        time.sleep(0.05)
    # The default root is shared with other sessions of the user: only what is dead and new counts.
    stray = {e for e in entries(default_root) - default_before if not locked(default_root / e)}
    for name, value in before.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value
    inside = sorted(str(p.relative_to(root)) for p in root.rglob("*"))
    shutil.rmtree(root, ignore_errors=True)
    os.close(held)
    assert not processes, f"processes left running: {processes}"
    assert not left, f"entries left in the run root: {sorted(left)}: {inside}"
    assert not stray, f"dead run directories left in {default_root}: {sorted(stray)}"


@pytest.fixture(scope="session")
def warm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Warm]:
    """For systems and templates whose imports are not what is tested: forks of one interpreter."""
    from tests.warm_rig import Warm

    made = Warm(tmp_path_factory.mktemp("warm") / "socket")
    yield made
    made.close()


@pytest.fixture(scope="session")
def launcher(tmp_path_factory: pytest.TempPathFactory, warm: Warm) -> Iterator[Launcher]:
    """A template for all systems and workers that need none of their own: its imports take seconds.

    Whoever arms failpoints, kills the template or looks at its memory has another one.
    """
    from blockflow.launch.local import TemplateLauncher
    from blockflow.launch.preload import REHEARSAL

    no_blocks = tmp_path_factory.mktemp("repository")  # the rest of the rehearsal is the same
    template = TemplateLauncher(rehearsals=lambda: [(REHEARSAL, {"repository": str(no_blocks)})])
    with warm.spawning():
        template.start()  # now: it keeps the environment that it is started with
    yield template
    template.close()


def private_root(base: Path) -> tuple[Path, str, int]:
    """A new folder, its mark, and the descriptor by which this process holds it: the kernel lets go
    of it with the process, however that ends."""
    while True:
        mark = secrets.token_hex(8)
        root = base / f"bft-{mark}"
        root.mkdir(mode=0o700)
        held = hold(root, fcntl.LOCK_EX)
        if held is not None and root.exists():
            return root, mark, held
        if held is not None:  # swept before it was held
            os.close(held)


def sweep_dead_sessions(base: Path) -> None:
    """End the processes and remove the run roots of sessions that were killed."""
    for root in base.iterdir():
        found = ROOT_NAME.fullmatch(root.name)
        held = hold(root, fcntl.LOCK_EX | fcntl.LOCK_NB) if found is not None else None
        if found is None or held is None:
            continue
        deadline = time.monotonic() + LEAK_GRACE_S
        while (left := marked_processes(found[1])) and time.monotonic() < deadline:
            for pid in left:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(0.02)
        shutil.rmtree(root, ignore_errors=True)
        os.close(held)


def hold(folder: Path, how: int) -> int | None:
    """A descriptor with the lock of a folder of this user; None where there is none to have."""
    try:
        fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        if os.fstat(fd).st_uid == os.getuid():
            fcntl.flock(fd, how)
            return fd
    except BlockingIOError:  # its session lives
        pass
    os.close(fd)
    return None


def entries(folder: Path) -> set[str]:
    try:
        return set(os.listdir(folder))
    except FileNotFoundError:
        return set()


def locked(run_dir: Path) -> bool:
    """Whether a live manager holds the run directory's lock."""
    try:
        with open(run_dir / "lock", "rb") as f:
            fcntl.flock(f, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return False
    return False


def environment(proc: Path) -> bytes:
    """Of a process, as it was at its last exec. Whoever started it may go on before the kernel has
    that in place, so an empty one is looked at again, for a while.

    Raises:
        OSError: it is gone, or a thread of the kernel, or another user's.
    """
    deadline = time.monotonic() + EXEC_S
    while not (found := (proc / "environ").read_bytes()) and time.monotonic() < deadline:
        (proc / "exe").readlink()
        if (proc / "stat").read_text().rpartition(")")[2].split()[0] == "Z":
            break
        time.sleep(0.001)
    return found


def marked_processes(mark: str) -> dict[int, str]:
    """pid -> command line of every live process that inherited the session's mark.

    The environment is that of the last exec, so forked children show it as well; this process took
    the mark after its own exec and does not.
    """
    wanted = f"{SESSION_MARK}={mark}".encode()
    found = {}
    for entry in os.listdir("/proc"):
        if not entry.isdigit() or int(entry) == os.getpid():
            continue
        proc = Path("/proc", entry)
        try:
            if wanted not in environment(proc).split(b"\0"):
                continue
            if (proc / "stat").read_text().rpartition(")")[2].split()[0] == "Z":
                continue
            command = (proc / "cmdline").read_bytes().replace(b"\0", b" ").decode().strip()
            # multiprocessing keeps one helper per interpreter until that interpreter ends.
            if "multiprocessing.resource_tracker" not in command:
                found[int(entry)] = command
        except (OSError, UnicodeDecodeError):
            continue
    return found
