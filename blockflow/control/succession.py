"""Succession: a new Manager takes over the processes of one that has died.

They have served on meanwhile and reconnect by themselves. First nothing is asked of them but a sign
of life: what is sent to a process that is not connected yet is lost. Only when each has been heard,
or is dead, the ordinary course begins: the dead are told to the living, and so on.
"""

from __future__ import annotations

import logging
import os
import select
import time
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from blockflow.control.adoption import Adoption, Inheritance, install
from blockflow.control.brain import Brain
from blockflow.control.children import Children
from blockflow.control.controller import Controller
from blockflow.control.events import Exited, Kill, Received
from blockflow.control.fleet import log_path
from blockflow.control.health import Health
from blockflow.launch.process import descendants, kill_process
from blockflow.launch.vitals import read_vitals
from blockflow.tensormq.agent import Mailbox
from blockflow.tensormq.janitor import RunDir, remove_strangers
from blockflow.tensormq.weights import remove_unused
from blockflow.wire.control import Ping

log = logging.getLogger("blockflow.control")

PATIENCE_S = 10.0
"""Who has not been heard after this time is replaced. They reconnect within tenths of a second."""

_ASK_MS = 20
_STOPPED_S = 0.25


@dataclass(frozen=True, slots=True)
class Outcome:
    """Who was taken over, by name, and who had died or did meanwhile."""

    adoption: Adoption
    adopted: tuple[str, ...]
    dead: tuple[Exited, ...]


class Succession:
    """The first thing that a Manager's thread does, when it has a predecessor.

    Args:
        inheritance: what the predecessor has left.
        brain, children, controller, health: the new Manager's own.
        run_dir: of the instance.
    """

    def __init__(
        self,
        inheritance: Inheritance,
        brain: Brain,
        children: Children,
        controller: Controller,
        health: Health,
        run_dir: RunDir,
    ) -> None:
        self._inheritance = inheritance
        self._brain = brain
        self._children = children
        self._controller = controller
        self._health = health
        self._run_dir = run_dir

    def run(
        self, poll: select.poll, inbox: Mailbox[Any], guardian: int, known: set[int]
    ) -> Outcome:
        """Take over.

        Args:
            poll: of the Manager's loop; the children's pidfds and the inbox are in it.
            inbox: what is neither a message nor a death stays in it.
            guardian: process id of the common parent.
            known: incarnations whose files stay, beside those of the living.
        """
        adoption = install(self._brain.realm, self._inheritance)
        crew = self._brain.crew
        dead: list[Exited] = []
        waiting: dict[int, str] = {}
        for life in list(crew.lives()):
            self._controller.admit(life.incarnation)
            self._health.loaded(life.incarnation)
            ended = self._children.adopt(life, log_path(crew.place, life))
            if ended is not None:
                dead.append(ended)
                continue
            waiting[life.incarnation] = life.name
        self._end_strangers(guardian)
        lives = {life.incarnation for life in crew.lives()}
        remove_strangers(self._run_dir.path, lives | known)
        remove_unused(self._run_dir.path)
        for life in crew.lives():
            if life.condemned:
                self._children.kill(Kill(life.incarnation))
        later: list[Any] = []
        heard = self._await_all(waiting, dead, poll, inbox, later)
        for item in later:
            inbox.put(item)
        return Outcome(adoption, tuple(sorted(heard)), tuple(dead))

    def _await_all(
        self,
        waiting: dict[int, str],
        dead: list[Exited],
        poll: select.poll,
        inbox: Mailbox[Any],
        later: list[Any],
    ) -> list[str]:
        """Ask until each has been heard or has died; returns the names of those that were heard."""
        heard: dict[int, str] = {}
        stopped: dict[int, float] = {}
        end = time.monotonic() + PATIENCE_S
        while waiting and time.monotonic() < end:
            for incarnation in waiting:
                self._controller.send(incarnation, Ping(0))
            ready = [fd for fd, _ in poll.poll(_ASK_MS)]
            for item in inbox.drain():
                if not isinstance(item, Received):
                    later.append(item)
                    continue
                life = self._brain.crew.find(item.incarnation)
                if life is not None and not life.condemned:  # of those the end is waited for
                    name = waiting.pop(item.incarnation, None)
                    if name is not None:
                        heard[item.incarnation] = name
            self._end_stopped(waiting, stopped)
            for death in self._children.reap(ready):
                waiting.pop(death.incarnation, None)
                heard.pop(death.incarnation, None)
                dead.append(death)
        for incarnation in waiting:
            self._condemn(incarnation, f"it did not answer the control plane in {PATIENCE_S:g} s")
        return list(heard.values())

    def _end_stopped(self, waiting: Iterable[int], since: dict[int, float]) -> None:
        """A process that is stopped (SIGSTOP) will not answer, and everybody waits for it."""
        now = time.monotonic()
        for incarnation in waiting:
            life = self._brain.crew.find(incarnation)
            vitals = None if life is None else read_vitals(life.pid)
            if vitals is None or not vitals.stopped:
                since.pop(incarnation, None)
            elif now - since.setdefault(incarnation, now) > _STOPPED_S:
                self._condemn(incarnation, "hung: it is stopped")

    def _condemn(self, incarnation: int, cause: str) -> None:
        life = self._brain.crew.find(incarnation)
        if life is not None and not life.condemned:
            life.condemned, life.innocent = cause, True
            log.warning("%s (incarnation %d): %s", life.name, incarnation, cause)
        self._children.kill(Kill(incarnation))

    def _end_strangers(self, guardian: int) -> None:
        """What the predecessor has started and did not come to write down. Nobody else's: what was
        below the guardian before it, or has been left to it, is none of ours."""
        spared = {self._children.template_pid, os.getpid(), *descendants(os.getpid())}
        for pid, started in descendants(guardian, self._run_dir.path).items():
            if pid not in spared | self._children.pids():
                log.warning("process %d is in no journal and is ended", pid)
                kill_process(pid, started)
