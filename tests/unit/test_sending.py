"""Messages between the processes of a control plane, where the kernel is short of memory."""

from __future__ import annotations

import errno
import os
import socket
from collections.abc import Callable
from typing import Any

import pytest

from blockflow.launch import sending
from blockflow.launch.process import readable
from blockflow.launch.sending import sent
from blockflow.launch.ward import REST, Line


def failing(numbers: list[int], send: Callable[..., object] = lambda *_: None) -> Any:
    """``send`` that fails with each of these errnos before."""

    def one(*given: Any) -> object:
        if numbers:
            raise OSError(numbers.pop(), "not sent")
        return send(*given)

    return one


@pytest.mark.parametrize("number", [errno.ENOBUFS, errno.ENOMEM, errno.ETOOMANYREFS])
def test_what_there_is_no_room_for_is_tried_again_for_a_while(
    monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    now, slept = 0.0, list[float]()

    def sleep(seconds: float) -> None:
        nonlocal now
        now += 0.0625
        slept.append(seconds)

    monkeypatch.setattr(sending.time, "monotonic", lambda: now)
    monkeypatch.setattr(sending.time, "sleep", sleep)
    fails = [number] * 2
    assert sent(failing(fails)) and not fails and len(slept) == 2
    fails += [number] * 9
    assert not sent(failing(fails)) and len(fails) == 4 and len(slept) == 2 + 4


@pytest.mark.parametrize("number", [errno.EPIPE, errno.ECONNRESET, errno.EAGAIN])
def test_for_who_is_gone_or_does_not_read_nothing_is_tried_again(
    monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    monkeypatch.setattr(sending.time, "sleep", pytest.fail)
    fails = [number] * 2
    assert not sent(failing(fails)) and len(fails) == 1


def test_what_a_guardian_must_know_is_not_lost_for_want_of_room(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """That the system serves, say: else its Manager's death would end all of it."""
    theirs, mine = Line.pair()
    end, heard = mine._end, list[Any]()
    for say in (lambda: mine.serving(4711), lambda: mine.keep(REST, 0)):
        fails = [errno.ENOBUFS]
        monkeypatch.setattr(mine, "_end", Refusing(end, failing(fails, end.sendmsg)))
        say()
        assert not fails and readable(theirs.fileno(), 0)
        found, fds = theirs.take()
        heard.append(found)
    assert heard == [["serving", 4711], ["keep", REST, 0, 0]]
    os.close(*fds)
    theirs.close()
    end.close()


class Refusing:
    """A socket with another ``sendmsg``."""

    def __init__(self, end: socket.socket, sendmsg: Any) -> None:
        self.sendmsg, self.fileno = sendmsg, end.fileno
