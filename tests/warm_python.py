"""A warm interpreter: it has imported what commands need, and forks one for each.

The imports of torch and of what an export needs take seconds, and the documents hold many commands:
each would pay them anew. A command is a process of its own all the same, with its own arguments,
folder, environment and streams, and ends like any other; what it would import is there already.
(That commands also run from nothing is for the tests that start real ones.)

The server imports and forks. For each command it forks a keeper, which forks the command, tells its
status, and ends it when the client (warm_client.py) is gone.
"""

from __future__ import annotations

import atexit
import gc
import importlib
import json
import os
import runpy
import select
import shlex
import signal
import socket
import subprocess
import sys
import threading
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from types import ModuleType
from typing import NoReturn

from tests.warm_fork import keep_registered

MODULES = (
    "torch",
    "torch.export._trace",
    "torch._export.serde.serialize",
    "matplotlib.backends.backend_agg",
    "blockflow.bench.canvas",
    "blockflow.cli.apply",
    "blockflow.cli.bench",
    "blockflow.cli.export",
    "blockflow.cli.infer",
    "blockflow.cli.main",
    "blockflow.client",
    "blockflow.repository.echo",
    "blockflow.repository.export",
)
CLIENT = Path(__file__).with_name("warm_client.py")
ROOT = CLIENT.parents[1]
COMMANDS = {"python": "", "blockflow": "-m blockflow"}


@contextmanager
def warm_commands(
    folder: Path,
    environment: dict[str, str],
    modules: Sequence[str] = MODULES,
    start: Callable[..., subprocess.Popen[bytes]] = subprocess.Popen,
) -> Iterator[None]:
    """``python`` and ``blockflow`` in ``folder`` are commands of an interpreter that has imported
    ``modules``; ``start`` may be another than ``Popen`` (``warm_rig.Warm.popen``)."""
    folder.mkdir()
    address = folder / "warm"
    server = start(
        [sys.executable, "-m", "tests.warm_python", str(address), *modules],
        env=environment,
        cwd=ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    try:
        assert server.stdout is not None
        assert server.stdout.readline() == b"ready\n"
        start = f"exec {shlex.quote(sys.executable)} -SI {shlex.quote(str(CLIENT))} {address}"
        for name, arguments in COMMANDS.items():
            script = folder / name
            script.write_text(f'#!/bin/sh\n{start} {arguments} "$@"\n')
            script.chmod(0o755)
        yield
    finally:
        server.communicate()  # its input ends, and so does it


def serve(address: str) -> list[str] | None:
    """Waits for commands; returns in each command's own process, with what it shall run, and in the
    server when its standard input ends."""
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(address)
        listener.listen()
        signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # keepers need nobody who waits for them
        print("ready", flush=True)
        while True:
            ready, _, _ = select.select([listener, sys.stdin], [], [])
            if sys.stdin in ready:
                return None
            client, _ = listener.accept()
            with client:
                if os.fork() == 0:
                    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                    listener.close()
                    return keep(client)


def keep(client: socket.socket) -> list[str]:
    """In the keeper: never returns. In the command: its arguments, once it stands in its place."""
    head, streams, _, _ = socket.recv_fds(client, 8, 3)
    with client.makefile("rb") as rest:
        command = json.loads(rest.read(int.from_bytes(head, "big")))
    pid = os.fork()
    if pid != 0:
        attend(client, pid)
    client.close()
    for number, stream in enumerate(streams):
        os.dup2(stream, number)
        os.close(stream)
    os.chdir(command["folder"])
    os.environ.clear()
    os.environ.update(command["environment"])
    argv: list[str] = command["argv"]
    return argv


def attend(client: socket.socket, pid: int) -> NoReturn:
    ended = os.pidfd_open(pid)
    ready, _, _ = select.select([ended, client], [], [])
    if ended not in ready:  # nobody waits for the command any more
        os.kill(pid, signal.SIGKILL)
    status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    with suppress(BrokenPipeError):
        client.sendall(bytes([status if status >= 0 else 128 - status]))
    os._exit(0)


def run(argv: list[str]) -> None:
    """What ``python`` does with these arguments: ``-c CODE``, ``-m MODULE`` or a file, each with
    arguments of its own."""
    kind, *rest = argv
    if kind == "-c":
        sys.argv = ["-c", *rest[1:]]
        sys.path.insert(0, "")
        sys.modules["__main__"] = main = ModuleType("__main__")
        exec(compile(rest[0], "<string>", "exec", dont_inherit=True), main.__dict__)  # noqa: S102
    elif kind == "-m":
        sys.argv = rest
        sys.path.insert(0, os.getcwd())
        sys.modules.pop(rest[0], None)  # it is begun anew, under another name
        runpy.run_module(rest[0], run_name="__main__", alter_sys=True)
    else:
        sys.argv = argv
        sys.path.insert(0, str(Path(kind).resolve().parent))
        runpy.run_path(kind, run_name="__main__")


def status_of(argv: list[str]) -> int:
    try:
        run(argv)
    except SystemExit as exc:
        if exc.code is None or isinstance(exc.code, int):
            return exc.code or 0
        print(exc.code, file=sys.stderr)
        return 1
    except BaseException:
        traceback.print_exc()
        return 1
    return 0


def end(status: int) -> NoReturn:
    """As an interpreter ends, but without taking its modules apart: that writes to every page which
    the command has in common with the server, and takes longer than most commands."""
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status & 0xFF)


if __name__ == "__main__":
    for module in sys.argv[2:]:
        importlib.import_module(module)
    for name in ("blockflow.launch.environment", "blockflow.bench.demo.server"):
        if name in sys.modules:  # as a fork of warm_fork.py it would start forks
            sys.modules[name].subprocess = subprocess  # type: ignore[attr-defined]
    assert threading.active_count() == 1, "what forks has one thread"
    keep_registered()
    gc.freeze()
    if (arguments := serve(sys.argv[1])) is not None:
        end(status_of(arguments))
