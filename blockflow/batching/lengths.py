"""Lengths: how long an input may be where policies have length classes. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from blockflow.core import limits
from blockflow.core.model import BlockInfo, Contract, TensorSpec


def within_classes(
    contract: Contract,
    paths: Sequence[Sequence[str]],
    infos: Mapping[str, BlockInfo],
    policies: Mapping[str, Mapping[str, Any]],
) -> Contract:
    """A task's contract, no dim of which is longer than the last class of any policy on its way.

    Args:
        contract: as the blocks alone have it.
        paths: blocks that its requests may run through.
        infos: of these blocks.
        policies: the ``batching`` object of each block.
    """
    bounds: dict[str, int] = {}
    for path in paths:
        dims = contract.input.dims
        for block in path:
            info = infos[block]
            own = dict(zip(info.contract.input.dims, dims, strict=True))
            classes = policies[block].get("classes")
            padded = own.get(info.padding.dim) if info.padding is not None else None
            if classes and isinstance(padded, str):
                bounds[padded] = min(classes[-1], bounds.get(padded, classes[-1]))
            dims = tuple(own[d] if isinstance(d, str) else d for d in info.contract.output.dims)
    found: dict[str, tuple[int, int]] = {}
    for name, bound in bounds.items():
        lo, hi = contract.input.ranges.get(name, (1, limits.MAX_DIM))
        if lo <= bound:
            found[name] = lo, min(hi, bound)
    return Contract(_within(contract.input, found), _within(contract.output, found))


def _within(spec: TensorSpec, ranges: Mapping[str, tuple[int, int]]) -> TensorSpec:
    own = {name: r for name, r in ranges.items() if name in spec.dims}
    return replace(spec, ranges={**spec.ranges, **own})
