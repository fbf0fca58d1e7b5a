"""OtherProcess: a module of ours in a process of its own that obeys a line of JSON at a time.

Both ends hold a socket; the other process ends when it closes, so that nothing outlives a benchmark
that was killed. It has the workers' allocator settings and one thread unless told otherwise.
``python -m blockflow.bench.other_process MODULE FD`` is that process: the module's ``obey`` gets
the lines as they come, and answers.

:func:`run_apart` and :func:`answer_apart` are the two ends of a process with one thing to do.
"""

from __future__ import annotations

import json
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from importlib import import_module
from typing import Any

from blockflow.bench.closing import Closing
from blockflow.bench.interrupts import INTERRUPTED, interruptible
from blockflow.core.errors import BlockFlowError, from_dict, make_error
from blockflow.launch.environment import child_command, child_environment

_WAIT_S = 300.0
_END_S = 10.0

Say = Callable[[Mapping[str, Any]], None]
"""Answers, in the other process."""


class OtherProcess(Closing):
    """The other process, seen from this one.

    Args:
        module: what it runs: its ``obey`` takes the lines, and what answers (:data:`Say`).
        order: its first line. The constructor returns with its first answer.
        wait_s: for an answer, at most.

    Raises:
        BlockFlowError: why it could not start.
    """

    def __init__(self, module: str, order: Mapping[str, Any], *, wait_s: float = _WAIT_S) -> None:
        ours, theirs = socket.socketpair()
        command = child_command("blockflow.bench.other_process", module, str(theirs.fileno()))
        with theirs:
            self._other = subprocess.Popen(
                command, env=child_environment(), pass_fds=[theirs.fileno()]
            )
        self._module = module
        self.pid = self._other.pid
        ours.settimeout(wait_s)
        self._socket = ours
        self._lines = ours.makefile("rw", encoding="utf-8")
        try:
            self.ask(**order)
            self.ready = self.answer()
        except BaseException:
            self.close()
            raise

    def ask(self, **question: Any) -> None:
        """Send a line.

        Raises:
            BlockFlowError: INTERNAL when it has ended.
        """
        try:
            self._lines.write(json.dumps(question) + "\n")
            self._lines.flush()
        except OSError:
            raise self._ended() from None

    def answer(self) -> dict[str, Any]:
        """Raises BlockFlowError with its reason, or INTERNAL when it has ended."""
        try:
            line = self._lines.readline()
        except ConnectionError:
            line = ""
        if not line:
            raise self._ended()
        answer: dict[str, Any] = json.loads(line)
        if "error" in answer:
            raise from_dict(answer["error"])
        return answer

    def _ended(self) -> BlockFlowError:
        with suppress(subprocess.TimeoutExpired):
            self._other.wait(_END_S)
        return make_error("INTERNAL", f"{self._module} ended: status {self._other.returncode}")

    def close(self) -> None:
        """End it, by the socket's end and, if that does not help, by force. Idempotent."""
        with suppress(OSError):  # it was gone while a line was on its way
            self._lines.close()
        self._socket.close()
        try:
            self._other.wait(_END_S)
        except subprocess.TimeoutExpired:
            self._other.kill()
            self._other.wait()


def run_apart(module: str, *arguments: str) -> None:
    """Run a module of ours to its end; its ``main`` returns :func:`answer_apart`.

    Raises:
        BlockFlowError: its reason; EXPORT_FAILED when it ended otherwise.
    """
    other = subprocess.Popen(
        child_command(module, *arguments),
        env=child_environment(),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        said, _ = other.communicate()
    except BaseException:
        # It has scratch folders of its own, which it takes along when it is asked to end.
        other.terminate()
        with suppress(subprocess.TimeoutExpired):
            other.wait(_END_S)
        other.kill()
        other.wait()
        raise
    if other.returncode:
        raise make_error("EXPORT_FAILED", f"{module} ended: status {other.returncode}")
    answer = json.loads(said.splitlines()[-1])
    if answer:
        raise from_dict(answer)


def answer_apart(do: Callable[[], None]) -> int:
    """In the other process: ``do`` it. The last line of stdout is the BlockFlowError that it
    raises, or ``{}``."""
    _leave_interrupts_to_the_other()
    problem: BlockFlowError | None = None
    try:
        with interruptible():
            do()
    except BlockFlowError as e:
        problem = e
    except KeyboardInterrupt:
        return INTERRUPTED
    sys.stdout.write("\n" + json.dumps(problem.to_dict() if problem else {}) + "\n")
    return 0


def main(argv: Sequence[str] | None = None) -> int:
    """In the other process: obey until the socket closes. A BlockFlowError is the last answer."""
    _leave_interrupts_to_the_other()
    module, fd = argv or sys.argv[1:]
    obey = import_module(module).obey
    with socket.socket(fileno=int(fd)) as ours, ours.makefile("rw", encoding="utf-8") as lines:

        def say(answer: Mapping[str, Any]) -> None:
            lines.write(json.dumps(answer) + "\n")
            lines.flush()

        try:
            obey((json.loads(line) for line in iter(lines.readline, "")), say)
        except BlockFlowError as e:
            say({"error": e.to_dict()})
    return 0


def _leave_interrupts_to_the_other() -> None:
    """A terminal's Ctrl-C reaches both processes; this one ends when the other one wants it to."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)


if __name__ == "__main__":
    raise SystemExit(main())
