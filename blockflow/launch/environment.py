"""The environment that compute processes are started with.

Most of it cannot be changed later: the C library reads its allocator settings, and the thread pools
of OpenMP and BLAS their sizes, before the first Python instruction.
"""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import IO

from blockflow.core.caches import private_compiler_cache
from blockflow.launch.whereabouts import ROOT, lasting_imports, working_directory

MALLOC = {
    "MALLOC_MMAP_MAX_": "0",
    "MALLOC_TRIM_THRESHOLD_": str(1 << 32),
    "MALLOC_TOP_PAD_": str(64 << 20),
    "MALLOC_ARENA_MAX": "1",
}
"""glibc's allocator, told to keep what it has (other C libraries ignore these variables).

By default glibc maps each large activation anew and unmaps it after use, so that every forward pays
page faults for all of it: measured 1.2x (batch 1) to 1.9x (batch 32) on a convolutional network.
Here large blocks come from the heap, whose top is kept (virtual until touched) and shared by all
threads. The price: freed memory stays with the process until a trim (:func:`give_memory_back`),
which the worker does once after loading."""


def give_memory_back() -> None:
    """Return the heap's free pages, which :data:`MALLOC` has told the allocator to keep."""
    with suppress(AttributeError, OSError):  # another C library
        ctypes.CDLL(None).malloc_trim(0)


_ONE_THREAD = (
    "OMP_NUM_THREADS",
    "MKL_NUM_THREADS",
    "OPENBLAS_NUM_THREADS",
    "NUMEXPR_NUM_THREADS",
)
"""One thread until a worker asks for more: a pool per process, each as wide as the machine, makes
the processes fight for the cores (and a pool in the template would not survive the fork)."""


def child_environment(base: Mapping[str, str] | None = None) -> dict[str, str]:
    """Environment of a template or a fresh worker: ``base`` (default: this process's) plus tuning.

    Allocator variables that the operator has set already are left as they are. The import path is
    this interpreter's, so that a child finds the same packages wherever it is started.
    """
    env = dict(os.environ if base is None else base)
    for key, value in MALLOC.items():
        env.setdefault(key, value)
    for key in _ONE_THREAD:
        env[key] = "1"
    # '' stands for the current folder; the child gets it by name.
    env["PYTHONPATH"] = os.pathsep.join(lasting_imports(sys.path))
    env["PYTHONUNBUFFERED"] = "1"
    # torch.cuda.is_available() would otherwise initialise the driver, which no fork survives.
    env.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")
    # torch.compile would keep a pool of processes of its own in each worker that uses it.
    env.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")
    private_compiler_cache(env)
    return env


def child_command(module: str, *args: str) -> list[str]:
    """Command line of a fresh interpreter for ``module``; the current folder is not trusted."""
    return [sys.executable, "-P", "-m", module, *args]


def spawn(
    module: str, *args: str, fds: Sequence[int], log: IO[bytes] | None = None
) -> subprocess.Popen[bytes]:
    """Start a fresh interpreter for ``module``, in a session of its own, with
    :func:`child_environment`.

    Args:
        fds: descriptors that it inherits under their numbers.
        log: gets stdout and stderr; None = inherited.

    Raises:
        OSError: it cannot be started.
    """
    return subprocess.Popen(
        child_command(module, *args),
        env=child_environment(),
        cwd=None if working_directory() else ROOT,
        pass_fds=fds,
        stdin=subprocess.DEVNULL,
        stdout=log,
        stderr=log,
        start_new_session=True,
    )
