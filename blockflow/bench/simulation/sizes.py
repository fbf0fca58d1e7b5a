"""Sizes: how many rows a query has, or how long it is; exact distributions over whole numbers.

Every distribution is a table of probabilities over 1..max, so that means are exact and a draw is
one bisection. As text: ``3``, ``fixed:3``, ``uniform:1-8``, ``choice:1=0.8,8=0.2``,
``zipf:a=1.2,max=64`` and ``lognormal:median=40,sigma=0.8,max=512``.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from math import isfinite, log
from random import Random
from statistics import NormalDist

from blockflow.bench.options import nonsense
from blockflow.bench.simulation.text import Options, whole
from blockflow.core import limits

MAX_SIZE = limits.MAX_ROWS


@dataclass(frozen=True, slots=True)
class Sizes:
    """A distribution over whole numbers.

    Attributes:
        values: ascending, all >= 1.
        shares: their probabilities; made to add up to 1.
        cumulative: running sums of ``shares``.
    """

    values: tuple[int, ...]
    shares: tuple[float, ...]
    cumulative: tuple[float, ...]

    @classmethod
    def of(cls, pairs: Sequence[tuple[int, float]]) -> Sizes:
        """From (value, weight) pairs; weights need not add up to 1."""
        kept = sorted((v, w) for v, w in pairs if w > 0)
        total = sum(w for _, w in kept)
        if not kept or not isfinite(total):
            raise ValueError("no value has a weight above 0")
        shares = [w / total for _, w in kept]
        return cls(tuple(v for v, _ in kept), tuple(shares), tuple(accumulate(shares)))

    def draw(self, rng: Random) -> int:
        """One size; takes one number of ``rng``, whatever the distribution."""
        at = bisect_left(self.cumulative, rng.random())
        return self.values[min(at, len(self.values) - 1)]

    def mean_of(self, value: Callable[[int], float]) -> float:
        """Expectation of ``value(size)``."""
        return sum(s * value(v) for v, s in zip(self.values, self.shares, strict=True))

    @property
    def mean(self) -> float:
        return self.mean_of(float)

    @property
    def largest(self) -> int:
        return self.values[-1]


def parse_sizes(text: str, where: str) -> Sizes:
    """A distribution from its text form.

    Args:
        text: see the module's docstring.
        where: the option that it came from, for errors.

    Raises:
        RequestError: INVALID_REQUEST.
    """
    kind, _, rest = text.partition(":")
    if not rest and kind.strip().isdecimal():
        kind, rest = "fixed", kind
    make = _KINDS.get(kind.strip())
    if make is None:
        raise nonsense(f"unknown distribution {text!r}", where, f"known: {', '.join(_KINDS)}")
    return make(rest.strip(), where)


def _fixed(rest: str, where: str) -> Sizes:
    return Sizes.of([(whole(rest, where, 1, MAX_SIZE), 1.0)])


def _uniform(rest: str, where: str) -> Sizes:
    low, _, high = rest.partition("-")
    first, last = whole(low, where, 1, MAX_SIZE), whole(high, where, 1, MAX_SIZE)
    if first > last:
        raise nonsense(f"uniform from {first} to {last} is empty", where, "for example uniform:1-8")
    return Sizes.of([(v, 1.0) for v in range(first, last + 1)])


def _choice(rest: str, where: str) -> Sizes:
    options = Options(rest, where)
    pairs = [(whole(k, where, 1, MAX_SIZE), options.number(k, above=0.0)) for k in options.names]
    if not pairs:
        raise nonsense("choice names no value", where, "for example choice:1=0.8,8=0.2")
    return Sizes.of(pairs)


def _zipf(rest: str, where: str) -> Sizes:
    options = Options(rest, where, known=("a", "max"))
    a, most = options.number("a", 1.2, above=0.0), options.whole("max", 64, 1, MAX_SIZE)
    return Sizes.of([(v, v**-a) for v in range(1, most + 1)])


def _lognormal(rest: str, where: str) -> Sizes:
    options = Options(rest, where, known=("median", "sigma", "max"))
    median = options.number("median", above=0.0)
    sigma = options.number("sigma", 0.8, above=0.0)
    most = options.whole("max", 512, 1, MAX_SIZE)
    curve = NormalDist(log(median), sigma)

    def below(x: float) -> float:
        return curve.cdf(log(x))

    # Rounded to the nearest whole number; what is longer than the maximum is cut to it.
    pairs = [(v, below(v + 0.5) - (below(v - 0.5) if v > 1 else 0.0)) for v in range(1, most)]
    return Sizes.of([*pairs, (most, 1.0 - below(most - 0.5) if most > 1 else 1.0)])


_KINDS: dict[str, Callable[[str, str], Sizes]] = {
    "fixed": _fixed,
    "uniform": _uniform,
    "choice": _choice,
    "zipf": _zipf,
    "lognormal": _lognormal,
}
