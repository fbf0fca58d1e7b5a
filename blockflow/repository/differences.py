"""Differences: how far a result is from what it should be, and how far it may be."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from torch import Tensor

TOLERANCE: Mapping[str, float] = {
    "float64": 1e-9,
    "float32": 1e-4,
    "float16": 1e-2,
    "bfloat16": 5e-2,
}
"""Largest difference allowed, as a part of the largest reference value (:func:`least_scale`)."""

_NOISE = 1e-3
"""What is smaller may be all that rounding has left where larger numbers cancel out."""

_INTEGERS_OFF = 1e-3
"""Share of a result's integers that may change with the number of rows: kernels round differently
then, and of the pixels of a segmentation, say, some lie on the edge of two classes."""


def least_scale(results: Iterable[Tensor]) -> float:
    """The scale that differences are a part of where a result's own values are smaller: that of
    several results, since one may be close to 0 by chance; at most 1."""
    return min(1.0, max(_NOISE, *map(_largest, results)))


def _largest(y: Tensor) -> float:
    """The largest finite value."""
    return float(y.double().abs().nan_to_num(0.0, posinf=0.0).max())


def tolerated(dtype: str, coarse: float) -> float:
    return max(TOLERANCE[dtype], coarse) if dtype in TOLERANCE else 0.0


def changed(y: Tensor, reference: Tensor, least: float, coarse: float) -> tuple[float, float]:
    """(by how much, what is allowed): of floats as a part of the largest value (at least
    ``least``), of integers the share that differs. Between blocks an infinity (of a mask, say)
    equals itself."""
    allowed = tolerated(dtype_of(reference), coarse) or _INTEGERS_OFF
    if y.shape != reference.shape or y.dtype != reference.dtype:
        return float("inf"), allowed
    if not reference.is_floating_point():
        return float((y != reference).double().mean()), allowed
    same = (y == reference) | (y.isnan() & reference.isnan())
    gaps = (y.double() - reference.double()).abs().masked_fill(same, 0.0)
    return float(gaps.max()) / max(least, _largest(reference)), allowed


def scaled(y: Tensor, expected: Tensor, least: float) -> float:
    """Largest difference, as a part of the largest expected value (at least ``least``)."""
    scale = max(least, float(expected.double().abs().max()))
    return float((y.double() - expected.double()).abs().max()) / scale


def dtype_of(y: Tensor) -> str:
    return str(y.dtype).removeprefix("torch.")
