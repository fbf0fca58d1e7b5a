"""Trace: a model's graph of calls of submodules, by torch.fx."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any, get_origin, get_type_hints

import torch
from torch import Tensor, fx, nn
from torch.utils._pytree import tree_leaves

from blockflow.core.errors import ExportError
from blockflow.core.text import a_kind
from blockflow.repository.record import record
from blockflow.repository.traced import Traced, Untraced, first_line

_PLAIN = (type(None), int, float, complex, str, bytes)
"""What a result may consist of in which there is no tensor."""


_WRAP = (
    "wrap the model: a forward that takes one tensor, hands on parts of it "
    "(x[:, :8], x[:, 8:].long().clamp(0, 99)), and sets what is always the same"
)


class _Tracer(fx.Tracer):
    """Opens only the modules whose inside must be seen."""

    def __init__(self, opened: frozenset[str]) -> None:
        super().__init__()
        self._opened = opened
        self._autocast = torch.is_autocast_enabled("cpu")
        self._attributes: dict[tuple[fx.Node, str], fx.Node] = {}

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return module_qualified_name not in self._opened

    def call_module(self, m: nn.Module, forward: Any, args: Any, kwargs: Any) -> Any:
        for given in tree_leaves((args, kwargs)):
            if isinstance(given, fx.proxy.Attribute):
                # made when it is first asked for: here, not within who takes it; and once for all
                of = given.root.node, given.attr
                given._node = self._attributes[of] = self._attributes.get(of) or given.node
        return super().call_module(m, forward, args, kwargs)

    def create_proxy(self, *args: Any, **kwargs: Any) -> Any:
        if torch.is_autocast_enabled("cpu") is not self._autocast:
            raise ExportError(
                "NOT_SPLITTABLE",
                "the forward computes under torch.autocast, which belongs to no submodule",
                where=type(self.root).__name__,
                hint="with pt2, the default format, cut before or after what is under it; else use "
                "it inside of submodules that are not cut",
            )
        return super().create_proxy(*args, **kwargs)


def refuse_open_forward(module: nn.Module, where: str) -> None:
    """Raises ExportError: NOT_SPLITTABLE when ``forward(*xs)`` leaves open how many tensors go in:
    neither a cut nor torch.export finds its one input then."""
    try:
        parameters = inspect.signature(module.forward).parameters.values()
    except (TypeError, ValueError):  # a compiled method, which no Python describes
        return
    for parameter in parameters:
        if parameter.kind is parameter.VAR_POSITIONAL:
            raise ExportError(
                "NOT_SPLITTABLE",
                f"forward takes any number of inputs (*{parameter.name}); a block takes one",
                where=where,
                hint="give the forward one parameter with a name, or wrap the model",
            )
        if parameter.kind is not parameter.VAR_KEYWORD:
            return


def refuse_more_inputs(module: nn.Module, where: str) -> None:
    """Raises ExportError: NOT_SPLITTABLE when ``forward`` has to be given more than one input, one
    by its name, or several in a list or dict."""
    try:
        parameters = inspect.signature(module.forward).parameters.values()
    except (TypeError, ValueError):  # a compiled method, which no Python describes
        return
    open_ended = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    required = [p for p in parameters if p.default is p.empty and p.kind not in open_ended]
    names = ", ".join(p.name for p in required)
    if len(required) > 1:
        why = f"forward takes {len(required)} inputs ({names}); a block takes one"
        hint = _WRAP
    elif several := _several(module, required):
        why = (
            f"forward takes its inputs in one {several.__name__} ({names}); a block takes a tensor"
        )
        hint = _WRAP
    elif parameters and all(p.kind is p.VAR_KEYWORD for p in parameters):
        names = ", ".join(p.name for p in parameters)
        why = f"forward takes its inputs by name alone (**{names}); a block takes a tensor"
        hint = _WRAP
    elif required and required[0].kind is inspect.Parameter.KEYWORD_ONLY:
        why = f"forward takes its input by name alone ({names}); a block gives it without"
        hint = f"wrap the model: a forward that takes x and calls it with {names}=x"
    else:
        return
    raise ExportError("NOT_SPLITTABLE", why, where=where, hint=hint)


def _several(module: nn.Module, required: Sequence[inspect.Parameter]) -> type | None:
    """The kind of list or dict that the one input is said to be."""
    kind: Any = None
    with suppress(Exception):  # names that are not known there
        kind = get_type_hints(module.forward)[required[0].name]
    kind = get_origin(kind) or kind
    several = isinstance(kind, type) and issubclass(kind, Mapping | Sequence)
    return kind if several and not issubclass(kind, str) else None


def refuse_result(result: object, code: str, where: str) -> None:
    """Raises ExportError, of ``code``, when a model has returned anything but one tensor."""
    if isinstance(result, Tensor):
        return
    kind = "None" if result is None else a_kind(result)
    kind = kind.replace("an immutable_", "a ")  # fx's own dict and list
    plain = all(isinstance(x, _PLAIN) or _is_numpys(x) for x in tree_leaves(result))
    raise ExportError(
        code,
        f"the model returns {kind}, not one tensor",
        where=where,
        hint="let its forward return a tensor with a row for each row of the input, made by torch "
        "operations (no float(), item(), tolist() or numpy())"
        if plain
        else "name each head as a block of its own (--block name=submodule)",
    )


def _is_numpys(value: object) -> bool:
    return type(value).__module__ == "numpy"


def trace(
    model: nn.Module, opened: frozenset[str], examples: Sequence[Tensor], several: bool = False
) -> Traced:
    """Trace ``model`` with the modules of ``opened`` laid open and run it on the examples.

    Raises:
        ExportError: NOT_SPLITTABLE when the forward cannot be traced, takes more than one input,
            or returns anything but one tensor (with ``several``, whatever it returns).
    """
    where = type(model).__name__
    refuse_open_forward(model, where)
    if model._forward_hooks or model._forward_pre_hooks:
        raise Untraced(
            "NOT_SPLITTABLE",
            "the model itself has hooks, which belong to no submodule",
            where=where,
            hint="do in its forward what they do; pt2, the default format, follows them",
        )
    try:
        parameters = list(inspect.signature(model.forward).parameters.values())
        optional = {
            p.name: p.default
            for p in parameters[1:]
            if p.default is not p.empty and p.kind is not p.VAR_KEYWORD
        }
        refuse_more_inputs(model, where)
        taken = parameters[0].name if parameters else ""
        graph = _Tracer(opened).trace(model, concrete_args=optional or None)
        for node in list(graph.nodes):
            # concrete arguments stay behind as placeholders without users
            if node.op == "placeholder" and not node.users and node.name != taken:
                graph.erase_node(node)
        traced = record(fx.GraphModule(model, graph), examples)
    except ExportError:
        raise
    except Exception as e:
        raise Untraced(
            "NOT_SPLITTABLE",
            f"the forward cannot be traced: {type(e).__name__}: {first_line(e)}",
            where=where,
            hint="control flow that looks at tensors must lie inside a submodule that is not cut; "
            "pt2, the default format, follows what looks at their sizes only",
        ) from e
    if not several:
        refuse_result(traced.values[0][traced.nodes[-1]], "NOT_SPLITTABLE", where)
    return traced
