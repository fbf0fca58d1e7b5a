"""The processes of a simulation end with what has started them."""

from __future__ import annotations

import io
import signal
import subprocess
import threading
from typing import Any

import pytest

from blockflow.bench.interrupts import interruptible
from blockflow.bench.simulation import farm


class Child:
    """Computes until it is killed, and its reader's thread is the one that the signal reaches, as
    the kernel may choose when a stopped process goes on."""

    def __init__(self, *_: Any, **__: Any) -> None:
        self.stdin, self.stdout = io.StringIO(), self
        self.awaited, self.killed = threading.Event(), threading.Event()
        self.in_time = False

    def readline(self) -> str:
        self.awaited.wait(30)
        signal.pthread_kill(threading.get_ident(), signal.SIGTERM)
        self.in_time = self.killed.wait(30)
        return ""

    def kill(self) -> None:
        self.killed.set()

    def wait(self) -> int:
        return -9

    def close(self) -> None:
        pass


def test_a_signal_that_reaches_another_thread_ends_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(farm, "_LOOK_S", 0.01)
    child = Child()
    wait = farm.wait

    def awaited(*args: Any) -> Any:
        child.awaited.set()
        return wait(*args)

    monkeypatch.setattr(farm, "wait", awaited)
    monkeypatch.setattr(subprocess, "Popen", lambda *_, **__: child)
    with pytest.raises(KeyboardInterrupt), interruptible():
        farm.spread("a.module", {}, [1, 2], str, 1, lambda job, answer: None)
    assert child.in_time
