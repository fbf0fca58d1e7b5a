"""Accounts: what a worker's meters have yet to be told. Used under its lock.

Whoever waits for a worker's last block waits for all that is done between two of its forwards, and
a forward has emptied the caches: there each step costs what it touches. Figures are looked at a few
times a second. So what they are made of is kept as it is, and reckoned when a thread is about to
sleep, or somebody looks; then several batches in a row share what the first of them has fetched.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

MOST = 32
"""Calls that are put off. A worker that never sleeps makes them this many at a time."""


class Accounts:
    """Calls of meters, each with the time at which what it tells of has happened."""

    __slots__ = ("_owed",)

    def __init__(self) -> None:
        self._owed: list[tuple[Callable[..., Any], tuple[Any, ...]]] = []

    def __len__(self) -> int:
        return len(self._owed)

    def owe(self, call: Callable[..., Any], *told: Any) -> None:
        """``call(*told)``, now or later."""
        self._owed.append((call, told))
        if len(self._owed) > MOST:
            self.settle()

    def settle(self) -> None:
        """Make the calls, in their order."""
        owed, self._owed = self._owed, []
        for call, told in owed:
            call(*told)
