"""Lengths: how long an input may be where policies have length classes. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from blockflow.core import limits
from blockflow.core.dims import is_name
from blockflow.core.model import BlockInfo, Contract, TensorSpec
from blockflow.core.paths import dims_after


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
            classes = policies[block].get("classes")
            for own, padded in zip(info.contract.input.dims, dims, strict=True):
                if not classes or info.padding is None or own != info.padding.dim:
                    continue
                if is_name(padded):
                    bounds[padded] = min(classes[-1], bounds.get(padded, classes[-1]))
            dims = dims_after(info.contract, dims)
    found: dict[str, tuple[int, int]] = {}
    for name, bound in bounds.items():
        lo, hi = contract.input.ranges.get(name, (1, limits.MAX_DIM))
        if lo <= bound:
            found[name] = lo, min(hi, bound)
    return Contract(_within(contract.input, found), _within(contract.output, found))


def _within(spec: TensorSpec, ranges: Mapping[str, tuple[int, int]]) -> TensorSpec:
    own = {name: r for name, r in ranges.items() if name in spec.dynamic}
    return replace(spec, ranges={**spec.ranges, **own})
