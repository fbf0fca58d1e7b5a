"""Failpoints: named places where a test makes a worker die, stall or fail.

Armed by the environment only, for tests: ``BLOCKFLOW_FAILPOINTS="before_forward=kill:trunk1,..."``;
entries are ``name=action`` with an optional ``:block``. Actions: ``kill`` (SIGKILL itself),
``stall`` (that thread sleeps for ever), ``freeze`` (so do all: it sleeps with the interpreter's
lock), ``spin`` (it computes for ever, with that lock), ``exit`` (SystemExit, as a library may) and
``raise`` (BLOCK_FAILED); with ``-once`` the first process of an instance that gets there does it,
so that a replacement lives. With the value ``options`` each stage's entries are taken from its
option ``failpoints`` instead, so that the workers of one template can be armed one by one; without
the variable that option does nothing.
"""

from __future__ import annotations

import ctypes
import os
import signal
import threading
from collections.abc import Iterable, Mapping
from itertools import repeat
from pathlib import Path

from blockflow.core.errors import BlockError, SystemError_
from blockflow.core.launchspec import StageSpec

ENV = "BLOCKFLOW_FAILPOINTS"
OPTION = "failpoints"
BY_OPTIONS = "options"

POINTS = frozenset({"before_load", "after_load", "before_forward", "after_forward", "after_output"})
"""``before_forward``, ``after_forward`` and ``after_output``, which comes when the result has been
sent, lie in the thread that computes, that of a lane. The load points come once per block.
Readiness probes pass all of them."""

_ONCE = ("kill", "stall", "freeze", "spin", "exit")
ACTIONS = frozenset({*_ONCE, *(f"{a}-once" for a in _ONCE), "raise"})


class FailPoints:
    """The armed points of this process; without any, :meth:`hit` is one dictionary look-up.

    Args:
        text: the environment variable's value.
        run_dir: where ``-once`` leaves its marks.

    Attributes:
        armed: action and block by point; who asks often looks here whether there are any.

    Raises:
        SystemError_: INTERNAL for a point or action that does not exist.
    """

    def __init__(self, text: str, run_dir: Path) -> None:
        self._run_dir = run_dir
        self.armed: dict[str, tuple[str, str]] = {}
        for entry in filter(None, text.split(",")):
            name, _, rest = entry.partition("=")
            action, _, block = rest.partition(":")
            if name not in POINTS or action not in ACTIONS:
                raise SystemError_("INTERNAL", f"unknown failpoint {entry!r}", where=ENV)
            self.armed[name] = (action, block)

    @classmethod
    def from_environment(
        cls, run_dir: Path, stages: Iterable[StageSpec], env: Mapping[str, str] = os.environ
    ) -> FailPoints:
        """What the environment arms for a worker with these stages."""
        text = env.get(ENV, "")
        if text == BY_OPTIONS:
            asked = [(str(s.options.get(OPTION, "")), s.block.name) for s in stages]
            text = ",".join(f"{e}:{name}" for t, name in asked for e in t.split(",") if e)
        return cls(text, run_dir)

    def hit(self, name: str, block: str) -> None:
        """Do what is armed here for ``block``, if anything."""
        armed = self.armed.get(name)
        if armed is None or armed[1] not in ("", block):
            return
        action, _, once = armed[0].partition("-")
        if once and not self._first(name):
            return
        if action == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if action == "stall":
            threading.Event().wait()
        if action == "freeze":
            while True:  # pause returns after a signal
                ctypes.PyDLL(None).pause()
        if action == "exit":
            raise SystemExit(f"failpoint {name}")
        if action == "spin":
            sum(repeat(0))  # without an end, and within one instruction of the interpreter
        raise BlockError("BLOCK_FAILED", f"failpoint {name}", where=block)

    def _first(self, name: str) -> bool:
        try:
            flags = os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_CLOEXEC
            os.close(os.open(self._run_dir / f"failpoint-{name}", flags, 0o600))
        except FileExistsError:
            return False
        return True
