"""Targets: the operators that an exported program may call.

A program is data as long as what it calls only computes. That is read from an operator's schema: it
takes and gives tensors, numbers and devices, and its only texts are names of modes. What else is
among torch's operators reads and writes files (``aten.from_file``, TorchScript's ``aten.save``),
prints, or takes objects.
"""

from __future__ import annotations

import math
import operator
import re
from collections.abc import Callable, Mapping
from typing import Any

import torch


class UnknownProgram(Exception):
    """The archive holds something that the reader of :mod:`blockflow.engine.program` does not
    know; its text says what."""


class RefusedProgram(ValueError):
    """The archive could do more than compute; its text says by what."""


class PickledProgram(RefusedProgram):
    """Loading the archive would unpickle objects, which can run any code."""


SCALAR_OPS: Mapping[str, Callable[..., Any]] = {
    **{
        f"_operator.{name}": getattr(operator, name)
        for name in "eq ne le ge lt gt neg pos mul add sub floordiv mod pow truediv".split()
    },
    "math.trunc": math.trunc,
    "torch.sym_not": torch.sym_not,
    "torch.sym_int": torch.sym_int,
    "torch.sym_float": torch.sym_float,
    "torch.sym_ite": torch.sym_ite,
    "torch.sym_max": torch.sym_max,
    "torch.sym_min": torch.sym_min,
}
"""Arithmetic on dims: the only targets of the reader that are no aten operators."""

_MORE_SCALAR_OPS = re.compile(
    r"_operator\.(?:and_|or_|xor|not_|lshift|rshift|abs|getitem)|math\.(?:floor|ceil)"
    r"|torch\.sym_\w+|torch\._sym_\w+"
)
_NAMESPACES = frozenset("aten prims quantized sparse mkl mkldnn onednn".split())
_HIGHER_ORDER = frozenset(
    "cond while_loop map map_impl scan associative_scan wrap_with_set_grad_enabled"
    " wrap_with_autocast".split()
)
"""Operators on graphs that lie in the archive as well. Others of that kind call functions, kernels
or objects."""

_TYPE = re.compile(
    r"(?:(?:Optional|List)\[)*(?:Tensor|int|bool|float|number|complex|Device|Generator|(str))\]*"
)
_MODES = frozenset(
    """
    activation approximate assert_msg driver equation indexing interpolation mode norm ord p
    pad_mode padding padding_side reduce rounding_mode side UPLO
    """.split()
)
"""Arguments of type ``str`` that name one of several ways to compute, or what an error shall say.
"""


def operator_of(name: str) -> Callable[..., Any]:
    """The operator of that name; nothing but aten's and arithmetic is looked up.

    Raises:
        UnknownProgram: it is another.
        RefusedProgram: it may do more than compute.
    """
    if name in SCALAR_OPS:
        return SCALAR_OPS[name]
    if not name.startswith("torch.ops.aten."):
        raise UnknownProgram(f"operator {name!r}")
    return _overload(name)


def refuse_operator(name: str) -> None:
    """Raises RefusedProgram: ``torch.export.load`` shall not look for this operator.

    It would take any attribute of torch's modules for one, ``torch.os.system`` too.
    """
    if name in SCALAR_OPS or _MORE_SCALAR_OPS.fullmatch(name):
        return
    parts = name.split(".")
    if parts[:3] == ["torch", "ops", "higher_order"] and parts[3:] and parts[3] in _HIGHER_ORDER:
        if len(parts) == 4:
            return
    elif len(parts) == 5 and parts[:2] == ["torch", "ops"] and parts[2] in _NAMESPACES:
        try:
            _overload(name)
            return
        except (AttributeError, UnknownProgram) as e:
            raise RefusedProgram(f"operator {name[:80]!r} is not known") from e
    raise RefusedProgram(f"operator {name[:80]!r} is none of those that only compute")


def _overload(name: str) -> torch._ops.OpOverload:
    parts = name.split(".")
    if len(parts) != 5:
        raise UnknownProgram(f"operator {name!r}")
    found = getattr(getattr(getattr(torch.ops, parts[2]), parts[3]), parts[4])
    if not isinstance(found, torch._ops.OpOverload):
        raise UnknownProgram(f"operator {name!r}")
    if not computes(found):
        raise RefusedProgram(f"operator {name!r} is none of those that only compute")
    return found


def computes(found: torch._ops.OpOverload) -> bool:
    """Whether an operator takes and gives values only, by its schema."""
    schema = found._schema
    full = f"{schema.name}.{schema.overload_name}" if schema.overload_name else schema.name
    if not torch._C._dispatch_has_kernel(full):  # TorchScript's own, which save and load files
        return False
    for value in (*schema.arguments, *schema.returns):
        kind = _TYPE.fullmatch(str(value.type))
        if kind is None or (kind[1] and value.name not in _MODES):
            return False
    return True
