"""What launched children run: beside no test, whose imports each of them would pay for."""

from __future__ import annotations

import ctypes
import json
import os
import resource
import signal
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from blockflow.launch.base import LIFELINE_ENV

SIGNALS = (signal.SIGCHLD, signal.SIGHUP, signal.SIGINT, signal.SIGPIPE, signal.SIGTERM)


def trivial(spec: Mapping[str, Any]) -> int:
    """Runs in the child: reports what it sees, then ends as told."""
    lifeline = int(os.environ[LIFELINE_ENV])
    umask = os.umask(0o077)
    os.umask(umask)
    facts = {
        "pid": os.getpid(),
        "sid": os.getsid(0),
        "comm": Path("/proc/self/comm").read_text().strip(),
        "cores": sorted(os.sched_getaffinity(0)),
        "fds": sorted(int(f) for f in os.listdir("/proc/self/fd")),
        "lifeline": lifeline,
        "threads": len(os.listdir("/proc/self/task")),
        "omp": os.environ.get("OMP_NUM_THREADS"),
        "mmap_max": os.environ.get("MALLOC_MMAP_MAX_"),
        "umask": umask,
        "core": resource.getrlimit(resource.RLIMIT_CORE),
        "status": Path("/proc/self/status").read_text(),
        "self_is_ours": Path("/proc/self/fd").stat().st_uid == os.geteuid(),
        "ignored": [s.name for s in SIGNALS if signal.getsignal(s) == signal.SIG_IGN],
        "default": [s.name for s in SIGNALS if signal.getsignal(s) == signal.SIG_DFL],
        "stdin": os.readlink("/proc/self/fd/0"),
        "spec": dict(spec),
    }
    target = Path(spec["report"])
    part = target.with_suffix(".part")
    part.write_text(json.dumps(facts))
    part.rename(target)
    match spec["then"]:
        case "hang":
            os.read(lifeline, 1)  # returns at end of file: the manager has died
            return 70
        case "segfault":
            ctypes.string_at(0)
            return 0
        case "raise":
            raise ValueError("told to raise")
        case "exit":
            raise SystemExit(9)
        case _:
            print("a line on stdout")
            return int(spec["then"])


def operators(spec: Mapping[str, Any]) -> int:
    """Reports the namespaces of what torch has registered."""
    import torch  # the others need none

    names = {s.name.partition("::")[0] for s in torch._C._jit_get_all_schemas()}
    Path(spec["report"]).write_text(" ".join(names))
    return 0
