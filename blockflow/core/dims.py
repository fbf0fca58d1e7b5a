"""Dims: what an extent of a tensor is: a number, the name of a dynamic dim, or, of what a block
gives, a formula of its input's dynamic dims (``(length - 5)//4``: what a convolution leaves). Pure.

A formula is of whole numbers, names, ``+``, ``-``, ``*``, ``//``, ``%``, ``min`` and ``max``, in
Python's own notation and meaning: ``//`` rounds down.
"""

from __future__ import annotations

import ast
import keyword
from collections.abc import Callable, Iterator, Mapping
from functools import lru_cache
from typing import TypeGuard

Dim = int | str
"""A fixed extent, the name of a dynamic one ("rows", "length"), or a formula of such names."""

Bounds = tuple[int, int]

_LONGEST = 1024
_MOST_NODES = 256
_DEEPEST = 64
_SHOWN = 80

_OPERATORS: Mapping[type[ast.operator], Callable[[int, int], int]] = {
    ast.Add: lambda a, b: a + b,
    ast.Sub: lambda a, b: a - b,
    ast.Mult: lambda a, b: a * b,
    ast.FloorDiv: lambda a, b: a // b,
    ast.Mod: lambda a, b: a % b,
}
_FUNCTIONS: Mapping[str, Callable[[int, int], int]] = {"min": min, "max": max}


def is_name(dim: Dim) -> TypeGuard[str]:
    """Whether a dim is a dynamic one's name, and no formula: Python's own words (``class``) could
    stand in none."""
    return (
        isinstance(dim, str) and dim.isidentifier() and dim.isascii() and not keyword.iskeyword(dim)
    )


def is_formula(dim: Dim) -> TypeGuard[str]:
    """Whether a dim is computed of others."""
    return isinstance(dim, str) and not is_name(dim)


def names_in(dim: Dim) -> tuple[str, ...]:
    """The dynamic dims of which a dim is made, in order of appearance.

    Raises:
        ValueError: it is no formula.
    """
    if isinstance(dim, int):
        return ()
    return (dim,) if is_name(dim) else _parsed(dim)[1]


def size_of(dim: Dim, binding: Mapping[str, int]) -> int:
    """A dim's extent under a binding of all names in it.

    Raises:
        ValueError: it divides by zero there, or is no formula.
    """
    if isinstance(dim, int):
        return dim
    if is_name(dim):
        return binding[dim]
    try:
        return _value(_parsed(dim)[0], binding)
    except ZeroDivisionError:
        raise ValueError(f"{dim} divides by zero") from None


def bounds_of(dim: Dim, ranges: Mapping[str, Bounds]) -> Bounds:
    """Smallest and largest extent where every name in it stays in its range: exact where each name
    stands once, else perhaps wider (interval arithmetic takes two places for two numbers).

    Raises:
        ValueError: it may divide by zero, or is no formula.
    """
    if isinstance(dim, int):
        return dim, dim
    if is_name(dim):
        return ranges[dim]
    return _bounds(_parsed(dim)[0], ranges)


def substituted(dim: Dim, by: Mapping[str, Dim]) -> Dim:
    """``dim`` with what its names stand for: of ``n//2`` and n = ``(length - 5)//4`` it is
    ``(length - 5) // 8``.

    Raises:
        ValueError: it is no formula, or becomes too long for one.
    """
    if isinstance(dim, int):
        return dim
    if is_name(dim):
        return by[dim]
    put: dict[str, ast.expr] = {}
    for name in names_in(dim):
        other = by[name]
        put[name] = (
            _integer(other)
            if isinstance(other, int)
            else ast.Name(other)
            if is_name(other)
            else _parsed(other)[0]
        )
    text = ast.unparse(_put(_parsed(dim)[0], put))
    try:
        return int(text)
    except ValueError:
        names_in(text)
        return text


def _put(node: ast.expr, by: Mapping[str, ast.expr]) -> ast.expr:
    """A formula with others for its names; numbers are put together where that is plain."""
    match node:
        case ast.Name(id=name):
            return by[name]
        case ast.UnaryOp(op=op, operand=inner):
            done = _put(inner, by)
            number = _number(done)
            return ast.UnaryOp(op, done) if number is None else _integer(-number)
        case ast.BinOp(left=left, op=op, right=right):
            return _joined(op, _put(left, by), _put(right, by))
        case ast.Call(func=func, args=args):
            return ast.Call(func, [_put(a, by) for a in args], [])
    return node


