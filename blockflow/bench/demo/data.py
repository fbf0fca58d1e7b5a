"""The demo's data: scikit-learn's bundled handwritten digits and the three tasks' labels."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from blockflow.core.errors import make_error
from blockflow.engine.extras import how_to_install

HELD_OUT = 360
"""Images kept from training: a fifth of the 1,797."""

TASKS = ("digit", "parity", "high")
"""Which digit; odd or even; five or more."""

Images = NDArray[np.float32]
Labels = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Digits:
    """Images float32[n, 1, 8, 8] with values 0..1, and the digit each one shows, int64[n].

    The held-out images are never trained on and no choice was made by looking at them.
    """

    train_images: Images
    train_digits: Labels
    test_images: Images
    test_digits: Labels


def load_data(seed: int) -> Digits:
    """Load and part the images by a seeded permutation.

    Raises:
        SystemError_: MISSING_EXTRA when scikit-learn is not installed.
    """
    try:
        from sklearn.datasets import load_digits
    except ImportError as exc:
        raise make_error(
            "MISSING_EXTRA",
            "the demo's images come with scikit-learn, which is not installed",
            hint=how_to_install("demo"),
        ) from exc
    bunch = load_digits()
    images = np.ascontiguousarray(bunch.images[:, None] / 16.0, dtype=np.float32)
    digits = np.asarray(bunch.target, dtype=np.int64)
    order = np.random.default_rng(seed).permutation(len(digits))
    test, train = order[:HELD_OUT], order[HELD_OUT:]
    return Digits(images[train], digits[train], images[test], digits[test])


def labels(task: str, digits: Labels) -> Labels:
    """The task's right answers: class numbers int64[n]."""
    if task == "digit":
        return digits
    if task == "parity":
        return digits % 2
    if task == "high":
        return (digits >= 5).astype(np.int64)
    raise ValueError(f"unknown task {task!r}; known: {', '.join(TASKS)}")
