"""What the command lines of benchmarks have in common, and the error for nonsense on them. Pure."""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol, TypeVar

from blockflow.core.errors import RequestError

PART = "-part"
"""Ends the name of the result file of a run that measures less than the whole, or something else,
as ``-quick`` does a quick one's: the documents are made of what is in the files of whole runs."""


class Rounds(Protocol):
    """The plan, a dataclass, of a benchmark that goes round after round."""

    @property
    def rounds(self) -> int: ...


P = TypeVar("P", bound=Rounds)


def nonsense(message: str, where: str = "", hint: str = "") -> RequestError:
    """The error for a value that makes no sense; ``where`` is what it came from."""
    return RequestError("INVALID_REQUEST", message, where=where, hint=hint)


def count(text: str) -> int:
    """A whole number from 1 on.

    Raises:
        argparse.ArgumentTypeError: it is none.
    """
    try:
        found = int(text)
    except ValueError:
        found = 0
    if found < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no whole number from 1 on")
    return found


def positive(text: str) -> float:
    """A finite number above 0.

    Raises:
        argparse.ArgumentTypeError: it is none.
    """
    try:
        found = float(text)
    except ValueError:
        found = 0.0
    if not 0 < found < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r} is no number above 0")
    return found


def some_of(known: Sequence[str]) -> Callable[[str], list[str]]:
    """Names with commas between them; '' is none.

    Raises:
        argparse.ArgumentTypeError: (when called) one is not known.
    """

    def names(text: str) -> list[str]:
        found = [part.strip() for part in text.split(",") if part.strip()]
        if not set(found) <= set(known):
            raise argparse.ArgumentTypeError(f"takes some of: {', '.join(known)}")
        return found

    return names


def make_parser(
    module: str, doc: str | None = None, *, quick: str = "", name: str = ""
) -> argparse.ArgumentParser:
    """What the command lines of benchmarks have in common: ``json``, and ``quick``.

    Args:
        module: below ``blockflow.bench``.
        quick: what a quick run is for; '': there is none.
        name: of the figures, where it is not the module's.
    """
    parser = argparse.ArgumentParser(prog=f"python -m blockflow.bench.{module}", description=doc)
    if quick:
        parser.add_argument("--quick", action="store_true", help=quick)
    file = f"results/{name or module}.jsonl"
    parser.add_argument("--json", help=f"file for the figures (default {file})")
    return parser


SOUND = "seconds only: is everything sound?"
"""What most quick runs are for."""


def parse_rounds(
    argv: Sequence[str], name: str, doc: str | None, plan: P, quick: P
) -> tuple[P, argparse.Namespace]:
    """The command line of a benchmark that goes round after round: the plan, and what
    :func:`result_path` takes."""
    parser = make_parser(name, doc, quick=SOUND)
    parser.add_argument("--rounds", type=count, help=f"how many (default {plan.rounds})")
    args = parser.parse_args(argv)
    chosen: Any = quick if args.quick else plan
    return replace(chosen, rounds=args.rounds or chosen.rounds), args


def result_path(args: argparse.Namespace, name: str, *, whole: bool) -> Path:
    """Where the figures go: neither a quick run nor one that is not ``whole`` takes the place of a
    real one."""
    mark = "-quick" * getattr(args, "quick", False) or PART * (not whole)
    return Path(args.json or f"results/{name}{mark}.jsonl")
