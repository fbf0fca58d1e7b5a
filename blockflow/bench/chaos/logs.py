"""Logs: what a system has written that no fault explains: defects, and processes that ended by
themselves. Such a death costs no request its reply, and nobody would notice."""

from __future__ import annotations

import re
import signal
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path

_TRACEBACK = "Traceback (most recent call last):"
_DEATH = re.compile(r"(\S+)(?: \(incarnation \d+\))? ended: status (-?\d+)$")
"""Of a worker, the Dispatcher or the template; of the Manager the guardian tells."""
_PLANE = re.compile(r"the control plane ended: (killed by (?!SIGKILL)\S+|exit status \d+)$")
_CRASHES = frozenset(
    {
        1,
        *(
            -s
            for s in (signal.SIGABRT, signal.SIGBUS, signal.SIGFPE, signal.SIGILL, signal.SIGSEGV)
        ),
    }
)
"""An exception, and what the kernel or a library ends a process with. Faults kill by SIGKILL."""


def read(folder: Path) -> list[str]:
    """Of the system whose folder it is (:class:`~blockflow.bench.chaos.remote.RemoteSystem`)."""
    out: list[str] = []
    for path in sorted([*folder.glob("*.log"), *folder.glob("state/logs/*.log")]):
        lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
        found = Counter([*tracebacks(lines), *crashes(lines)])
        out += [f"{path.name}: {what}" + f" ({n} times)" * (n > 1) for what, n in found.items()]
    return out


def tracebacks(lines: Iterable[str]) -> list[str]:
    """The last line of each, which says what it was."""
    out, inside = [], False
    for line in lines:
        if line.strip() == _TRACEBACK:
            inside = True
        elif inside and line[:1].strip():
            out.append(line)
            inside = False
    return out


def crashes(lines: Sequence[str]) -> list[str]:
    """Who ended in a way that no fault has."""
    deaths = [found for line in lines if (found := _DEATH.search(line))]
    planes = [f"the control plane ended: {p[1]}" for line in lines if (p := _PLANE.search(line))]
    return [f"{d[1]} ended: status {d[2]}" for d in deaths if int(d[2]) in _CRASHES] + planes
