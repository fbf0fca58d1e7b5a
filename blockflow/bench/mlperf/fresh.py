"""Fresh inputs: rows like a task's data whose contents no system has seen, to tell a cache by."""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import blake2b

import numpy as np

from blockflow.bench.mlperf.sut import Array

_TRIES = 20
"""Draws for a row: small rows of few values are soon used up."""

_POOL_ROWS = 64
_POOL = 4096
"""Values that elements are drawn from where they are no floats."""


class FreshRows:
    """Makes rows with the dims, the dtype and the range of values of a task's data.

    Floats are drawn evenly from the data's range, and all else (tokens, pixels, the patterns of
    bfloat16) from the values that the data hold, so that every row is one that the task can take.

    Args:
        rows: the task's data, each [1, ...].
        chance: where the contents come from.
    """

    def __init__(self, rows: Sequence[Array], chance: np.random.Generator) -> None:
        self._rows = rows
        self._chance = chance
        self._sent = {_digest(row) for row in rows}
        looked = [row.reshape(-1)[:_POOL] for row in rows[:_POOL_ROWS]]
        self._pool = np.unique(np.concatenate(looked))

    def draw(self, count: int) -> list[Array]:
        """So many rows, of the data's shapes in turn, no content twice and none drawn before.

        Fewer where there are no more.
        """
        found: list[Array] = []
        while len(found) < count:
            row = self._new(self._rows[len(found) % len(self._rows)])
            if row is None:
                break
            found.append(row)
        return found

    def like(self, rows: Sequence[Array]) -> list[Array]:
        """Rows of the same shapes in the same order, where each shape has one content only.

        Empty where no further content is to be had.
        """
        made: dict[tuple[int, ...], Array] = {}
        for row in rows:
            if row.shape not in made:
                new = self._new(row)
                if new is None:
                    return []
                made[row.shape] = new
        return [made[row.shape] for row in rows]

    def _new(self, like: Array) -> Array | None:
        """A row that was not drawn before; None where chance finds none."""
        for _ in range(_TRIES):
            row = self._make(like)
            digest = _digest(row)
            if digest not in self._sent:
                self._sent.add(digest)
                return row
        return None

    def _make(self, like: Array) -> Array:
        if like.dtype.kind != "f":
            drawn: Array = self._chance.choice(self._pool, like.shape)
            return drawn
        finite = self._pool[np.isfinite(self._pool)].astype(np.float64)
        low, high = (float(finite.min()), float(finite.max())) if len(finite) else (0.0, 1.0)
        return self._chance.uniform(low, high if high > low else low + 1.0, like.shape).astype(
            like.dtype
        )


def _digest(row: Array) -> bytes:
    return blake2b(str(row.shape).encode() + row.tobytes(), digest_size=16).digest()
