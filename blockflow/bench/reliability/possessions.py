"""Possessions: what the processes of a system hold, and what of it is left when one has died.

Looked at from outside: files of the run directory, processes, and of every process its descriptors
(sockets and process descriptors are among them) and the segments that it has mapped.
"""

from __future__ import annotations

import os
import re
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Set
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import psutil

from blockflow.bench.chaos.watch import PREFIX
from blockflow.bench.reliability.figures import LEFT
from blockflow.bench.results import Figure
from blockflow.tensormq.arena import DEVICE_BIT

GONE_S = 10.0
"""After a death, what it may take until nothing is left of it."""
_OF_A_LIFE = re.compile(r"\D+?-?(\d+)(?:\.sock)?")
_NUMBER = re.compile(r"\d+")


@dataclass(frozen=True, slots=True)
class Held:
    """What one process has: open and mapped files of the run directory by name, and its other
    descriptors, sockets and process descriptors above all."""

    descriptors: int
    opened: Counter[str]
    segments: Counter[str]


@dataclass(frozen=True, slots=True)
class Possessions:
    """``files`` are names in the run directory, ``lives`` the incarnations that the system names as
    its own, ``names`` and ``held`` belong to processes by pid and time of their start."""

    files: frozenset[str]
    lives: Set[int]
    names: Mapping[tuple[int, float], str]
    held: Mapping[tuple[int, float], Held]


def look(run_dir: Path, lives: Set[int], processes: Iterable[psutil.Process]) -> Possessions:
    """What there is now."""
    names, held = {}, {}
    for process in processes:
        try:
            key = (process.pid, process.create_time())
            # One that has ended and that nobody reaps is there by its name, and has nothing else.
            names[key] = process.name()
            held[key] = _held(process.pid, run_dir)
        except (psutil.NoSuchProcess, psutil.AccessDenied, OSError):
            continue
    files = (name for _, _, names in os.walk(run_dir) for name in names)
    return Possessions(frozenset(files), lives, names, held)


def _held(pid: int, run_dir: Path) -> Held:
    opened: Counter[str] = Counter()
    others = 0
    for descriptor in os.listdir(f"/proc/{pid}/fd"):
        with suppress(FileNotFoundError):  # closed meanwhile
            name = _name_in(run_dir, os.readlink(f"/proc/{pid}/fd/{descriptor}"))
            if name is None:
                others += 1
            else:
                opened[name] += 1
    with open(f"/proc/{pid}/maps", encoding="utf-8") as maps:
        paths = [line.rstrip("\n").split(maxsplit=5)[5:] for line in maps]
    mapped = (_name_in(run_dir, path[0]) for path in paths if path)
    return Held(others, opened, Counter(name for name in mapped if name is not None))


def _name_in(run_dir: Path, path: str) -> str | None:
    """The name of a file of the run directory, also of one that has been removed."""
    if not path.startswith(f"{run_dir}/"):
        return None
    return Path(path.removesuffix(" (deleted)")).name


def life_of(name: str) -> int | None:
    """The incarnation that a file of the run directory belongs to; None: to the whole system."""
    found = _OF_A_LIFE.fullmatch(name)
    return None if found is None else int(found[1]) & ~DEVICE_BIT


def left(before: Possessions, now: Possessions) -> dict[str, int]:
    """What there is more than before, and what is there of lives that have ended since.

    A successor takes as much as who died had: files and processes are compared by their kinds.
    Descriptors and mappings are looked for in those that were there before and still are: what
    belongs to the dead, and descriptors more than before. (What is open of the living does not
    count: a new Manager opens the memory of the workers that it has probed, and of no others.)
    """
    dead = before.lives - now.lives
    of_the_dead = [n for n in now.files if life_of(n) in dead]
    others = _kinds(now.files - set(of_the_dead)) - _kinds(before.files)
    more = Counter(now.names.values()) - Counter(before.names.values())
    survivors = [(before.held[p], now.held[p]) for p in before.held.keys() & now.held.keys()]

    def of_dead(names: Counter[str]) -> int:
        return sum(many for name, many in names.items() if life_of(name) in dead)

    return {
        "files": len(of_the_dead) + others.total(),
        "segments": sum(of_dead(later.segments) for _, later in survivors),
        "processes": more.total(),
        "descriptors": sum(
            of_dead(later.opened) + max(0, later.descriptors - earlier.descriptors)
            for earlier, later in survivors
        ),
    }


def _kinds(names: Iterable[str]) -> Counter[str]:
    """Names of files without their numbers."""
    return Counter(_NUMBER.sub("", name) for name in names)


def family(root: psutil.Process) -> list[psutil.Process]:
    """The processes of a system below (and with) ``root``, those of its name only."""
    found = []
    for process in (root, *root.children(recursive=True)):
        try:
            if process.pid == root.pid or process.name().startswith(PREFIX):
                found.append(process)
        except psutil.NoSuchProcess:
            continue
    return found


def settled(
    mode: str,
    deaths: int,
    before: Possessions,
    see: Callable[[], Possessions],
    gone_s: float = GONE_S,
) -> Figure:
    """What is left at last: as soon as it is nothing, else after ``gone_s``."""
    end = time.monotonic() + gone_s
    while any((found := left(before, see())).values()) and time.monotonic() < end:
        time.sleep(0.1)
    total = float(sum(found.values()))
    return Figure.of(LEFT, mode, total, "1", deaths, found)
