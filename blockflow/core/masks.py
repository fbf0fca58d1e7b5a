"""Which numbers of a stored tensor are a mask's: they may be larger than a dtype holds."""

from __future__ import annotations

_SUPPRESSES = -1e8
"""What masks add is less."""


def is_mask(rank: int, least: float, most: float) -> bool:
    """Whether the numbers of a tensor that a dtype does not hold, from ``least`` to ``most``, are
    one and the same below 0: what a mask takes away stays away, however large it is.

    Args:
        rank: of the tensor. Of a vector the statistics of a norm may be such numbers, too; they are
            not as large as what masks add.
    """
    return least == most < (0.0 if rank > 1 else _SUPPRESSES)
