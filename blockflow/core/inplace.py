"""Inplace: whether a block's graph may write into the block's input, or into its own state.

The input is a view of a slot, which others read; the state is that of all runs, also of those that
go on beside this one. A run shows what a block does with one input, and a
branch by a value may go another way for the next; so the graph is asked, of TorchScript's or of
torch.export's kind, by its own methods. Two rules:

* a result may lie in what the operator was given, unless the operator always makes a new tensor
  (:data:`MAKES_NEW`). torch's own alias analysis believes the schemas instead, and some do not say
  so: ``einsum`` and ``atleast_1d`` return their input now and then.
* an operator writes what its schema marks as written; who has no schema may write anything.

Wrong in one direction only: a block may get a copy that it did not need.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from types import BuiltinFunctionType, FunctionType
from typing import Any

MAKES_NEW = frozenset(
    "aten::" + name
    for name in """
    conv1d conv2d conv3d convolution _convolution conv_transpose1d conv_transpose2d conv_transpose3d
    linear addmm addmv mm bmm mv baddbmm matmul embedding scaled_dot_product_attention
    batch_norm layer_norm group_norm instance_norm rms_norm native_layer_norm
    max_pool2d max_pool3d avg_pool1d avg_pool2d avg_pool3d adaptive_avg_pool2d adaptive_avg_pool3d
    upsample_nearest1d upsample_nearest2d upsample_linear1d upsample_bilinear2d upsample_bicubic2d
    relu relu6 gelu silu mish elu leaky_relu prelu hardtanh hardswish hardsigmoid softplus threshold
    sigmoid tanh softmax log_softmax exp log sqrt rsqrt sin cos erf abs neg floor round reciprocal
    add sub rsub mul div pow square clamp clamp_min clamp_max maximum minimum where masked_fill
    eq ne lt le gt ge logical_not logical_and logical_or isnan
    sum mean var amax amin argmax argmin any all cumsum
    cat stack gather index_select clone _to_copy
    zeros ones full empty zeros_like ones_like full_like empty_like arange
    new_zeros new_ones new_full new_empty
    """.split()
)
"""Operators whose result shares no memory with anything, whatever their arguments are."""

_KEEPS_STATISTICS = frozenset({"aten::batch_norm", "aten::instance_norm"})
"""They write their running statistics, arguments 3 and 4, and their schemas do not say so."""

_PASSES_ON = frozenset(
    "prim::" + name
    for name in """
    ListConstruct ListUnpack TupleConstruct TupleUnpack TupleIndex TupleSlice DictConstruct
    unchecked_cast unchecked_unwrap_optional RaiseException Print
    """.split()
)
"""TorchScript's own nodes, without a schema, that only hold or hand on what they are given."""

_NO_SCHEMA = "(no schema)"
_NO_TENSORS = frozenset(
    """
    IntType FloatType BoolType StringType NoneType NumberType ComplexType SymIntType SymFloatType
    SymBoolType DeviceObjType ScalarTypeType LayoutType MemoryFormatType GeneratorType
    """.split()
)


# --- torch.export ---------------------------------------------------------------------------------


def exported_may_write(module: Any, source: str = "") -> bool:
    """Ask the graph of an exported program.

    Args:
        module: ``torch.fx.GraphModule``.
        source: name of the placeholder that the input is; '': all are.
    """
    return _writes_into(module, lambda node: node.op == "placeholder" and source in ("", node.name))


def exported_may_keep(module: Any) -> bool:
    """Whether a run of an exported program may write into what the module keeps, its weights and
    buffers: :class:`torch.fx.GraphModule`, asked as above."""
    return _writes_into(module, lambda node: node.op == "get_attr")


def _writes_into(module: Any, begins: Callable[[Any], bool]) -> bool:
    """Whether an operator may write what lies in the memory of a node that ``begins``."""
    reached: set[Any] = set()
    for node in module.graph.nodes:
        if node.op in ("placeholder", "get_attr"):
            if begins(node):
                reached.add(node)
        elif node.op != "output" and not reached.isdisjoint(node.all_input_nodes):
            if node.op != "call_function":
                return True
            schema = getattr(node.target, "_schema", None)
            if schema is None:
                if _is_opaque(module, node):
                    return True
                reached.add(node)
                continue
            written = list(written_nodes(node, schema))
            if not reached.isdisjoint(written):
                return True
            if not written and not makes_new(schema):
                reached.add(node)
    return False


def makes_new(schema: Any) -> bool:
    """Whether what an operator gives shares no memory with what it takes. A size is no memory."""
    gives_tensors = any("Tensor" in str(given.type) for given in schema.returns)
    return schema.name in MAKES_NEW or not gives_tensors


