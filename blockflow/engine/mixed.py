"""Mixed: an exported graph with conversions in it, whose weights were lowered to bf16 or fp16.

A graph has its dtypes as they were traced: ``h.to(x.dtype)``, ``arange``, ``softmax(dtype=)`` say
float32 there, whatever its weights are now. Where that was meant it is right (a norm computed in
float32 stays so), and where such a value meets a lowered one, most operators promote. Others refuse
two dtypes: products, convolutions, norms, attention, recurrent layers, whatever writes into a part
of a tensor; on a CPU 71 of the 205 with several floating arguments in torch 2.13's ``op_db`` (one
argument in bf16, or all but one). Instead of a list of them, one forward is tried, operator by
operator: one that fails with the dtypes that it meets, and does not with one dtype, gets that.
"""

from __future__ import annotations

import math
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor, fx
from torch.fx.node import map_aggregate

_aten = torch.ops.aten

_PRODUCTS = frozenset(
    "aten::" + name
    for name in """
    linear mm bmm addmm addbmm baddbmm matmul inner einsum bilinear _trilinear
    conv1d conv2d conv3d conv_transpose1d conv_transpose2d conv_transpose3d convolution _convolution
    """.split()
)
"""Whether these refuse two dtypes depends on the dims as well (a sum of nothing they compute), and
what is tried are the least ones."""


def widened(module: fx.GraphModule) -> set[int]:
    """Stored tensors, by ``id``, that the graph only ever converts to float32 or wider.

    Lowered, they would be rounded before: the frequencies of rotary positions, say, which are
    multiplied by hundreds then.
    """
    found: dict[int, bool] = {}
    for node in module.graph.nodes:
        if node.op == "get_attr":
            key = id(attrgetter(str(node.target))(module))
            found[key] = found.get(key, True) and _is_widened(node)
    return {key for key, always in found.items() if always}


def _is_widened(node: fx.Node) -> bool:
    return bool(node.users) and all(_widens(user) for user in node.users)


def _widens(user: fx.Node) -> bool:
    schema = getattr(user.target, "_schema", None)
    if schema is None:
        return False
    if schema.name in ("aten::to", "aten::_to_copy"):
        return not {torch.float32, torch.float64}.isdisjoint((*user.args, *user.kwargs.values()))
    is_view = len(schema.returns) == 1 and schema.returns[0].alias_info is not None
    return is_view and not schema.is_mutable and _is_widened(user)


def fit(module: fx.GraphModule, x: Tensor, dtype: torch.dtype) -> int:
    """Convert what operators of ``module`` get, where they need one dtype and are given several.

    Only that changes: a graph without such an operator stays the very graph that it was.

    Args:
        module: takes one tensor; its weights are in ``dtype``, but for :func:`widened` ones.
        x: an input, in ``dtype`` if it is floating. The module is called with it once.

    Returns:
        How many operators are given other arguments now.

    Raises:
        Exception: what the module raises for ``x`` whatever is converted.
    """
    trial = _Trial(module, dtype)
    trial.run(x)
    if trial.refused:
        _rewrite(module.graph, trial)
        module.graph.lint()
        module.recompile()
    return len(trial.refused)


class _Trial(fx.Interpreter):
    """Runs a graph and notes which operators need one dtype.

    Attributes:
        dtypes: of all floating values.
        refused: the operators, with the dtype that they get.
    """

    def __init__(self, module: fx.GraphModule, precision: torch.dtype) -> None:
        super().__init__(module)
        self.extra_traceback = False  # the reason is for people who have not made the graph
        self._precision = precision
        self.dtypes: dict[fx.Node, torch.dtype] = {}
        self.refused: dict[fx.Node, torch.dtype] = {}

    def run_node(self, n: fx.Node) -> Any:
        value = self._computed(n)
        if isinstance(value, Tensor) and value.is_floating_point():
            self.dtypes[n] = value.dtype
        return value

    def _computed(self, n: fx.Node) -> Any:
        schema = getattr(n.target, "_schema", None)
        if n.op != "call_function" or schema is None:
            return super().run_node(n)
        given = {self.dtypes[m] for m in n.all_input_nodes if m in self.dtypes}
        if len(given) < 2 or schema.name not in _PRODUCTS:
            try:
                return super().run_node(n)
            except Exception:
                if not given:
                    raise
        dtype = self._wanted(n, schema)
        args, kwargs = self.fetch_args_kwargs_from_env(n)

        def convert(value: Any) -> Any:
            if isinstance(value, Tensor) and value.is_floating_point():
                return value.to(dtype)
            return _within(value, dtype)

        value = self.call_function(
            n.target, map_aggregate(args, convert), map_aggregate(kwargs, convert)
        )
        self.refused[n] = dtype
        return value

    def _wanted(self, n: fx.Node, schema: Any) -> torch.dtype:
        """What an operator writes has to stay the tensor that it is."""
        for argument, value in zip(schema.arguments, n.args, strict=False):
            written = argument.alias_info is not None and argument.alias_info.is_write
            if written and isinstance(value, fx.Node) and value in self.dtypes:
                return self.dtypes[value]
        return self._precision


def _rewrite(graph: fx.Graph, trial: _Trial) -> None:
    made: dict[tuple[fx.Node, torch.dtype], fx.Node] = {}
    for node in list(graph.nodes):
        if node in trial.refused:
            with graph.inserting_before(node):
                _convert(graph, node, trial, made)
        schema = getattr(node.target, "_schema", None)
        if node.op == "call_function" and (schema is None or schema.is_mutable):
            made.clear()  # of values that may have been written since


def _convert(
    graph: fx.Graph,
    node: fx.Node,
    trial: _Trial,
    made: dict[tuple[fx.Node, torch.dtype], fx.Node],
) -> None:
    """Give ``node`` arguments of one dtype; ``made`` are the conversions that others have."""
    dtype = trial.refused[node]
    mask = _mask(node)

    def converted(value: Any) -> Any:
        if not isinstance(value, fx.Node):
            return _within(value, dtype)
        if trial.dtypes.get(value, dtype) is dtype:
            return value
        if value is mask:
            # float32's least number, for what is masked, would be -inf: NaN where all is
            bounded = graph.call_function(_aten.clamp.default, (value, torch.finfo(dtype).min))
            return _copied(graph, bounded, dtype)
        if (value, dtype) not in made:
            made[value, dtype] = _copied(graph, value, dtype)
        return made[value, dtype]

    node.args = map_aggregate(node.args, converted)
    node.kwargs = map_aggregate(node.kwargs, converted)


def _copied(graph: fx.Graph, value: fx.Node, dtype: torch.dtype) -> fx.Node:
    return graph.call_function(_aten._to_copy.default, (value,), {"dtype": dtype})


def _mask(node: fx.Node) -> Any:
    """What is added to the products of an attention."""
    if node.target is not _aten.scaled_dot_product_attention.default:
        return None
    return node.args[3] if len(node.args) > 3 else node.kwargs.get("attn_mask")


def _within(value: Any, dtype: torch.dtype) -> Any:
    """A number that ``dtype`` can hold: to fill with one that it cannot is refused, -1e9 say."""
    if not isinstance(value, float) or not math.isfinite(value):
        return value
    most = torch.finfo(dtype).max
    return min(max(value, -most), most)
