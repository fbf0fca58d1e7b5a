"""The guardian alone, in a process of its own: it reaps whatever children its process has."""

from __future__ import annotations

import json
import subprocess
import sys

UNDYING = """
import json, os, signal, threading, time
from pathlib import Path
from blockflow.control import guardian

really, asked = os.kill, []

def late(pid, number):
    asked.append(number)
    if len(asked) == 1:
        threading.Timer(0.3, really, (pid, number)).start()

it = guardian.Guardian(Path("."))
it._wake, wake = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
it._listen(wake)
it._line, theirs = guardian.Line.pair()
it._manager = os.fork()
if it._manager == 0:
    time.sleep(600)
os.kill, guardian._STOP_S = late, 0.0
it._stop()
print(json.dumps([it._watch(), asked]))
"""


def test_who_is_killed_and_lives_on_is_waited_for() -> None:
    """In a system call that never ends: killing it again and again would take a core meanwhile."""
    done = subprocess.run(
        [sys.executable, "-c", UNDYING], capture_output=True, text=True, timeout=60, check=True
    )
    assert json.loads(done.stdout) == [-9, [9]]


LAST = """
import os, signal, time
from pathlib import Path
from blockflow.control import guardian

it = guardian.Guardian(Path("."))
it._wake, _ = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
child = os.fork()
if child == 0:
    time.sleep(600)

def look():
    os.kill(child, signal.SIGKILL)
    os.waitid(os.P_PID, child, os.WEXITED | os.WNOWAIT)
    return {}

it._ours = look
it._await_all(60.0)
try:
    print(os.waitpid(child, os.WNOHANG))
except ChildProcessError:
    print("collected")
"""


def test_who_dies_as_it_is_looked_for_is_collected() -> None:
    """It is no living process any more, and nobody else may ever collect it."""
    done = subprocess.run(
        [sys.executable, "-c", LAST], capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout == "collected\n"
