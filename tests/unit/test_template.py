"""The template's side of a launch where the kernel is short of something. Nobody is forked here."""

from __future__ import annotations

import errno
import os
import socket
from collections.abc import Iterator
from typing import Any

import pytest

from blockflow.core import limits
from blockflow.launch import template
from blockflow.launch.child import Order
from blockflow.launch.refused import not_started
from blockflow.launch.template import Template
from blockflow.wire.codec import decode

PID = 4711
ORDER = Order("blockflow.none:none", {}, "x")


@pytest.fixture
def it(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """A template with the launcher's end of its socket, ``theirs``, and what was ``done``."""
    mine, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    theirs.setblocking(False)
    lifeline, other = os.pipe()
    made: Any = Template(mine, lifeline, [])
    made.theirs, made.done = theirs, []
    monkeypatch.setattr(template, "thread_count", lambda: 1)
    monkeypatch.setattr(template, "gpu_descriptors", list)
    monkeypatch.setattr(template.os, "fork", lambda: PID)
    monkeypatch.setattr(template.os, "pidfd_open", lambda pid: os.open(os.devnull, os.O_RDONLY))
    monkeypatch.setattr(made, "_selector", Selector())
    monkeypatch.setattr(template.os, "kill", lambda pid, number: made.done.append(pid))
    monkeypatch.setattr(template.os, "waitpid", lambda pid, how: made.done.append(-pid))
    yield made
    for fd in (lifeline, other, *made._children):
        os.close(fd)
    for end in (mine, theirs):
        end.close()


class Selector:
    """Watches nobody; ``refuses`` with this errno."""

    refuses = 0

    def register(self, _fd: int, _events: int) -> None:
        if self.refuses:
            raise OSError(self.refuses, os.strerror(self.refuses))


def said(it: Any) -> Any:
    data, fds, _, _ = socket.recv_fds(it.theirs, limits.MAX_CONTROL_BYTES, 1)
    for fd in fds:
        os.close(fd)
    return [*decode(data, max_bytes=limits.MAX_CONTROL_BYTES, what="message"), len(fds)]


def test_an_answer_for_which_there_is_no_room_at_once_leaves_a_moment_later(
    it: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The launcher would wait for it in vain, and then end a sound template."""
    real, fails = socket.send_fds, [errno.ENOBUFS]

    def send(*given: Any) -> int:
        if fails:
            raise OSError(fails.pop(), "no room")
        return real(*given)

    monkeypatch.setattr(template.socket, "send_fds", send)
    it._launch(7, ORDER)
    assert said(it) == ["launched", 7, PID, 1] and not fails
    assert [*it._children.values()] == [(7, PID)]


def test_a_child_that_cannot_be_watched_is_ended_and_not_kept(it: Any) -> None:
    """``fs.epoll.max_user_watches``, say; it would be a zombie, and the end of the template fail
    over it."""
    before = len(os.listdir("/proc/self/fd"))
    it._selector.refuses = errno.ENOSPC
    with pytest.raises(OSError, match="No space"):
        it._launch(7, ORDER)
    assert it.done == [PID, -PID] and it._children == {}
    assert len(os.listdir("/proc/self/fd")) == before


def test_an_order_for_which_there_is_no_room_is_worth_another_try() -> None:
    for number in (errno.ENOBUFS, errno.ETOOMANYREFS):
        assert not_started("launch", "no room", number, "x").code == "NO_SPACE"
    assert not_started("launch", "forbidden", errno.EPERM, "x").code == "INTERNAL"
