"""What the command lines of benchmarks have in common. Pure."""

from __future__ import annotations

import argparse
import math

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
