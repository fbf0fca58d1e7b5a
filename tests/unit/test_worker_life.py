"""Worker: what its threads do where the machine has no room for them."""

from __future__ import annotations

import errno
import os
import select
import threading
from collections.abc import Callable
from itertools import count
from types import SimpleNamespace
from typing import Any, cast

import pytest
import zmq

from blockflow.launch.process import EXIT_START_FAILED
from blockflow.tensormq.agent import Mailbox
from blockflow.wire.control import PeerGone, StartFailed, Stop
from blockflow.worker import parts as parts_module
from blockflow.worker import worker as module
from blockflow.worker.worker import Worker


def test_without_a_thread_for_a_further_lane_the_others_serve(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    started: list[threading.Thread] = []
    room = 1

    def start(thread: threading.Thread) -> None:
        if len(started) == room:
            raise RuntimeError("can't start new thread")
        started.append(thread)

    monkeypatch.setattr(threading.Thread, "start", start)
    worker = Worker.__new__(Worker)
    worker._lanes = []
    wide: list[int] = []
    runner = SimpleNamespace(widen=wide.append)
    parts = cast(Any, SimpleNamespace(executor=SimpleNamespace(lanes=3), runner=runner))
    worker._open_lanes(parts)
    assert parts.executor.lanes == 2 and worker._lanes == started and len(started) == 1
    worker._open_lanes(parts)  # it does not ask again by itself
    assert len(started) == 1
    parts.executor.lanes, room = 3, 9  # told anew
    worker._open_lanes(parts)
    assert parts.executor.lanes == 3 and worker._lanes == started and len(started) == 2
    assert wide == [2, 3], "as many engines as there are lanes"


def test_a_defect_in_a_further_lane_is_not_taken_for_want_of_room(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def start(thread: threading.Thread) -> None:
        raise RuntimeError("threads can only be started once")

    monkeypatch.setattr(threading.Thread, "start", start)
    worker = Worker.__new__(Worker)
    worker._lanes = []
    with pytest.raises(RuntimeError, match="only be started once"):
        worker._open_lanes(cast(Any, SimpleNamespace(executor=SimpleNamespace(lanes=2))))


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (OSError(errno.EMFILE, os.strerror(errno.EMFILE)), "NO_SPACE"),
        (RuntimeError("can't start new thread"), "NO_SPACE"),
        (RuntimeError("what nobody thought of"), "INTERNAL"),
    ],
    ids=["descriptor", "thread", "defect"],
)
def test_a_start_that_fails_says_whether_there_was_no_room(
    error: Exception, code: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By NO_SPACE it is tried again for as long as that lasts."""

    def fails(*_: Any) -> Any:
        raise error

    monkeypatch.setattr(module, "open_parts", fails)
    sent: list[Any] = []
    worker = Worker.__new__(Worker)
    for name in ("_context", "_watched", "_mailbox"):
        setattr(worker, name, SimpleNamespace(put=None))
    worker._launch = cast(Any, SimpleNamespace(name="b#0", incarnation=7))
    agent = SimpleNamespace(stop_by_signals=lambda: None, start=lambda: None, send=sent.append)
    worker._agent, worker._state = cast(Any, agent), "loading"
    monkeypatch.setattr(worker, "_terminate", lambda *_: None)
    assert worker.run() == EXIT_START_FAILED
    (failed,) = [m for m in sent if isinstance(m, StartFailed)]
    assert failed.error["code"] == code and str(error) in failed.error["message"]


@pytest.mark.parametrize(("mode", "reached"), [("zeromq", "collector"), ("tensormq", "failpoints")])
def test_what_sends_whole_tensors_is_begun_before_there_are_any(
    mode: str, reached: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a descriptor for it the first large one ended the worker, and was sent in half."""

    def reach(name: str) -> Callable[..., Any]:
        def fails(*_: Any) -> Any:
            raise zmq.ZMQError(errno.EMFILE, name)

        return fails

    monkeypatch.setattr(parts_module, "begin_collector", reach("collector"))
    monkeypatch.setattr(parts_module.FailPoints, "from_environment", reach("failpoints"))
    launch = SimpleNamespace(mode=mode, run_dir="/nowhere", stages=())
    with pytest.raises(zmq.ZMQError, match=reached):
        parts_module.open_parts(*cast(Any, (launch, None, None, None, None)))


def test_who_ends_does_not_wait_for_a_next_hop_that_dies_meanwhile(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Whoever waits for its end, to run again what it had, would wait as long."""
    worker, mailbox = Worker.__new__(Worker), Mailbox[Any]()
    clock = count()
    monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: next(clock) / 10))
    worker._launch = cast(Any, None)
    worker._mailbox, worker._watched = mailbox, cast(Any, SimpleNamespace(epoll=select.epoll()))
    leases, queued = {8, 9}, {9}
    slots = SimpleNamespace(sweep=lambda: leases.discard(8), outstanding=lambda: len(leases))
    delivery = SimpleNamespace(peer_gone=lambda life: (leases.discard(life), queued.discard(life)))
    memory = SimpleNamespace(slots=slots, consumer=SimpleNamespace(peer_gone=lambda life: None))
    push = SimpleNamespace(flush=lambda: 0, pending=lambda: len(queued))
    for message in (Stop(), PeerGone(9), PeerGone(9)):
        mailbox.put(message)
    worker._await_next_hops(cast(Any, SimpleNamespace(delivery=delivery, memory=memory, push=push)))
    assert not leases and not queued and next(clock) / 10 < module._END_S
    worker._watched.epoll.close()
    mailbox.close()
