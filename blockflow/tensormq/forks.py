"""What a forked child must let go of at once.

A child inherits its parent's descriptors and mappings without the threads that they belong to: a
connection would stay open for as long as the child lives, whatever became of the parent.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

T = TypeVar("T")

_INHERITED: WeakKeyDictionary[Any, Callable[[Any], None]] = WeakKeyDictionary()
"""Of the whole process, as a fork is; its hook cannot be taken back, so there is one for all."""


def in_child(owner: T, act: Callable[[T], None]) -> None:
    """Run ``act(owner)`` in every child that this process forks while ``owner`` lives.

    It runs in the child's only thread before the fork returns there, and must need no lock that
    another thread of the parent may have held.
    """
    _INHERITED[owner] = act


def _let_go() -> None:
    for owner, act in list(_INHERITED.items()):
        act(owner)


if hasattr(os, "register_at_fork"):  # else nothing forks here
    os.register_at_fork(after_in_child=_let_go)
