"""Padding: lengthen tensors, cut results back, and check that a block keeps its promise.

A block that promises :class:`~blockflow.core.model.Padding` is run here on what a worker will give
it: inputs of several lengths, each padded alone, and all of them in one batch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise

import torch
from torch import Tensor

from blockflow.core.errors import ExportError
from blockflow.core.model import ROWS, Contract, Padding, TensorSpec
from blockflow.repository.probe import example_input, probe_bindings

Run = Callable[[Tensor], Tensor]
Differ = Callable[[Tensor, Tensor], float]
"""(result, reference) -> error."""

_NO_RANGE = 64
"""The longest that is tried where the contract sets no bound."""


def padded(
    parts: Sequence[Tensor], shape: Sequence[int], value: float, out: Tensor | None = None
) -> Tensor:
    """The rows of ``parts`` as one tensor, lengthened at the far ends with ``value``.

    Args:
        parts: of one dtype, device and rank.
        shape: dims after the rows; no part is larger in any of them.
        value: of the elements that are added.
        out: where the tensor shall be, of its dims; None takes new memory.
    """
    rows = sum(p.shape[0] for p in parts)
    whole = parts[0].new_full((rows, *shape), value) if out is None else out.fill_(value)
    row = 0
    for part in parts:
        cut(whole[row : row + part.shape[0]], part.shape[1:]).copy_(part)
        row += part.shape[0]
    return whole


def cut(y: Tensor, shape: Sequence[int]) -> Tensor:
    """The part of ``y`` that has ``shape`` after the rows: a view."""
    return y[(slice(None), *(slice(n) for n in shape))]


def blank(y: Tensor, shape: Sequence[int], value: float) -> None:
    """Write ``value`` wherever ``y`` is larger than ``shape`` after the rows."""
    for dim, extent in enumerate(shape, start=1):
        if extent < y.shape[dim]:
            y.narrow(dim, extent, y.shape[dim] - extent).fill_(value)


def promised(padding: Padding | None, taken: TensorSpec, *, first: bool) -> Padding | None:
    """What a block of a padded model promises of its own input ``taken``.

    The model's padding value is for the blocks that take its input; between blocks it is 0.
    """
    if padding is None or padding.dim not in taken.dynamic:
        return None
    return padding if first else Padding(padding.dim)


def length_inputs(
    spec: TensorSpec, padding: Padding, *, int_below: int | None = None
) -> list[Tensor]:
    """Inputs of two rows with the dim at several lengths, the smallest among them."""
    lo, hi = spec.ranges.get(padding.dim, (1, _NO_RANGE))
    bindings = probe_bindings(spec)
    lengths = sorted({lo, *(b[padding.dim] for b in bindings)} - {hi}) or [lo]
    middle = {**bindings[0], ROWS: 2}
    return [
        example_input(spec, {**middle, padding.dim: n}, int_below=int_below, seed=50 + n)
        for n in lengths
    ]


def only_padding(spec: TensorSpec, padding: Padding) -> Tensor:
    """One row that holds nothing else, as of a text without words."""
    binding = {**probe_bindings(spec)[0], ROWS: 1}
    return example_input(spec, binding).fill_(padding.value)


def check_padding(
    run: Run,
    contract: Contract,
    padding: Padding,
    pairs: Sequence[tuple[Tensor, Tensor]],
    differ: Differ,
    allowed: float,
    where: str,
) -> float:
    """Run a block on padded inputs and compare with the results of the unpadded ones.

    Each input is padded to the next longer one's length, the longest to the end of the range; and
    the first rows of all of them form one batch of that length.

    Args:
        run: the block as it will be run.
        contract: its own; ``padding`` is what it promises.
        pairs: inputs that fit it, and their results unpadded.
        differ: measures a cut result against the result unpadded.
        allowed: by which they may differ.
        where: the block, for the message.

    Returns:
        The largest difference.

    Raises:
        ExportError: EXPORT_MISMATCH: the promise does not hold.
    """
    spec = contract.input
    at = spec.dims.index(padding.dim)
    longest = max(
        [spec.ranges.get(padding.dim, (1, _NO_RANGE))[1], *(x.shape[at] for x, _ in pairs)]
    )
    lengths = sorted({int(x.shape[at]) for x, _ in pairs} | {longest})
    following = dict(pairwise(lengths))
    worst = 0.0

    def compare(members: Sequence[tuple[Tensor, Tensor]], length: int) -> None:
        nonlocal worst
        xs = [x for x, _ in members]
        dtype = str(xs[0].dtype).removeprefix("torch.")
        binding = {**spec.bind(dtype, xs[0].shape), padding.dim: length}
        whole = padded(xs, spec.resolve(binding)[1:], padding.value)
        with torch.no_grad():
            y = run(whole)
        row = 0
        for x, reference in members:
            rows = x.shape[0]
            error = differ(cut(y[row : row + rows], reference.shape[1:]), reference)
            # a NaN compares false with everything: "not <=" refuses it
            if not error <= allowed:
                others = "" if len(members) == 1 else f" beside {len(members) - 1} of other lengths"
                raise ExportError(
                    "EXPORT_MISMATCH",
                    f"padding {padding.dim} {x.shape[at]} to {length}{others} changes the result "
                    f"by {error:.3g}, allowed is {allowed:.3g}",
                    where=where,
                    hint=f"positions that hold only {padding.value:g} must count for nothing "
                    "(docs/blocks.md); or do not promise that the block may be padded",
                )
            worst = max(worst, error)
            row += rows

    for x, y in pairs:
        longer = following.get(int(x.shape[at]))
        if longer is not None:
            compare([(x, y)], longer)
    compare([(x[:1], y[:1]) for x, y in pairs], longest)
    return worst
