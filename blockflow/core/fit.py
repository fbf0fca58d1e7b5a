"""CurveFit: LBCI's four-parameter curve of the time per sample, and how it is fitted.

LBCI, section 3: ``s(b) = (z1 - z2) / (1 + (b / z3)^z4) + z2``; ``g(b) = b s(b)`` is the total time
of a batch (the paper's equation 6). For given z3 and z4 the curve is linear in z1 and z2, so the
best pair is found in closed form (variable projection: Golub and Pereyra, 1973) and only a plane of
two parameters is searched. That needs no starting values, gives the same curve each time, and
spares the workers a package for optimisation.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

_GRID = 17
_ZOOMS = 40
_NARROWER = 0.6
"""Each zoom looks at 0.6 of the former span around the best cell: wide enough to follow a bent
valley, narrow enough for nine digits in 40 steps."""

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class CurveFit:
    """Times of a batch by the fitted curve, in milliseconds.

    Attributes:
        z1: time per sample towards b = 0.
        z2: time per sample of a huge batch.
        z3: batch size half-way between.
        z4: how sharply it changes there.
        max_error: largest |fit - measured| / measured over the points.
        r2: share of the variance of the time per sample that the curve explains; 1 for an exact
            fit, near 0 where the time per sample does not depend on the batch (read max_error
            then).
    """

    z1: float
    z2: float
    z3: float
    z4: float
    max_error: float = 0.0
    r2: float = 1.0

    def per_sample(self, b: float) -> float:
        """``s(b)``."""
        return (self.z1 - self.z2) / (1 + (b / self.z3) ** self.z4) + self.z2

    def total(self, b: float) -> float:
        """``g(b) = b s(b)``."""
        return b * self.per_sample(b)

    @property
    def rising(self) -> bool:
        """Whether a larger batch never takes less time, for any b.

        With d = z1 - z2 > 0, g' >= 0 everywhere if and only if z2 / d >= (z4 - 1)^2 / (4 z4) or
        z4 <= 1 (from the minimum of g' over b). If not, "the largest b with g(b) <= t" is not a
        threshold, and one must look at each b.
        """
        d = self.z1 - self.z2
        return d <= 0 or self.z4 <= 1 or self.z2 / d >= (self.z4 - 1) ** 2 / (4 * self.z4)


def fit_curve(rows: Sequence[int], total_ms: Sequence[float]) -> CurveFit:
    """Fit the curve to measured totals, with the smallest sum of squared relative errors.

    Args:
        rows: batch sizes, each once.
        total_ms: time of a batch of each size.

    Fewer than four points do not determine four parameters: with three z4 is 1, with two z3 is
    their geometric mean as well, and one gives a constant time per sample.

    Raises:
        ValueError: no points, a size twice, or something that is not positive and finite.
    """
    b = np.asarray(rows, dtype=np.float64)
    t = np.asarray(total_ms, dtype=np.float64)
    if b.ndim != 1 or b.shape != t.shape or b.size == 0:
        raise ValueError(f"{b.size} batch sizes and {t.size} times")
    if not (np.isfinite(b).all() and np.isfinite(t).all() and b.min() > 0 and t.min() > 0):
        raise ValueError("batch sizes and times must be positive and finite")
    if np.unique(b).size != b.size:
        raise ValueError("a batch size is there twice")
    s = t / b
    middle = float(np.exp(np.log(b).mean()))
    if b.size == 1:
        z1 = z2 = float(s[0])
        z3, z4 = middle, 1.0
    else:
        z1, z2, z3, z4 = _search(b, s, middle)
    curve = CurveFit(z1, z2, z3, z4)
    fitted = np.array([curve.per_sample(x) for x in b])
    variance = float(((s - s.mean()) ** 2).sum())
    r2 = 1 - float(((s - fitted) ** 2).sum()) / variance if variance > 0 else 1.0
    return CurveFit(z1, z2, z3, z4, float((abs(fitted - s) / s).max()), r2)


def _search(b: Floats, s: Floats, middle: float) -> tuple[float, float, float, float]:
    """Zoom in on the best (z3, z4) in the plane of their logarithms."""
    # a fixed cost plus one per row, g = c + k b, is the limit of z3 -> 0 at z4 = 1
    lo = np.log([b.min() / 1e5, 0.25])
    hi = np.log([b.max() * 10, 8.0])
    if b.size < 4:
        lo[1] = hi[1] = 0.0
    if b.size < 3:
        lo[0] = hi[0] = np.log(middle)
    centre, span = (lo + hi) / 2, hi - lo
    least, best = np.inf, (0.0, 0.0, 1.0, 1.0)
    for _ in range(_ZOOMS):
        axes = [
            np.clip(np.linspace(c - w / 2, c + w / 2, _GRID), low, high)
            for c, w, low, high in zip(centre, span, lo, hi, strict=True)
        ]
        z3, z4 = (np.exp(m).ravel() for m in np.meshgrid(*axes, indexing="ij"))
        z1, z2, cost = _project(b, s, z3, z4)
        i = int(cost.argmin())
        if cost[i] < least:
            least = cost[i]
            best = (float(z1[i]), float(z2[i]), float(z3[i]), float(z4[i]))
            centre = np.log([z3[i], z4[i]])
        span = span * _NARROWER
    return best


def _project(b: Floats, s: Floats, z3: Floats, z4: Floats) -> tuple[Floats, Floats, Floats]:
    """The best z1, z2 >= 0 for each (z3, z4), and the squared relative error that remains.

    ``s = z1 h + z2 (1 - h)`` with ``h = 1 / (1 + (b / z3)^z4)``; divided by the measured ``s``.
    """
    h = 1 / (1 + (b[None, :] / z3[:, None]) ** z4[:, None])
    p, q = h / s, (1 - h) / s
    pp, pq, qq = (p * p).sum(1), (p * q).sum(1), (q * q).sum(1)
    p1, q1 = p.sum(1), q.sum(1)
    free = pp * qq - pq * pq
    safe = np.where(free > 1e-12 * pp * qq, free, np.inf)
    z1, z2 = (p1 * qq - q1 * pq) / safe, (q1 * pp - p1 * pq) / safe
    # two unknowns: a negative one is 0 in the constrained optimum, and the other is alone
    degenerate = ~np.isfinite(safe)
    only_z1 = (z2 < 0) | degenerate
    only_z2 = (z1 < 0) & ~only_z1
    tiny = np.finfo(np.float64).tiny
    z1, z2 = (
        np.where(only_z1, p1 / np.maximum(pp, tiny), np.where(only_z2, 0.0, z1)),
        np.where(only_z1, 0.0, np.where(only_z2, q1 / np.maximum(qq, tiny), z2)),
    )
    left = z1[:, None] * p + z2[:, None] * q - 1
    return z1, z2, (left * left).sum(1)