def _joined(op: ast.operator, left: ast.expr, right: ast.expr) -> ast.expr:
    """``left op right``, shorter where it can be."""
    b = _number(right)
    if b is None:
        return ast.BinOp(left, op, right)
    if (a := _number(left)) is not None and (b or not isinstance(op, ast.FloorDiv | ast.Mod)):
        return _integer(_OPERATORS[type(op)](a, b))
    match op, left:
        case ast.Add() | ast.Sub(), _ if b == 0:
            return left
        case ast.Add() | ast.Sub(), ast.BinOp(left=inner, op=ast.Add() | ast.Sub() as way) if (
            k := _number(left.right)
        ) is not None:
            total = (k if isinstance(way, ast.Add) else -k) + (b if isinstance(op, ast.Add) else -b)
            return _joined(ast.Add() if total >= 0 else ast.Sub(), inner, _integer(abs(total)))
        case ast.FloorDiv(), ast.BinOp(left=inner, op=ast.FloorDiv()) if (
            b > 0 and (c := _number(left.right) or 0) > 0
        ):
            return _joined(op, inner, _integer(b * c))
        case (
            ast.FloorDiv(),
            ast.BinOp(left=ast.BinOp(left=inner, op=ast.FloorDiv()) as part, op=way),
        ) if (
            isinstance(way, ast.Add | ast.Sub)
            and b > 0
            and (k := _number(left.right)) is not None
            and (c := _number(part.right) or 0) > 0
        ):
            return _joined(op, _joined(way, inner, _integer(k * c)), _integer(b * c))
    return ast.BinOp(left, op, right)


def _integer(value: int) -> ast.expr:
    return ast.Constant(value) if value >= 0 else ast.UnaryOp(ast.USub(), ast.Constant(-value))


def _number(node: ast.expr) -> int | None:
    match node:
        case ast.Constant(value=int() as value):
            return value
        case ast.UnaryOp(op=ast.USub(), operand=ast.Constant(value=int() as value)):
            return -value
    return None


@lru_cache(maxsize=1024)
def _parsed(text: str) -> tuple[ast.expr, tuple[str, ...]]:
    wrong = ValueError(
        f"{text[:_SHOWN]!r} is no dim: a number, a name (but no keyword of Python), or a "
        "formula of names and whole numbers with + - * // % min max"
    )
    if len(text) > _LONGEST or not text.isascii():
        raise wrong
    try:
        tree = ast.parse(text, mode="eval").body
    except (SyntaxError, ValueError, MemoryError, RecursionError):
        raise wrong from None
    nodes = list(_walk(tree))
    if None in nodes or len(nodes) > _MOST_NODES:
        raise wrong
    names = tuple(dict.fromkeys(n.id for n in nodes if isinstance(n, ast.Name)))
    if not names:
        raise wrong
    return tree, names


def _walk(node: ast.expr, depth: int = 0) -> Iterator[ast.expr | None]:
    """All that a formula consists of, left to right; None where it is more than a formula."""
    if depth > _DEEPEST:
        yield None
        return
    yield node
    match node:
        case ast.Name():
            pass
        case ast.Constant(value=int() as value) if not isinstance(value, bool):
            pass
        case ast.UnaryOp(op=ast.USub(), operand=inner):
            yield from _walk(inner, depth + 1)
        case ast.BinOp(left=left, op=op, right=right) if type(op) in _OPERATORS:
            yield from _walk(left, depth + 1)
            yield from _walk(right, depth + 1)
        case ast.Call(func=ast.Name(id=name), args=[left, right], keywords=[]) if (
            name in _FUNCTIONS
        ):
            yield from _walk(left, depth + 1)
            yield from _walk(right, depth + 1)
        case _:
            yield None


def _value(node: ast.expr, binding: Mapping[str, int]) -> int:
    match node:
        case ast.Name(id=name):
            return binding[name]
        case ast.Constant(value=int() as value):
            return value
        case ast.UnaryOp(operand=inner):
            return -_value(inner, binding)
        case ast.BinOp(left=left, op=op, right=right):
            return _OPERATORS[type(op)](_value(left, binding), _value(right, binding))
        case ast.Call(func=ast.Name(id=name), args=[left, right]):
            return _FUNCTIONS[name](_value(left, binding), _value(right, binding))
    raise ValueError(f"{ast.unparse(node)} is no part of a formula")


def _bounds(node: ast.expr, ranges: Mapping[str, Bounds]) -> Bounds:
    match node:
        case ast.Name(id=name):
            return ranges[name]
        case ast.Constant(value=int() as value):
            return value, value
        case ast.UnaryOp(operand=inner):
            lo, hi = _bounds(inner, ranges)
            return -hi, -lo
        case ast.BinOp(left=left, op=op, right=right):
            (a, b), (c, d) = _bounds(left, ranges), _bounds(right, ranges)
            if isinstance(op, ast.FloorDiv | ast.Mod) and c <= 0:
                raise ValueError(f"{ast.unparse(node)} may divide by zero or less")
            if isinstance(op, ast.Mod):
                return (a, b) if a >= 0 and b < c else (0, d - 1)
            apply = _OPERATORS[type(op)]
            ends = [apply(x, y) for x in (a, b) for y in (c, d)]
            return min(ends), max(ends)
        case ast.Call(func=ast.Name(id=name), args=[left, right]):
            (a, b), (c, d) = _bounds(left, ranges), _bounds(right, ranges)
            return _FUNCTIONS[name](a, c), _FUNCTIONS[name](b, d)
    raise ValueError(f"{ast.unparse(node)} is no part of a formula")
