"""Kinds of option values, and the findings on a policy's options."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import islice, pairwise
from typing import Any, Protocol

from blockflow.core.errors import MOST_FINDINGS, Problem, further
from blockflow.core.guess import FEW, Guesses
from blockflow.core.jsonpath import member

_SHOWN = 60


class Kind(Protocol):
    """What values an option takes."""

    def takes(self, value: Any) -> bool: ...

    def __str__(self) -> str:
        """In words, for a hint."""


@dataclass(frozen=True, slots=True)
class Integer:
    low: int
    high: int

    def takes(self, value: Any) -> bool:
        return type(value) is int and self.low <= value <= self.high

    def __str__(self) -> str:
        return f"an integer from {self.low} to {self.high}"


@dataclass(frozen=True, slots=True)
class Number:
    """``above``: the lower bound itself is not allowed."""

    low: float
    high: float
    above: bool = False

    def takes(self, value: Any) -> bool:
        if type(value) not in (int, float) or not self.low <= value <= self.high:
            return False
        return not (self.above and value == self.low)

    def __str__(self) -> str:
        start = f"above {self.low:g}" if self.above else f"from {self.low:g}"
        return f"a number {start} to {self.high:g}"


@dataclass(frozen=True, slots=True)
class OneOf:
    values: tuple[str, ...]

    def takes(self, value: Any) -> bool:
        return isinstance(value, str) and value in self.values

    def __str__(self) -> str:
        return "one of " + ", ".join(repr(v) for v in self.values)


@dataclass(frozen=True, slots=True)
class SomeOf:
    """A list of different values out of ``values``, at least one."""

    values: tuple[str, ...]

    def takes(self, value: Any) -> bool:
        if not isinstance(value, list | tuple) or not value:
            return False
        return all(isinstance(v, str) and v in self.values for v in value) and len(
            set(value)
        ) == len(value)

    def __str__(self) -> str:
        return "a list of " + ", ".join(repr(v) for v in self.values)


@dataclass(frozen=True, slots=True)
class Ascending:
    """A list of growing positive integers, at least one."""

    high: int

    def takes(self, value: Any) -> bool:
        if not isinstance(value, list | tuple) or not value:
            return False
        if not all(type(v) is int and 1 <= v <= self.high for v in value):
            return False
        return all(a < b for a, b in pairwise(value))

    def __str__(self) -> str:
        return f"a list of growing integers from 1 to {self.high}"


@dataclass(frozen=True, slots=True)
class Counts:
    """A list of positive integers, at least one."""

    high: int

    def takes(self, value: Any) -> bool:
        if not isinstance(value, list | tuple) or not value:
            return False
        return all(type(v) is int and 1 <= v <= self.high for v in value)

    def __str__(self) -> str:
        return f"a list of integers from 1 to {self.high}"


@dataclass(frozen=True, slots=True)
class Either:
    kinds: tuple[Kind, ...]

    def takes(self, value: Any) -> bool:
        return any(kind.takes(value) for kind in self.kinds)

    def __str__(self) -> str:
        return ", or ".join(str(kind) for kind in self.kinds)


def option_problems(
    owner: str,
    options: Mapping[str, Any],
    known: Mapping[str, Kind],
    path: str,
    required: Sequence[str] = (),
) -> list[Problem]:
    """Unknown options (the first of them, and how many more there are), values of the wrong kind
    and missing ones, each with its JSON path.

    Args:
        owner: whose options they are, for the messages.
        options: as given.
        known: the kinds by name.
        path: of the object that holds the options.
        required: names that must be there.
    """
    problems = []
    guesses = Guesses(known, FEW)
    unknown = 0
    for name, value in options.items():
        kind = known.get(name)
        if kind is None and (unknown := unknown + 1) > MOST_FINDINGS:
            continue
        place = member(path, str(name))
        if kind is None:
            nothing = f"known: {', '.join(known)}" if known else "leave it out"
            hint = guesses.hint(str(name)) or nothing
            problems.append(Problem(place, f"{owner} has no option {name!r}", hint))
        elif not kind.takes(value):
            problems.append(Problem(place, f"{shown(value)} is not {kind}"))
    for name in required:
        if name not in options:
            problems.append(Problem(f"{path}.{name}", f"{owner} needs {name!r}", str(known[name])))
    return [*problems, *further(unknown, path)]


def shown(value: Any) -> str:
    """A value in a finding: of any length, as far as it helps."""
    text = repr(value)
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}..."


def stages_text(sizes: Sequence[int], blocks: Sequence[str]) -> str:
    """The blocks by stage, for people: ``a+b, c``. ``sizes``: how many blocks each stage has."""
    names = iter(blocks)
    return ", ".join("+".join(islice(names, n)) for n in sizes)
