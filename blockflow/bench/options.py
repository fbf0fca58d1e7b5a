"""What the command lines of benchmarks have in common. Pure."""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence
from pathlib import Path

PART = "-part"
"""Ends the name of the result file of a run that measures less than the whole, or something else,
as ``-quick`` does a quick one's: the documents are made of what is in the files of whole runs."""


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


def parse_rounds(argv: Sequence[str], name: str, doc: str | None, usual: int) -> argparse.Namespace:
    """The command line of a benchmark that goes round after round: ``quick``, ``rounds`` (None:
    as many as usual) and ``json``."""
    parser = argparse.ArgumentParser(prog=f"python -m blockflow.bench.{name}", description=doc)
    parser.add_argument("--quick", action="store_true", help="seconds only: is everything sound?")
    parser.add_argument("--rounds", type=count, help=f"how many (default {usual})")
    parser.add_argument("--json", help=f"file for the figures (default results/{name}.jsonl)")
    return parser.parse_args(argv)


def result_path(args: argparse.Namespace, name: str, *, whole: bool) -> Path:
    """Where the figures of :func:`parse_rounds` go: neither a quick run nor one that is not
    ``whole`` takes the place of a real one."""
    mark = "-quick" * args.quick or PART * (not whole)
    return Path(args.json or f"results/{name}{mark}.jsonl")
