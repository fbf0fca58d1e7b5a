"""Weights in memory that the replicas of a block have in common, in place of a copy for each.

What is shared are the tensors as the engine computes with them: batch norms folded, in the engine's
precision and layout. The artifact's own bytes, mapped, would save nothing of these.
"""

from __future__ import annotations

import logging

import torch
from torch import Tensor, fx, nn

from blockflow.engine.base import WeightStore

LEAST_BYTES = 1 << 20
"""Less than this in all stays private: a mapping and a descriptor for it would save little."""

_ALIGN = 64
"""Of each tensor's memory in the file: what the allocator of torch gives, too."""

_LOG = logging.getLogger("blockflow.engine")


def share(module: nn.Module, store: WeightStore, key: str) -> int:
    """Let the buffers of ``module`` lie in memory of ``store``.

    Bytes for bytes the same as now, or nothing is changed: whoever has written that memory may have
    had another artifact, or been in the middle of a crash.

    Args:
        module: on the CPU, prepared for computing but not called yet. Tensors that share memory
            still do so afterwards.
        key: names these weights, for all processes that could share them.

    Returns:
        How many bytes are shared now; 0 = they stay as they were.
    """
    if not isinstance(module, fx.GraphModule):
        return 0
    places: dict[int, tuple[int, Tensor]] = {}
    end = 0
    for _, _, tensor in _buffers(module):
        storage = tensor.untyped_storage()
        if storage.nbytes() and storage.data_ptr() not in places:
            whole = torch.empty(0, dtype=torch.uint8).set_(storage)
            places[storage.data_ptr()] = (end, whole)
            end += -(-storage.nbytes() // _ALIGN) * _ALIGN
    if end < LEAST_BYTES:
        return 0
    pieces = [(offset, _bytes(whole)) for offset, whole in places.values()]
    memory = store.hold(key, end, pieces)
    if memory is None:
        return 0
    held = torch.frombuffer(memory, dtype=torch.uint8)
    for offset, whole in places.values():
        if not _same(held[offset : offset + len(whole)], whole):
            _LOG.warning("weights stay private: those that others hold as %s differ", key)
            return 0
    for owner, name, tensor in _buffers(module):
        storage = tensor.untyped_storage()
        if storage.nbytes():
            offset = places[storage.data_ptr()][0] // tensor.element_size()
            view = torch.empty(0, dtype=tensor.dtype)
            view.set_(
                held.untyped_storage(),
                offset + tensor.storage_offset(),
                tensor.size(),
                tensor.stride(),
            )
            owner.register_buffer(name, view)
    return end


def _same(one: Tensor, other: Tensor) -> bool:
    """Of bytes; eight at a time, which is four times as fast as one."""
    words = len(one) // 8 * 8
    whole = torch.equal(one[:words].view(torch.int64), other[:words].view(torch.int64))
    return whole and torch.equal(one[words:], other[words:])


def _bytes(whole: Tensor) -> memoryview:
    return memoryview(whole.numpy())  # type: ignore[arg-type]  # numpy's stub before 3.12


def _buffers(module: nn.Module) -> list[tuple[nn.Module, str, Tensor]]:
    """Owner, name and tensor of each; those with two names are there twice."""
    return [
        (owner, name, tensor)
        for owner in module.modules()
        for name, tensor in owner._buffers.items()
        if tensor is not None
    ]