def written_nodes(node: Any, schema: Any) -> Iterator[Any]:
    """The values that an operator writes, by its schema."""
    for i, argument in enumerate(schema.arguments):
        marked = argument.alias_info is not None and argument.alias_info.is_write
        if marked or (schema.name in _KEEPS_STATISTICS and i in (3, 4)):
            value = node.args[i] if i < len(node.args) else node.kwargs.get(argument.name)
            yield from value if isinstance(value, list | tuple) else (value,)


def _is_opaque(module: Any, node: Any) -> bool:
    """Whether a call without a schema may write. Functions of Python only take things apart and
    calculate with sizes. The others run graphs: a branch, a loop."""
    if isinstance(node.target, FunctionType | BuiltinFunctionType):
        return False
    graphs = [
        getattr(module, n.target)
        for n in node.all_input_nodes
        if n.op == "get_attr" and hasattr(getattr(module, n.target, None), "graph")
    ]
    return not graphs or any(map(_writes_anything, graphs))


def _writes_anything(module: Any) -> bool:
    for node in module.graph.nodes:
        if node.op in ("call_method", "call_module"):
            return True
        if node.op != "call_function":
            continue
        schema = getattr(node.target, "_schema", None)
        if schema.is_mutable if schema is not None else _is_opaque(module, node):
            return True
    return False


# --- TorchScript ----------------------------------------------------------------------------------


def script_may_write(graph: Any) -> bool:
    """Ask a TorchScript graph.

    Args:
        graph: with all calls inlined, that takes the module and one tensor.
    """
    walk = _ScriptWalk(list(graph.inputs())[1:])
    while True:  # until a loop's later rounds find nothing new
        known = len(walk.reached)
        if walk.writes(graph):
            return True
        if len(walk.reached) == known:
            return False


class _ScriptWalk:
    """``reached``: names of the values that may lie in the input's memory, or hold such a one."""

    def __init__(self, sources: Iterable[Any]) -> None:
        self.reached = {v.debugName() for v in sources}

    def writes(self, block: Any) -> bool:
        """Whether a node of the block writes what is reached; notes what is reached by it."""
        return any(self._node(node) for node in block.nodes())

    def _node(self, node: Any) -> bool:
        blocks, inputs, outputs = list(node.blocks()), list(node.inputs()), list(node.outputs())
        kind = node.kind()
        if kind == "prim::If":
            wrote = any(self.writes(block) for block in blocks)
            for block in blocks:
                self._hand_on(block.outputs(), outputs)
            return wrote
        if kind == "prim::Loop":
            (body,) = blocks
            inside = list(body.inputs())[1:]  # the first is the count
            self._hand_on(inputs[2:], inside)  # after the most rounds and the condition
            wrote = self.writes(body)
            again = list(body.outputs())[1:]
            for values in (inside, outputs):
                self._hand_on(again, values)
            self._hand_on(inputs[2:], outputs)
            return wrote
        if not any(map(self._is_reached, inputs)):
            return bool(blocks)
        if kind in _PASSES_ON:
            self._reach(outputs)
            return False
        schema = str(node.schema())
        if blocks or schema == _NO_SCHEMA:
            return True
        written = _written(kind, schema, inputs)
        # what another container is given may be taken out of it again, under any name
        if any(self._is_reached(v) or v.type().kind() != "TensorType" for v in written):
            return True
        new = kind in MAKES_NEW and all(v.type().kind() == "TensorType" for v in outputs)
        if not written and not new:
            self._reach(outputs)
        return False

    def _is_reached(self, value: Any) -> bool:
        return value.debugName() in self.reached

    def _reach(self, values: Iterable[Any]) -> None:
        self.reached.update(v.debugName() for v in values if _holds_tensors(v.type()))

    def _hand_on(self, values: Iterable[Any], names: Iterable[Any]) -> None:
        self._reach(n for v, n in zip(values, names, strict=True) if self._is_reached(v))


def _written(kind: str, schema: str, inputs: Sequence[Any]) -> list[Any]:
    """The values that an operator writes, by its schema: ``aten::relu_(Tensor(a!) self)``."""
    marked = [part for part in _arguments(schema) if part != "*"]
    keeps = (3, 4) if kind in _KEEPS_STATISTICS else ()
    pairs = enumerate(zip(inputs, marked, strict=False))  # "..." stands for any number
    return [value for i, (value, text) in pairs if "!" in text.split("=")[0] or i in keeps]


def _arguments(schema: str) -> list[str]:
    """The arguments of a schema, each as it stands there."""
    parts, depth, start = [], 0, schema.index("(") + 1
    for at in range(start, len(schema)):
        sign = schema[at]
        if sign in "([":
            depth += 1
        elif depth and sign in ")]":
            depth -= 1
        elif not depth and sign in ",)":
            parts.append(schema[start:at].strip())
            start = at + 1
            if sign == ")":
                break
    return parts


def _holds_tensors(kind: Any) -> bool:
    while kind.kind() in ("ListType", "OptionalType"):
        kind = kind.getElementType()
    return kind.kind() not in _NO_TENSORS
