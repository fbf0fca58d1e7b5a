"""Unfold: a model's graph down to its operators, by torch.export.

It follows what torch.fx does not (keyword arguments, branches on sizes, objects that hold results),
so that a transformer is cut between its layers although its forward cannot be traced. A stage of
operators is written by torch.export again; TorchScript would make constants of its sizes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, fx, nn

from blockflow.core.model import TensorSpec
from blockflow.repository.artifact import export_program
from blockflow.repository.record import record
from blockflow.repository.traced import Traced, Untraced, first_line

_GUARDS = "_guards_fn"
"""What torch puts before a program: checks of its input. The contract is checked elsewhere."""


def unfolds(format_: str) -> bool:
    """Whether artifacts of a format can be made of operators."""
    return format_ == "pt2"


def unfold(
    model: nn.Module, spec: TensorSpec, examples: Sequence[Tensor], several: bool = False
) -> Traced:
    """Trace ``model`` down to its operators and run it on the examples.

    Args:
        model: in eval mode; its parameters are shared with the graph, not copied.
        spec: its input contract; named dims stay dynamic.
        examples: inputs of all :func:`blockflow.repository.probe.probe_bindings`.
        several: whether it may give more than one tensor.

    Raises:
        Untraced: NOT_SPLITTABLE when torch.export refuses it, or it does not give one tensor; said
            so as to follow why it cannot be traced either.
    """
    if isinstance(model, fx.GraphModule):
        for node in model.graph.nodes:
            if node.op == "call_module":  # its name would be all that is known of what it does
                node.meta.pop("nn_module_stack", None)
    try:
        with torch.no_grad():
            module = export_program(model, spec, examples[0]).module()
        traced = record(_plain(module), examples)
    except Exception as e:
        raise Untraced(
            "NOT_SPLITTABLE",
            f"nor exported: {type(e).__name__}: {first_line(e)}",
            where=type(model).__name__,
        ) from e
    if not several and not isinstance(traced.values[0][traced.nodes[-1]], Tensor):
        raise Untraced(
            "NOT_SPLITTABLE", "nor does it return one tensor", where=type(model).__name__
        )
    return traced


def _plain(module: fx.GraphModule) -> fx.GraphModule:
    """One tensor in, one out, without torch's wrapping of inputs and outputs."""
    graph = module.graph
    graph.set_codegen(fx.graph.CodeGen())
    _open_plain_regions(module)
    for node in list(graph.nodes):
        if node.op == "call_module" and node.target == _GUARDS:
            graph.erase_node(node)
        elif node.op == "output" and isinstance(node.args[0], tuple) and len(node.args[0]) == 1:
            node.args = (node.args[0][0],)
    return fx.GraphModule(module, graph)


def _open_plain_regions(module: fx.GraphModule) -> None:
    """Put what torch.export keeps in a graph of its own, since it is computed without autocast, in
    the place of its call: outside of autocast that is the same. Rotary positions are often made so,
    and give sizes, which could not be followed through the call."""
    graph = module.graph
    for call in list(graph.nodes):
        if call.target is not torch.ops.higher_order.wrap_with_autocast or call.args[2]:
            continue
        inner = getattr(module, call.args[4].target).graph
        names = (n for n in inner.nodes if n.op == "placeholder")
        if any(n.op == "get_attr" for n in inner.nodes):
            continue
        with graph.inserting_before(call):
            made: Any = graph.graph_copy(inner, dict(zip(names, call.args[5:], strict=True)))
        for item in list(call.users):
            item.replace_all_uses_with(made[item.args[1]])
            graph.erase_node(item)
        graph.erase_node(call)
