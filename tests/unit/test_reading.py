"""Messages of too many frames are read in pieces: others' have their turns amid them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest
import zmq

from blockflow.dispatcher import reading
from blockflow.dispatcher.reading import FrameReader


class Frames:
    """A socket with these messages; of each frame its number and whether more follow."""

    def __init__(self, *messages: int) -> None:
        self.left = [(i, i + 1 < n) for n in messages for i in range(n)]

    def recv(self, flags: int, *, copy: bool) -> Any:
        assert flags == zmq.NOBLOCK and not copy
        if not self.left:
            raise zmq.Again
        number, more = self.left.pop(0)
        return SimpleNamespace(number=number, more=more)


def test_what_is_too_long_is_thrown_away_so_much_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reading, "_SKIPPED_AT_ONCE", 10)
    socket = Frames(2, 2 + 1 + 25, 1, 2 + 1 + 4, 2)
    it = FrameReader(cast(Any, socket), 2)
    seen = [([f.number for f in it.read()], it.skipping) for _ in range(7)]
    assert seen == [
        ([0, 1], False),
        ([0, 1, 2], True),
        ([], True),
        ([0], False),  # its last five went first
        ([0, 1, 2], False),
        ([0, 1], False),
        ([], False),
    ]
