"""Plan: which fault comes when. Pure: the same seed gives the same plan."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Kind:
    """A kind of fault.

    Attributes:
        name: how reports call it.
        weight: how often it comes, relative to the others.
        kills: whether it takes a process, so that a recovery is to be measured.
    """

    name: str
    weight: float
    kills: bool = False


KINDS: tuple[Kind, ...] = (
    Kind("worker killed", 4, kills=True),
    Kind("worker killed at work", 3, kills=True),
    Kind("worker stopped 5 s", 1, kills=True),
    Kind("dispatcher killed", 1, kills=True),
    Kind("dispatcher stopped 5 s", 0.5, kills=True),
    Kind("template killed", 0.5, kills=True),
    Kind("manager killed", 1, kills=True),
    Kind("system update", 2),
    Kind("block restarted", 2),
    Kind("poison", 0.5),
    Kind("client vanishes", 2),
    Kind("connections reset", 1.5),
    Kind("network stalls 2 s", 1),
    Kind("malformed messages", 1),
    Kind("slow reader", 1),
    Kind("flood and reset", 1),
    Kind("CPU burners", 1),
)


LASTING = frozenset(
    {"dispatcher killed", "dispatcher stopped 5 s", "template killed", "manager killed"}
)
"""Kinds that replace a process which otherwise lives as long as the system."""


@dataclass(frozen=True, slots=True)
class Fault:
    """One fault: when, in seconds of the run, and a number in [0, 1) that chooses its victim.

    Of several workers, 0 chooses the one that has not died for the longest time.
    """

    at_s: float
    kind: Kind
    draw: float


def plan_faults(
    seed: int,
    seconds: float,
    gap_s: float,
    kinds: Sequence[Kind] = KINDS,
    quiet_s: float = 0.0,
    spare: float = 0.0,
) -> list[Fault]:
    """Faults with exponential gaps of ``gap_s`` on average, none in the first and last ``quiet_s``.

    Every kind comes once, in random order, before chance alone decides: a short run, too, shall
    have met the whole matrix if its time allows. In the last part ``spare`` of the run there are no
    faults that replace a :data:`LASTING` process: what it leaks slowly can be seen then.
    """
    chance = random.Random(seed)
    deck = list(kinds)
    chance.shuffle(deck)
    out: list[Fault] = []
    at = quiet_s
    while (at := at + chance.expovariate(1 / gap_s)) < seconds - quiet_s:
        spared = at >= (1.0 - spare) * seconds
        drawn = [k for k in kinds if not (spared and k.name in LASTING)]
        deck = [k for k in deck if k in drawn]
        if not drawn:
            break
        kind = deck.pop() if deck else chance.choices(drawn, [k.weight for k in drawn])[0]
        out.append(Fault(at, kind, chance.random()))
    return out
