"""Vetting: what ``torch.export.load`` may be given of an exported program's description.

torch evaluates formulas for dims as Python, imports what the description of an argument's structure
names, looks operators up among all attributes of its modules, and writes Python with the names of
values and weights in it. Each of these texts is held against what exports hold before.
"""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Callable, Mapping
from typing import Any

from blockflow.engine.targets import RefusedProgram, refuse_operator

_LONGEST = 1 << 16

_NAME = re.compile(r"(?:\w+(?:\.\w+)*)?")
"""Of a value: becomes a name in Python."""
_TEXT = re.compile(r"[^\"'\\()=;#\r\n]*")
"""Of a weight, a module, a version: becomes an attribute's name, in quotes."""

_FORMULA = re.compile(r"[A-Za-z0-9_ ,.()'=+\-*/%<>!&|~]*")
_GUARD = re.compile(r"[A-Za-z0-9_ ,.()'\"=+\-*/%<>!&|~\[\]]*")
_SYMBOL = re.compile(r"[A-Za-z][A-Za-z0-9_]*")

_FUNCTIONS = frozenset(
    """
    Abs Add And BitwiseFn_bitwise_and BitwiseFn_bitwise_or CeilDiv CeilToInt CleanDiv Eq Equality
    FloatPow FloatTrueDiv Float FloorDiv FloorToInt Ge GreaterThan Gt Identity IntTrueDiv Integer
    IsNonOverlappingAndDenseIndicator LShift Le LessThan Lt Max Min Mod ModularIndexing Mul Ne Not
    Or Piecewise Pow PowByNatural PythonMod RShift Rational RoundDecimal RoundToInt
    StrictGreaterThan StrictLessThan Symbol ToFloat TruncToFloat TruncToInt Unequality Where
    ceiling false floor int_oo oo true
    """.split()
)
"""What formulas are made of (sympy's ``srepr``), beside symbols of their own."""
_DIM = re.compile(r"[a-z]{1,4}[0-9]+")
_OPERATORS = (ast.operator, ast.unaryop, ast.boolop, ast.cmpop, ast.Load)
_SHAPES = (ast.Expression, ast.BinOp, ast.UnaryOp, ast.BoolOp, ast.Compare, ast.Tuple)
_OF_GUARDS = frozenset("size shape stride storage_offset inf isnan floor ceil trunc".split())
_GUARDED = frozenset(("L", "math", "True", "False", "None", "len", "not", "min", "max"))

_TREES = frozenset(
    ("builtins.tuple", "builtins.list", "builtins.dict", "collections.OrderedDict", None)
)


def vet(description: Any) -> None:
    """Check the JSON record of a program.

    Raises:
        RefusedProgram: something in it is none of what exports hold.
    """
    left = [description]
    while left:
        at = left.pop()
        if isinstance(at, list):
            left.extend(at)
        elif isinstance(at, str):
            _matches(_TEXT, at)
        elif isinstance(at, dict):
            for key, value in at.items():
                _matches(_TEXT, key)
                left.extend(_unchecked(key, value))


def _unchecked(key: str, value: Any) -> list[Any]:
    """What is left to look at of a field. Values have names of the file's own choice: what has the
    name of a field and not its type is looked at like all else."""
    check = _CHECKS.get(key)
    if check is None:
        if key == "metadata" and isinstance(value, dict):  # a node's: text for people
            return [v for v in value.values() if not isinstance(v, str)]
        return [value]
    left = []
    for part in value if isinstance(value, list) else [value]:
        if isinstance(part, str):
            check(part)
        else:
            left.append(part)
    return left


def refuse_formula(text: str) -> None:
    """Raises RefusedProgram: more than arithmetic on symbols and numbers."""
    _parsed(_FORMULA, text, _is_formula)


def _guard(text: str) -> None:
    _parsed(_GUARD, text, _is_guard)


