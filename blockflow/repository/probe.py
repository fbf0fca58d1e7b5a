"""Probe: example inputs for a contract, and the contract of an output found by running.

A block's output dims must be numbers or names that its input binds (core.model.Contract). They are
found by running it with two sets of dims: what stays is a number, what moves with an input dim is
that dim, and anything else (half the length, say) is refused with a reason.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor

from blockflow.core.errors import ExportError
from blockflow.core.model import DTYPE_BYTES, ROWS, Dim, TensorSpec

PROBE_ROWS = (2, 5)
"""Rows of the two probing runs: never 1, which tracers take for a constant."""

# dims that rarely occur as a model's own sizes, so that "equal in both runs" means something
_PROBE_SIZES = ((7, 13), (11, 17), (19, 23))


def example_input(
    spec: TensorSpec, binding: Mapping[str, int], *, int_below: int = 2, seed: int = 0
) -> Tensor:
    """A random tensor that fits ``spec``: normal floats, integers in 0 .. int_below - 1."""
    generator = torch.Generator().manual_seed(seed)
    dims = spec.resolve(binding)
    dtype: torch.dtype = getattr(torch, spec.dtype)
    if dtype.is_floating_point:
        return torch.randn(dims, generator=generator).to(dtype)
    highest = 1 if dtype is torch.bool else torch.iinfo(dtype).max
    return torch.randint(0, min(int_below, highest + 1), dims, generator=generator).to(dtype)


def probe_bindings(spec: TensorSpec) -> tuple[dict[str, int], dict[str, int]]:
    """Two bindings of the dynamic dims that differ in every dim whose range allows it."""
    first, second = {ROWS: PROBE_ROWS[0]}, {ROWS: PROBE_ROWS[1]}
    for i, name in enumerate(spec.dynamic):
        lo, hi = spec.ranges.get(name, (1, 1024))
        a, b = _PROBE_SIZES[i % len(_PROBE_SIZES)]
        first[name] = min(max(a, lo), hi)
        second[name] = min(max(b, lo), hi)
        if first[name] == second[name] and lo < hi:
            first[name], second[name] = lo, hi
            if lo == 1 and hi > 2:
                first[name] = 2
    return first, second


def check_bindings(spec: TensorSpec, rows: Iterable[int] = (1, 3, 8)) -> list[dict[str, int]]:
    """Bindings to verify a block with: each number of rows, and the ends of each range."""
    middle, _ = probe_bindings(spec)
    bindings = [{**middle, ROWS: r} for r in rows]
    for name in spec.dynamic:
        lo, hi = spec.ranges.get(name, (1, 64))
        bindings += [{**middle, ROWS: 2, name: lo}, {**middle, ROWS: 1, name: hi}]
    return bindings


def infer_spec(
    what: str,
    bound_by: TensorSpec,
    bindings: Sequence[Mapping[str, int]],
    tensors: Sequence[Tensor],
) -> TensorSpec:
    """The contract of a tensor that came out under each of two bindings.

    Args:
        what: names the tensor in errors.
        bound_by: the spec whose dynamic dims may appear.
        bindings: two sets of dims, in which the dynamic dims differ.
        tensors: the tensor under each of them.

    Raises:
        ExportError: NOT_SPLITTABLE when a dim is neither fixed nor one of the input's.
    """

    def refused(why: str) -> ExportError:
        return ExportError(
            "NOT_SPLITTABLE",
            f"{what}: {why}",
            hint="a block's output dims are numbers or the input's own dynamic dims, rows first",
        )

    one, two = tensors
    if one.dim() != two.dim() or one.dim() == 0:
        raise refused(f"rank {one.dim()} and {two.dim()} for two inputs of one contract")
    names = [ROWS, *bound_by.dynamic]
    dims: list[Dim] = []
    for i, (a, b) in enumerate(zip(one.shape, two.shape, strict=True)):
        match = [n for n in names if (a, b) == (bindings[0][n], bindings[1][n])]
        moving = [n for n in match if bindings[0][n] != bindings[1][n]]
        if i == 0:
            if ROWS not in match:
                raise refused(f"dim 0 has {a} elements for {bindings[0][ROWS]} rows of input")
            dims.append(ROWS)
        elif moving:
            dims.append(moving[-1])
        elif a == b:
            dims.append(int(a))
        else:
            raise refused(f"dim {i} is {a} or {b} for {bindings[0]} or {bindings[1]}")
    dtype = str(one.dtype).removeprefix("torch.")
    if dtype not in DTYPE_BYTES:
        raise refused(f"dtype {dtype} cannot travel between blocks")
    ranges = {n: r for n, r in bound_by.ranges.items() if n in dims}
    try:
        return TensorSpec(dtype, tuple(dims), ranges)
    except ValueError as e:  # no elements, or a rank that no message holds
        raise refused(str(e)) from e
