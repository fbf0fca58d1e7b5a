"""What a signal's handler may set: also in the middle of another one's set, or of a wait."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from pathlib import Path

from blockflow.control.asked import Asked

_SIGNALS = """
import signal, sys, time
from blockflow.control.system import System

system = System(state_dir={state!r}, repository={repository!r})
signal.signal(signal.SIGALRM, lambda *_: system.ask_stop())
signal.setitimer(signal.ITIMER_REAL, 1e-4, 1e-4)
end = time.monotonic() + 2.0
while time.monotonic() < end:
    system.ask_stop()
    assert system.wait()
print("ended")
"""


def test_a_signal_in_the_middle_of_another_ones_stop_does_not_hang(tmp_path: Path) -> None:
    """Ctrl-C reaches the guardian and the Manager, and the guardian passes it on: two at once."""
    program = _SIGNALS.format(state=str(tmp_path / "state"), repository=str(tmp_path / "blocks"))
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.stdout == "ended\n", done.stderr


def test_who_waits_is_woken_and_so_is_the_next() -> None:
    asked = Asked()
    assert not asked.wait(0) and not asked.wait(0.01)
    woken: list[bool] = []
    threads = [threading.Thread(target=lambda: woken.append(asked.wait(30))) for _ in range(3)]
    for thread in threads:
        thread.start()
    began = time.monotonic()
    asked.set()
    for thread in threads:
        thread.join(30)
    assert woken == [True] * 3 and time.monotonic() - began < 10
    assert asked.is_set() and asked.wait(0)


def test_whoever_is_woken_finds_it_set() -> None:
    asked = Asked()

    class Wakes:
        def put(self, _: None) -> None:
            assert asked.is_set()

    asked._wakes = Wakes()  # type: ignore[assignment]
    asked.set()


def test_no_time_is_none() -> None:
    asked = Asked()
    assert not asked.wait(-1.0)
    asked.set()
    assert asked.wait(-1.0)
