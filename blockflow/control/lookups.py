"""Lookups: what the Manager's thread has to know of a disk that may not answer. It watches over all
other processes, and is not kept for long."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from concurrent.futures import Future, wait
from functools import partial
from typing import Any, TypeVar

from blockflow.control.disk import GLANCE_S, begun
from blockflow.control.events import Launch, Send
from blockflow.control.fleet import Fleet
from blockflow.control.profiles import ProfileShelf
from blockflow.wire.control import ControlMessage, SetPolicy

log = logging.getLogger("blockflow.control")

_CHANGE_S = 4.0
"""For what a change of policy needs, which is not asked for again."""

T = TypeVar("T")


class Lookups:
    """Asks a shelf in a thread of its own, one question at a time. For one thread to use, which is
    not kept for longer by many questions in a row than by one.

    Args:
        shelf: it reads the repository.
    """

    def __init__(self, shelf: ProfileShelf) -> None:
        self._shelf = shelf
        self._asked: object = None
        self._answer: Future[Any] | None = None
        self._waited_s = self._since_s = 0.0

    def launch(self, order: Launch) -> Launch | None:
        """The order with the profiles of its stages; None: ask again, the disk has not answered.
        What asks for no block is never kept."""
        if "stages" not in order.spec:
            return order
        question = partial(self._shelf.attach, order)
        return self._ask(order.incarnation, order.name, question, GLANCE_S)

    def message(self, order: Send, fleet: Fleet) -> ControlMessage:
        """The order's message, with the points of its policy's profile. Without an answer it is
        sent as it is: a worker goes on with the profile that it knows, or refuses a policy that
        needs one, and that is told. Who has no policy needs none."""
        message, replica = order.message, fleet.by_incarnation(order.incarnation)
        if not isinstance(message, SetPolicy) or replica is None:
            return message
        if message.policy.get("policy") == "none":
            return message
        plan = replica.block_of(message.stage)
        if plan is None:
            return message
        question = partial(self._shelf.with_points, message, plan)
        if self._answer is not None:
            self._wait(self._answer, _CHANGE_S)  # a launch may have asked, and come again
        return self._ask(object(), plan.spec.name, question, _CHANGE_S) or message

    def _ask(
        self, key: object, whose: str, question: Callable[[], T], patience_s: float
    ) -> T | None:
        """The answer, if it is there; kept until something else is asked. Raises what it raises."""
        if self._answer is None or (key != self._asked and self._answer.done()):
            self._asked, self._answer = key, begun(question)
            self._wait(self._answer, patience_s)
            if not self._answer.done():
                log.warning("%s waits for the repository, which does not answer", whose)
        if key != self._asked or not self._answer.done():
            return None
        return self._answer.result()

    def _wait(self, answer: Future[Any], patience_s: float) -> None:
        """For an answer. How long was waited before is taken off, and forgotten as time passes."""
        now = time.monotonic()
        self._waited_s = max(0.0, self._waited_s - (now - self._since_s))
        wait([answer], max(0.0, patience_s - self._waited_s))
        self._since_s = time.monotonic()
        self._waited_s += self._since_s - now
