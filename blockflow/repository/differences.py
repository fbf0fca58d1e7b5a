"""Differences: how far a result is from what it should be, and how far it may be."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from math import inf

import torch
from torch import Tensor

TOLERANCE: Mapping[str, float] = {
    "float64": 1e-9,
    "float32": 1e-4,
    "float16": 1e-2,
    "bfloat16": 5e-2,
}
"""Largest difference allowed, as of :func:`difference`."""

_NOISE = 1e-3
"""What is smaller may be all that rounding has left where larger numbers cancel out."""

_SMALLEST = 1e-12
"""Results of which each is measured by its own values may be as small."""

_INTEGERS_OFF = 1e-3
"""Share of a result's integers that may change with the number of rows: kernels round differently
then, and of the pixels of a segmentation, say, some lie on the edge of two classes."""

_APART = 10.0
"""What suppresses (a mask's -1e9) is more than so many times all others, and more than 1."""

_SUPPRESSING = 8
"""So many different ones are looked for."""


@dataclass(frozen=True, slots=True)
class Scale:
    """What differences are a part of, as several results of one block tell it.

    Attributes:
        least: where a result's own values are smaller, since one may be close to 0 by chance.
        apart: what is larger is measured by itself, and says nothing of the others: beside a -1e9
            that stands for "never" any difference of the rest is small.
    """

    least: float
    apart: float = inf

    @classmethod
    def of(cls, results: Iterable[Tensor]) -> Scale:
        """Of at least a thousandth and at most 1, or the largest value."""
        sizes = torch.cat([_sizes(y) for y in results])
        apart = _apart(sizes)
        return cls(min(1.0, max(_NOISE, _largest(sizes, apart))), apart)

    @classmethod
    def exact(cls, results: Iterable[Tensor]) -> Scale:
        """Each result by its own values, however small."""
        return cls(_SMALLEST, _apart(torch.cat([_sizes(y) for y in results])))


def _sizes(y: Tensor) -> Tensor:
    """Magnitudes; infinities and NaN count as 0."""
    return y.double().abs().nan_to_num(0.0, posinf=0.0).flatten()


def _largest(sizes: Tensor, apart: float) -> float:
    return float(sizes.masked_fill(sizes > apart, 0.0).max())


def _apart(sizes: Tensor) -> float:
    """Above which values stand apart. What suppresses is written there, so it is there several
    times, as a result's own largest values are not: a peak is what the result says."""
    found = inf
    for _ in range(_SUPPRESSING):
        top = sizes.max()
        rest = sizes[sizes < top]
        following = float(rest.max()) if len(rest) else 0.0
        if len(sizes) - len(rest) < 2 or not following:
            break
        bound = max(1.0, _APART * following)
        if float(top) > bound:
            found = bound
        sizes = rest
    return found


def tolerated(dtype: str, coarse: float) -> float:
    return max(TOLERANCE[dtype], coarse) if dtype in TOLERANCE else 0.0


def changed(y: Tensor, reference: Tensor, scale: Scale, coarse: float) -> tuple[float, float]:
    """(by how much, what is allowed), of results that are to be the same."""
    allowed = tolerated(dtype_of(reference), coarse) or _INTEGERS_OFF
    found = difference(y, reference, scale) if y.dtype == reference.dtype else inf
    return found, allowed


def difference(y: Tensor, reference: Tensor, scale: Scale) -> float:
    """By how much ``y`` differs: of floats as a part of the largest reference value, of integers
    the share that does, for class 7 is not nearly class 3. Infinity for other dims.

    An infinity (of a mask between blocks, say) and a NaN equal themselves.
    """
    if y.shape != reference.shape:
        return inf
    if not y.is_floating_point():
        return float((y.to(reference.dtype) != reference).double().mean())  # exact where both are
    same = (y == reference) | (y.isnan() & reference.isnan())
    gaps = (y.double() - reference.double()).abs().masked_fill(same, 0.0).flatten()
    sizes = _sizes(reference)
    return float((gaps / sizes.clamp(min=max(scale.least, _largest(sizes, scale.apart)))).max())


def dtype_of(y: Tensor) -> str:
    return str(y.dtype).removeprefix("torch.")
