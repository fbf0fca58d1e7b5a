"""Text forms of contracts, as people type them: ``float32[rows,3,224,224]``, ``length=1..512``,
``length=0``."""

from __future__ import annotations

import re
from collections.abc import Mapping

from blockflow.core.limits import MAX_DIM
from blockflow.core.model import ROWS, Padding, TensorSpec

FEWEST_ROWS = 8
"""That a block has to take at once: it is verified with so many."""

_SPEC = re.compile(r"\s*([a-z0-9]+)\s*\[([^\]]*)\]\s*", re.ASCII)
_RANGE = re.compile(r"\s*(\w+)\s*=\s*(\d{1,10})\s*\.\.\s*(\d{1,10})\s*", re.ASCII)
_NAME = re.compile(r"[A-Za-z_]\w{0,31}", re.ASCII)
_NUMBER = re.compile(r"[0-9]{1,10}", re.ASCII)


def parse_spec(text: str, ranges: Mapping[str, tuple[int, int]] | None = None) -> TensorSpec:
    """``float32[rows,3,224,224]`` -> TensorSpec. Raises ValueError with what is wrong."""
    match = _SPEC.fullmatch(text)
    if match is None:
        raise ValueError(f"{text!r} is not of the form float32[rows,3,224,224]")
    dims: list[int | str] = []
    for part in (d.strip() for d in match[2].split(",")):
        if _NUMBER.fullmatch(part):
            if not 1 <= int(part) <= MAX_DIM:
                raise ValueError(f"a dim of {text!r} has {part} elements, not 1 to {MAX_DIM}")
            dims.append(int(part))
        elif _NAME.fullmatch(part):
            dims.append(part)
        else:
            raise ValueError(f"{part!r} in {text!r} is neither a number nor a name")
    if (least := (ranges or {}).get(ROWS)) and (least[0] != 1 or least[1] < FEWEST_ROWS):
        raise ValueError(f"a range of {ROWS!r} begins with 1, and ends with {FEWEST_ROWS} at least")
    return TensorSpec(match[1], tuple(dims), dict(ranges or {}))


def parse_padding(text: str) -> Padding:
    """``length`` or ``length=-1`` -> Padding; the value is 0 by default. Raises ValueError."""
    name, sign, number = (part.strip() for part in text.partition("="))
    try:
        value: int | float = int(number) if sign else 0
    except ValueError:
        value = float(number)
    if _NAME.fullmatch(name) is None:
        raise ValueError(f"{text!r} is not of the form length=0")
    return Padding(name, value)


def parse_range(text: str) -> tuple[str, tuple[int, int]]:
    """``length=1..512`` -> ("length", (1, 512)). Raises ValueError."""
    match = _RANGE.fullmatch(text)
    if match is None:
        raise ValueError(f"{text!r} is not of the form length=1..512")
    return match[1], (int(match[2]), int(match[3]))
