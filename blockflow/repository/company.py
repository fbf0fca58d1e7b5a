"""Company: a row's result is its own, whoever shares the batch."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from math import nan

import torch
from torch import Tensor

from blockflow.core.errors import ExportError
from blockflow.core.limits import DEFAULT_MAX_ROWS
from blockflow.core.model import ROWS, TensorSpec
from blockflow.repository.differences import Scale, changed
from blockflow.repository.job import Piece
from blockflow.repository.sources import batch_norms, in_train_mode

Made = Mapping[str, tuple[Tensor, Tensor]]
"""Each block's input and output in one run of all paths."""

Step = Callable[[str, Tensor], Tensor]
"""Runs a block, by its name, on an input of its own."""

_MOST_BYTES = 8 * 2**20
"""Of a block's input or output in the run of a whole batch. Large rows take long to compute, and
few of them make up a batch: of images of 3 x 224 x 224 it is 13."""


def check_rows(pieces: Sequence[Piece], step: Step, made: Made, coarse: float) -> None:
    """Each row of a batch, alone, gives what it gave beside the others; and that stays as it is: a
    worker may still hold one result when it computes the next.

    Raises:
        ExportError: EXPORT_MISMATCH.
    """
    for piece in pieces:
        x, y = made[piece.name]
        rows, scale = len(x), Scale.of([y])
        held: list[tuple[Tensor, Tensor]] = []
        for row in range(rows):
            alone = step(piece.name, x[row : row + 1].contiguous())
            held.append((alone, alone.clone()))
            found = changed(y[row : row + 1], alone, scale, coarse)
            _refuse(piece, f"row {row + 1} of {rows}", "alone", *found)
        if not all(torch.equal(a.nan_to_num(), b.nan_to_num()) for a, b in held):
            raise ExportError(
                "EXPORT_MISMATCH",
                "a later call changed the result of an earlier one: it lies in memory of the "
                "block's own, a buffer",
                where=piece.name,
                hint="return a tensor that is the result's alone: .clone()",
            )


def check_whole_batch(pieces: Sequence[Piece], step: Step, made: Made, coarse: float) -> None:
    """As many rows as a batch has by default give what they gave in a small one.

    The first one stands there many times: what is shared out among the rows (the places at an
    expert, say) is short if most of them want the same.

    Raises:
        ExportError: EXPORT_MISMATCH.
    """
    for piece in pieces:
        x, y = made[piece.name]
        rows, row_bytes = len(x), max(t[:1].nbytes for t in (x, y))
        _, bound = piece.contract.input.ranges.get(ROWS, (1, DEFAULT_MAX_ROWS))
        most = min(bound, DEFAULT_MAX_ROWS, _MOST_BYTES // row_bytes)
        if most <= rows:
            continue
        pick = torch.cat([torch.arange(rows), torch.zeros(most - rows, dtype=torch.int64)])
        batch = step(piece.name, x[pick])
        scale = Scale.of([y])
        for row, source in enumerate(pick.tolist()):
            found = changed(batch[row : row + 1], y[source : source + 1], scale, coarse)
            _refuse(piece, f"row {row + 1} of {most}", f"among {rows}", *found)


def check_strangers(pieces: Sequence[Piece], step: Step, made: Made, coarse: float) -> None:
    """A row of NaN, which anybody may send, leaves the others as they are. Times zero it is NaN: a
    sum over all rows that leaves others' out by a factor gives it to everybody.

    Raises:
        ExportError: EXPORT_MISMATCH.
    """
    for piece in pieces:
        x, y = made[piece.name]
        if not x.is_floating_point():
            continue
        beside = x.clone()
        beside[-1] = nan
        with suppress(ExportError):  # it fails, then, and is run again without that row
            batch = step(piece.name, beside)
            found = changed(batch[:-1], y[:-1], Scale.of([y]), coarse)
            if not found[0] <= found[1]:
                break
    else:
        return
    raise ExportError(
        "EXPORT_MISMATCH",
        "the result of a row depends on the rows beside it: beside a row of NaN it is another",
        where=piece.name,
        hint="something is summed over dim 0, with a factor of 0 for what is another row's: leave "
        "it out by indexing, gather() or torch.where(), or compute over other dims",
    )


def _refuse(piece: Piece, which: str, elsewhere: str, error: float, allowed: float) -> None:
    if not error <= allowed:
        raise ExportError(
            "EXPORT_MISMATCH",
            f"the result of a row depends on the rows beside it: {which} differs by {error:.3g} "
            f"from the same row {elsewhere}, allowed is {allowed:.3g}",
            where=piece.name,
            hint=in_train_mode(piece.stage)
            or batch_norms(piece.stage)
            or "a batch holds rows of several clients: compute nothing over dim 0 (sums, means, "
            "largest values, sorting, branches, places that are given out in turn); if rows "
            "belong together, make them one row of more dims: "
            f"{_grouped(piece.contract.input)} (docs/blocks.md)",
        )


def _grouped(spec: TensorSpec) -> str:
    """``float32[rows,4]`` -> ``float32[rows,8,4]``: the contract of a group of eight as one row."""
    dims = ",".join(str(d) for d in (ROWS, 8, *spec.dims[1:]))
    return f"{spec.dtype}[{dims}]"
