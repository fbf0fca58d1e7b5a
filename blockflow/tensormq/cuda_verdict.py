"""Verdicts: whether a worker can open another one's device memory, as it has found out by trying.

Preflight tells an owner whether its memory can be *exported*. Whether another process can *open* it
is known there alone: a process in other namespaces, a device divided in instances, a peer whose
window is too small may refuse. So each worker tries, and writes in its own book what came of it,
one row per owner. An owner looks at the row about itself whenever it reserves memory for that
consumer, and sends handles to device memory only where the row says that it was opened; until
there is a row, and where it holds a refusal, tensors go over the host.

A row's word holds owner and verdict together, so that a row which is used again for another owner
is never read as the first one's. A refusal stands as long as both live.
"""

from __future__ import annotations

import threading
from collections.abc import Collection
from pathlib import Path

from blockflow.core.errors import BlockFlowError
from blockflow.tensormq.arena import DEVICE_BIT, Arena, ArenaReader
from blockflow.tensormq.cuda_book import VERDICT_BYTES, VERDICTS, verdict_rows

_OPENED, _REFUSED = 1, 2
_WORD = 8
_STRIDE = VERDICT_BYTES // _WORD


def _word(owner: int, verdict: int) -> int:
    return owner << 2 | verdict


class VerdictBook:
    """A consumer's own rows. Several threads may write."""

    def __init__(self, book: Arena) -> None:
        self._rows = verdict_rows(book.data)
        self._words = self._rows.cast("Q")
        self._row_of: dict[int, int] = {}
        self._free = list(range(VERDICTS - 1, -1, -1))
        self._lock = threading.Lock()

    def known(self, owner: int) -> bool:
        return owner in self._row_of

    def opened(self, owner: int) -> None:
        """Its device memory can be used here."""
        self._write(owner, _OPENED, "")

    def refused(self, owner: int, why: str) -> None:
        """It cannot, for this reason, whatever was known before."""
        self._write(owner, _REFUSED, why)

    def keep(self, owners: Collection[int]) -> None:
        """Forget all others."""
        with self._lock:
            for owner in self._row_of.keys() - set(owners):
                row = self._row_of.pop(owner)
                self._words[row * _STRIDE] = 0
                self._free.append(row)

    def _write(self, owner: int, verdict: int, why: str) -> None:
        with self._lock:
            row = self._row_of.get(owner)
            if row is None:
                if not self._free:
                    return  # unknown is safe: the host is always a way
                row = self._row_of[owner] = self._free.pop()
            raw = why.encode()[: VERDICT_BYTES - _WORD].ljust(VERDICT_BYTES - _WORD, b"\0")
            start = row * VERDICT_BYTES + _WORD
            self._rows[start : start + len(raw)] = raw
            self._words[row * _STRIDE] = _word(owner, verdict)  # last: it makes the row valid


class VerdictView:
    """An owner's look at what a consumer has found out about it."""

    def __init__(self, rows: memoryview, owner: int) -> None:
        self._rows = rows
        self._words = rows.cast("Q")
        self._opened = _word(owner, _OPENED)
        self._refused = _word(owner, _REFUSED)
        self._at = 0

    @classmethod
    def of(cls, run_dir: Path, consumer: int, owner: int) -> VerdictView | None:
        """None where the consumer has no book: then it takes no handles to device memory at all."""
        try:
            book = ArenaReader.open(run_dir, consumer | DEVICE_BIT)
        except BlockFlowError:
            return None
        return cls(verdict_rows(book.region()), owner)

    @property
    def opened(self) -> bool:
        """Read anew each time; a word, once it is found."""
        return self._find() == self._opened

    def refusal(self) -> str | None:
        """Why it was refused; None where it was not, or not yet."""
        if self._find() != self._refused:
            return None
        start = self._at * _WORD + _WORD
        raw = bytes(self._rows[start : start + VERDICT_BYTES - _WORD])
        return raw.rstrip(b"\0").decode(errors="replace")

    def _find(self) -> int:
        mine = (self._opened, self._refused)
        if self._words[self._at] not in mine:
            rows = range(0, len(self._words), _STRIDE)
            self._at = next((at for at in rows if self._words[at] in mine), 0)
        return int(self._words[self._at])
