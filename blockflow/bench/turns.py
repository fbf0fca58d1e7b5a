"""Who comes when: ways that are compared take turns within a round, and the order is no way's luck.

What a way leaves behind (caches, a queue, a clock that has sunk) the next one finds: who comes
before whom has to change as well. Pure but for the calls.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

K = TypeVar("K")
S = TypeVar("S")
T = TypeVar("T")


def took_ms(call: Callable[[], object]) -> float:
    """Milliseconds of one."""
    begin = time.monotonic_ns()
    call()
    return (time.monotonic_ns() - begin) / 1e6


def balanced(names: Sequence[K], number: int) -> list[K]:
    """The order of a round: over two times as many rounds as names each one comes equally often at
    each place and after each other (E. J. Williams 1949, designs balanced for residual effects).
    """
    count = len(names)
    zigzag = [(i + 1) // 2 if i % 2 else -(i // 2) for i in range(count)]
    order = [names[(place + number) % count] for place in zigzag]
    return order[::-1] if number // count % 2 else order


def rotated(names: Sequence[K], number: int) -> list[K]:
    """The order of a round where some ways must never follow each other, such as two that are the
    same, one of which would then go on where the other has begun: each is first once in as many
    rounds as there are, and everybody comes after the same one in nearly all of them.
    """
    shift = number % len(names)
    return [*names[shift:], *names[:shift]]


def crossed(conditions: Sequence[S], names: Sequence[K], number: int) -> list[tuple[S, K]]:
    """The order of a round in which all names meet under each condition (a rate, a size).

    Both are :func:`balanced`: names of one condition come next to each other, so that drift is not
    in their ratio, and conditions do not come in their own order, so that it is not in the trend.
    """
    order = balanced(names, number)
    return [(condition, name) for condition in balanced(conditions, number) for name in order]


def in_turn(
    ways: Mapping[K, Callable[[], T]],
    rounds: int,
    advance: Callable[[], None],
    *,
    broken: Callable[[dict[K, list[T]]], None] | None = None,
    warm_up: int = 0,
) -> dict[K, list[T]]:
    """A sample of every way per round, in :func:`balanced` order, so that drift hits all alike.

    Args:
        ways: name -> takes one sample.
        rounds: samples of each.
        advance: called after every round.
        broken: gets the samples of the whole rounds so far, if there are any, when one raises.
        warm_up: rounds that come before, and do not count.
    """
    names = list(ways)
    found: dict[K, list[T]] = {name: [] for name in names}
    try:
        for number in range(-warm_up, rounds):
            for name in balanced(names, number):
                sample = ways[name]()
                if number >= 0:
                    found[name].append(sample)
            advance()
    except BaseException:  # Ctrl-C as well
        whole = min(len(samples) for samples in found.values())
        if whole and broken is not None:
            broken({name: samples[:whole] for name, samples in found.items()})
        raise
    return found
