"""NumbersFile: which numbers an instance has given out, for the Manager that comes next.

The state reserves incarnations and stages by the thousand; which of them were used knows only the
Manager that gave them out. When it dies, the next one reserves others, and so must save the state.
On a disk without room it goes on with those that the dead one had left. They stand here, in the run
directory: in memory, and as old as the instance. The file has its full size from the beginning, so
that a later write asks for no room.
"""

from __future__ import annotations

import os
import struct
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

NAME = "numbers"
KINDS = ("incarnation", "stage")
_MAGIC = b"bfnumb1\0"
_BODY = struct.Struct(f"<8s{2 * len(KINDS)}Q")
_CHECK = struct.Struct("<I")


@dataclass(frozen=True, slots=True)
class Span:
    """Reserved numbers that nobody has got: ``next`` and those up to ``end``, which is none."""

    next: int
    end: int

    def __len__(self) -> int:
        return max(0, self.end - self.next)

    def after(self, number: int) -> Span:
        """What of it lies above ``number``."""
        return Span(max(self.next, number + 1), self.end)


NONE = Span(0, 0)


class NumbersFile:
    """The file in its run directory.

    Args:
        run_dir: of the instance.
    """

    def __init__(self, run_dir: Path) -> None:
        self._path = run_dir / NAME

    def read(self) -> dict[str, Span]:
        """What is left, by kind; {} where there is no file, or one that is torn."""
        try:
            flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK
            with open(os.open(self._path, flags), "rb") as f:
                raw = f.read(_BODY.size + _CHECK.size + 1)
        except OSError:
            return {}
        body = raw[: _BODY.size]
        if raw != body + _CHECK.pack(zlib.crc32(body)):
            return {}
        magic, *numbers = _BODY.unpack(body)
        if magic != _MAGIC:
            return {}
        return {kind: Span(*numbers[2 * i : 2 * i + 2]) for i, kind in enumerate(KINDS)}

    def write(self, left: Mapping[str, Span]) -> None:
        """Say what is left, in one call of the kernel: a death before or after it tears nothing.
        Raises OSError; then there is no file, which is better than an old one."""
        spans = [left.get(kind, NONE) for kind in KINDS]
        body = _BODY.pack(_MAGIC, *(n for s in spans for n in (s.next, s.end)))
        try:
            flags = os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
            with open(os.open(self._path, flags, 0o600), "wb", buffering=0) as f:
                f.write(body + _CHECK.pack(zlib.crc32(body)))
        except OSError:
            self._path.unlink(missing_ok=True)
            raise
