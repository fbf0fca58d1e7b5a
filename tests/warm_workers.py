"""The processes of a parallel run are forks of one warm interpreter (warm_fork.py).

Each would import for seconds what all of them need, and so would the warm interpreter that it
starts for its tests. Here xdist's first process starts one, and each process of tests is a fork of
that, which before anything else forks what will fork for its tests in turn.
"""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests import warm_fork

SETTLED = {-1: 64 << 20, -2: 128 << 10, -3: 32 << 20, -4: 1 << 16}
"""What glibc's allocator comes to by itself in a long run (thresholds to trim and to map at, bytes
to spare, the most maps): it was told otherwise when the warm interpreter was started."""


def fork_workers(config: pytest.Config, folder: Path) -> None:
    """From now on, until the end of the session. What dies is started anew as a fork, too."""
    from execnet import gateway_io
    from execnet.gateway_base import Popen2IO

    from tests.warm_rig import Warm

    address = folder / "socket"
    warm = Warm(address, *(["tests.warm_exports"] if is_whole(config) else []))
    config.add_cleanup(warm.close)
    executed = gateway_io.create_io

    class Forked(gateway_io.Popen2IOMaster):
        def __init__(self, execmodel: Any) -> None:
            self.popen = popen = warm.popen(
                [sys.executable, "-m", "tests.warm_workers", str(address)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                lasting=True,  # it ends in order when its input does
            )
            Popen2IO.__init__(self, popen.stdin, popen.stdout, execmodel)

    def create_io(spec: Any, execmodel: Any) -> Any:
        plain = spec.popen and not spec.python
        return Forked(execmodel) if plain else executed(spec, execmodel)

    patch = pytest.MonkeyPatch()
    patch.setattr(gateway_io, "create_io", create_io)
    config.add_cleanup(patch.undo)


def is_whole(config: pytest.Config) -> bool:
    """Whether all tests are run: then each process meets some that export and convert."""
    chosen = config.option.keyword or config.option.markexpr
    return config.args_source is pytest.Config.ArgsSource.TESTPATHS and not chosen


def fork_own(address: str) -> None:
    """What :class:`tests.warm_rig.Warm` takes, in place of one that it would have to start."""
    listener = warm_fork.listening(address)
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(write)
        nobody = os.open(os.devnull, os.O_WRONLY)
        for fd, number in ((read, 0), (nobody, 1)):
            os.dup2(fd, number)
            os.close(fd)
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        warm_fork.serve(listener)
        os._exit(0)
    listener.close()
    os.close(read)
    warm_fork.own = (address, write, pid)


def main() -> None:
    warm_fork.start_by(subprocess)
    # Descriptors of the other one have become /dev/null (warm_fork.place): all that is forked from
    # here would have as many fewer. Whose objects have them are frames that never go on.
    os.closerange(3, 1 + max(map(int, os.listdir("/proc/self/fd"))))
    fork_own(f"{sys.argv[1]}-{os.getpid()}")
    libc = ctypes.CDLL(None)
    for what, value in SETTLED.items():
        libc.mallopt(what, value)
    exec(eval(sys.stdin.readline()), {"__name__": "__main__"})  # noqa: S102, S307  # as execnet does


if __name__ == "__main__":
    main()
