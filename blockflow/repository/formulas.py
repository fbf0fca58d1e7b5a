"""Formulas: the dims of a block's output as torch.export derives them of its input's.

It follows sizes through the forward in symbols, so that what convolutions, poolings and slices
leave of a length is known for every length, and not for those alone that were tried.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from blockflow.core.dims import Dim, names_in
from blockflow.core.errors import ExportError
from blockflow.core.model import ROWS, TensorSpec
from blockflow.repository.artifact import export_program
from blockflow.repository.causes import cause, reason

_DIVISIONS = ("FloorDiv", "CleanDiv")
_REMAINDERS = ("Mod", "PythonMod")
_CHOICES: Mapping[str, str] = {"Max": "max", "Min": "min"}
_ROUNDINGS = ("FloorToInt", "TruncToInt")
_HIGHEST_POWER = 8
_LARGEST_TERM = 1024
"""Of a fraction that a factor is: 0.1 is none of so few digits."""


class _Unwritten(ValueError):
    """torch's expression has no form as a formula."""


def output_dims(stage: nn.Module, spec: TensorSpec, example: Tensor, where: str) -> Sequence[Dim]:
    """The dims of what ``stage`` gives, in the names of ``spec``.

    Args:
        stage: in eval mode, one tensor in, one out.
        spec: its input contract.
        example: an input with at least 2 rows.
        where: the block, for errors.

    Raises:
        ExportError: NOT_SPLITTABLE: torch.export refuses the stage, or derives what is no formula.
    """
    try:
        with torch.no_grad():
            program = export_program(stage, spec, example)
        *_, source = (n for n in program.graph.nodes if n.op == "placeholder")
        (result,) = program.graph.output_node().args[0]
        names = {
            str(size.node.expr): name
            for size, name in zip(source.meta["val"].shape, spec.dims, strict=True)
            if isinstance(size, torch.SymInt) and isinstance(name, str)
        }
        return [
            _dim(size.node.expr, names) if isinstance(size, torch.SymInt) else int(size)
            for size in result.meta["val"].shape
        ]
    except Exception as e:  # whatever torch raises, and sizes that only values decide
        said = reason(e) if isinstance(e, _Unwritten) else f"{type(e).__name__}: {reason(e)}"
        raise ExportError(
            "NOT_SPLITTABLE",
            f"the dims of its output cannot be derived of its input's: {said}",
            where=where,
            hint=cause(e, spec)
            or "an output dim is a number, a dim of the input, or what + - * // make of such; "
            "fix the dim (--input), or cut elsewhere",
        ) from e


def as_input(given: TensorSpec) -> TensorSpec:
    """What the next block takes where this is given: each formula becomes a dim of its own, called
    after the first one in it, with a number: ``length2``."""
    named: dict[Dim, str] = {}
    ranges: dict[str, tuple[int, int]] = {}
    dims: list[Dim] = []
    taken = set(given.dynamic)
    for dim in given.dims:
        if isinstance(dim, int):
            dims.append(dim)
            continue
        if dim not in named:
            name, *_ = names_in(dim)
            if dim != name:
                name = _another(name, taken)
                taken.add(name)
            named[dim] = name
            if all(n in given.ranges for n in names_in(dim) if n != given.dims[0]):
                ranges[name] = given.bounds(dim)
        dims.append(named[dim])
    if ROWS not in given.ranges:
        del ranges[ROWS]
    return TensorSpec(given.dtype, tuple(dims), ranges)


def _another(name: str, taken: set[str]) -> str:
    stem = name.rstrip("0123456789")
    number = int(name[len(stem) :] or 1) + 1
    while f"{stem}{number}" in taken:
        number += 1
    return f"{stem}{number}"


def _dim(expr: Any, names: Mapping[str, str]) -> Dim:
    text = _text(expr, names)
    try:
        return int(text)
    except ValueError:
        return ast.unparse(ast.parse(text, mode="eval"))


def _text(expr: Any, names: Mapping[str, str]) -> str:
    """One of sympy's expressions in Python's notation."""
    kind = type(expr).__name__
    if expr.is_Integer:
        return str(int(expr))
    if expr.is_Symbol and str(expr) in names:
        return names[str(expr)]
    if expr.is_Add:
        parts = sorted(expr.args, key=lambda a: bool(a.is_Integer))  # numbers last
        plus = [_text(a, names) for a in parts if not a.could_extract_minus_sign()]
        minus = [_text(-a, names) for a in parts if a.could_extract_minus_sign()]
        return f"({' + '.join(plus or ['0'])}{''.join(f' - {m}' for m in minus)})"
    if expr.is_Mul:
        if expr.could_extract_minus_sign():
            return f"(-{_text(-expr, names)})"
        factors = sorted((_text(a, names) for a in expr.args), key=lambda t: (not t.isdigit(), t))
        return f"({' * '.join(factors)})"
    if expr.is_Pow and expr.args[1].is_Integer and 0 < expr.args[1] <= _HIGHEST_POWER:
        return f"({' * '.join([_text(expr.args[0], names)] * int(expr.args[1]))})"
    if kind in _DIVISIONS or kind in _REMAINDERS:
        a, b = (_text(arg, names) for arg in expr.args)
        return f"({a} {'//' if kind in _DIVISIONS else '%'} {b})"
    if kind in _CHOICES:
        first, *others = (_text(arg, names) for arg in expr.args)
        for other in others:
            first = f"{_CHOICES[kind]}({first}, {other})"
        return first
    if kind in _ROUNDINGS and (scaled := _scaled(expr.args[0], names)):
        return scaled
    shown = re.sub(r"\w+", lambda word: names.get(word[0], word[0]), str(expr))
    raise _Unwritten(f"{shown} is no formula of + - * // % min max")


def _scaled(expr: Any, names: Mapping[str, str]) -> str | None:
    """A size that is multiplied by a number of few digits (an interpolation's 1.5), and rounded
    down: in float64 it is what it would be in fractions."""
    if not expr.is_Mul or not expr.args[0].is_Float:
        return None
    factor, *sizes = expr.args
    above, below = float(factor).as_integer_ratio()
    few = 0 < above <= _LARGEST_TERM >= below
    if not few or [type(s).__name__ for s in sizes] != ["ToFloat"]:
        return None
    (size,) = sizes[0].args
    return f"({above} * {_text(size, names)} // {below})" if size.is_nonnegative else None