def _parsed(letters: re.Pattern[str], text: str, allows: Callable[[ast.AST], bool]) -> None:
    if len(text) > _LONGEST or not letters.fullmatch(text):
        raise RefusedProgram(f"the formula {text[:80]!r} is more than arithmetic")
    try:
        tree = ast.parse(text.strip(), mode="eval")
    except (SyntaxError, ValueError, RecursionError, MemoryError) as e:
        raise RefusedProgram(f"the formula {text[:80]!r} cannot be read") from e
    names = _names_of_symbols(tree)
    if not all(node in names or allows(node) for node in ast.walk(tree)):
        raise RefusedProgram(f"the formula {text[:80]!r} is more than arithmetic")


def _names_of_symbols(tree: ast.AST) -> set[ast.AST]:
    """The texts in ``Symbol('s0', integer=True)`` and ``Float('0.5', precision=53)``."""
    found: set[ast.AST] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            found.update(
                a
                for a in node.args
                if isinstance(a, ast.Constant)
                and isinstance(a.value, str)
                and (node.func.id == "Symbol" and _SYMBOL.fullmatch(a.value))
            )
            if node.func.id == "Float":
                found.update(a for a in node.args if _is_decimal(a))
    return found


def _is_decimal(node: ast.AST) -> bool:
    text = node.value if isinstance(node, ast.Constant) else None
    return isinstance(text, str) and re.fullmatch(r"-?[0-9.]+(?:e[+-]?[0-9]+)?", text) is not None


def _is_formula(node: ast.AST) -> bool:
    match node:
        case ast.Name():
            return node.id in _FUNCTIONS or bool(_DIM.fullmatch(node.id))
        case ast.Constant():
            return isinstance(node.value, bool | int | float)
        case ast.Call():
            return isinstance(node.func, ast.Name) and node.func.id in _FUNCTIONS
        case ast.keyword():
            return node.arg is not None and isinstance(node.value, ast.Constant)
    return isinstance(node, _OPERATORS + _SHAPES)


def _is_guard(node: ast.AST) -> bool:
    match node:
        case ast.Name():
            return node.id in _GUARDED or node.id in _FUNCTIONS
        case ast.Constant():
            return isinstance(node.value, bool | int | float | str | None)
        case ast.Attribute():
            return node.attr in _OF_GUARDS
        case ast.Call():
            return isinstance(node.func, ast.Name | ast.Attribute) and not node.keywords
    return isinstance(node, (*_OPERATORS, *_SHAPES, ast.Subscript))


def _tree(text: str) -> None:
    """The structure of arguments or results, in JSON with JSON inside."""
    try:
        _, tree = json.loads(text)
        left = [tree]
        while left:
            at = left.pop()
            if at["type"] not in _TREES:
                raise RefusedProgram(f"arguments of type {str(at['type'])[:80]!r}")
            if isinstance(at["context"], str):
                _keys(json.loads(at["context"]))
            elif at["context"] is not None:
                raise RefusedProgram("arguments with a context of their own")
            left.extend(at["children_spec"])
    except (TypeError, KeyError, ValueError, RecursionError) as e:
        if isinstance(e, RefusedProgram):
            raise
        raise RefusedProgram(f"the structure {text[:80]!r} cannot be read") from e


def _keys(context: Any) -> None:
    """The keys of a dict; nothing for the others. An object in it would be imported."""
    for key in () if context is None else context:
        if not isinstance(key, str | int):
            raise RefusedProgram("keys of arguments that are neither text nor numbers")
        _matches(_NAME, str(key))


def _matches(pattern: re.Pattern[str], text: str) -> None:
    if len(text) > _LONGEST or not pattern.fullmatch(text):
        raise RefusedProgram(f"{text[:80]!r} is no name that an export writes")


def _name(text: str) -> None:
    _matches(_NAME, text)


def _said(_text: str) -> None:
    """Text that is an argument: a mode, or what an error shall say."""


def _no_function(text: str) -> None:
    raise RefusedProgram(f"the function {text[:80]!r} as an argument")


_CHECKS: Mapping[str, Callable[[str], None]] = {
    "expr_str": refuse_formula,
    "guards_code": _guard,
    "target": refuse_operator,
    "as_operator": _no_function,
    "in_spec": _tree,
    "out_spec": _tree,
    "name": _name,
    "as_name": _name,
    "as_string": _said,
    "as_strings": _said,
}
