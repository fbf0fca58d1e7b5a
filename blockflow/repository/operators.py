"""Operators: those of a block that no worker has.

An extension, or ``torch.library``, registers operators of its own when a module is imported. The
process that exports a model has imported that module. A worker imports torch and no user's module,
so it could not even read the file.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import fx

from blockflow.core.errors import ExportError

OWN = frozenset(
    """
    aten prim prims cuda quantized _quantized quantization sparse mkl mkldnn mkldnn_prepacked onednn
    static_runtime inductor inductor_prims _inductor_test debugprims rngprims export profiler
    debug_mode_ops streams flex_lib onnx onnx_symbolic c10d c10d_functional _c10d_functional
    _c10d_functional_autograd _dtensor fsdp symm_mem _native _test
    """.split()
)
"""Namespaces of the operators that come with torch."""

_SHOWN = 5


def refuse_foreign(names: Iterable[str]) -> None:
    """Raises ExportError: EXPORT_FAILED: not all of these operators come with torch."""
    foreign = list(dict.fromkeys(n for n in names if n.partition("::")[0] not in OWN))
    if foreign:
        raise ExportError(
            "EXPORT_FAILED",
            f"the block calls {', '.join(foreign[:_SHOWN])}, which a module registers that was "
            "imported here: a worker imports torch and no such module, and could not load the file",
            hint="compute it with torch operations; an operator without a kernel of its own "
            "(CompositeImplicitAutograd) is taken apart by pt2",
        )


def exported_operators(module: fx.GraphModule) -> Iterator[str]:
    """Those of an exported program's graph and of the graphs in it, ``namespace::name``."""
    for part in module.modules():
        if isinstance(part, fx.GraphModule):
            for node in part.graph.nodes:
                if isinstance(node.target, torch._ops.OpOverload):
                    yield node.target._schema.name


def script_operators(block: Any) -> Iterator[str]:
    """Those of a TorchScript graph with all calls inlined."""
    for node in block.nodes():
        yield node.kind()
        for inner in node.blocks():
            yield from script_operators(inner)
