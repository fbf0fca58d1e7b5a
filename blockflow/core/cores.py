"""Cores: the cpu numbers that a system may use, and how many of them may be busy at once. Pure.

In a container the two differ: a pod with a limit of four cpus on a machine of sixty-four may run on
any of its cores, but a control group stops all of its threads for the rest of each period (a tenth
of a second) once they have had four cores' worth of time. Threads planned for sixty-four would
spend most of their time stopped, also those that a request waits for.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence


class Cores(tuple[int, ...]):
    """Cpu numbers.

    Args:
        numbers: in order.
        quota: cores' worth of time that the control group allows, 0 = no limit. What is more than
            whole cores (0.9 of 2.9) is left to the Dispatcher and the control plane.

    Attributes:
        at_once: how many of them may compute at once.
    """

    at_once: int

    def __new__(cls, numbers: Iterable[int], quota: float = 0.0) -> Cores:
        made = super().__new__(cls, numbers)
        made.at_once = min(len(made), max(1, int(quota))) if quota > 0 else len(made)
        return made


def at_once(cores: Sequence[int]) -> int:
    """How many of ``cores`` may compute at once: all of them, unless they are :class:`Cores` and
    say otherwise."""
    return cores.at_once if isinstance(cores, Cores) else len(cores)
