"""Texts of a program's description that torch would evaluate, import or write into code."""

from __future__ import annotations

import json
from typing import Any

import pytest

pytest.importorskip("torch")

from blockflow.engine.targets import RefusedProgram
from blockflow.engine.vetting import refuse_formula, vet

S = "Symbol('s31', positive=True, integer=True)"


@pytest.mark.parametrize(
    "text",
    [
        S,
        f"Add({S}, Integer(-3))",
        f"Max(Integer(1), Add(FloorDiv(Add({S}, Integer(-3)), Integer(2)), Integer(1)))",
        f"Mul(Rational(1, 2), Float('0.5', precision=53), Mod({S}, Integer(3)))",
        f"GreaterThan({S}, Integer(2))",
        "2*s0 + (s1 // 3) % 2",
    ],
)
def test_formulas_of_exports(text: str) -> None:
    refuse_formula(text)


@pytest.mark.parametrize(
    "text",
    [
        f"(__import__('os').system('true'), {S})[1]",
        "exec('1')",
        "Symbol('s0').func",
        "Symbol('s0', cls=exec)",
        "Symbol('__import__(1)')",
        "[s0 for s0 in s1]",
        "lambda: s0",
        "open(s0)",
        "S('s0')",
        "s0 if s1 else s2",
        "Max(*s0)",
        "s0\n",
        "s0 # s1",
        "f'{s0}'",
        "(" * 300 + "s0" + ")" * 300,
        "",
    ],
)
def test_formulas_that_are_more(text: str) -> None:
    with pytest.raises(RefusedProgram, match="formula"):
        refuse_formula(text)


def spec_of(kind: str | None, context: str | None) -> str:
    return json.dumps([1, {"type": kind, "context": context, "children_spec": []}])


ENUM = json.dumps([{"__enum__": True, "fqn": "antigravity:x", "name": "y"}])


@pytest.mark.parametrize(
    "part",
    [
        {"in_spec": spec_of("builtins.dict", ENUM)},
        {"out_spec": spec_of("collections.defaultdict", "null")},
        {"in_spec": spec_of("builtins.dict", '["a\']"]')},
        {"in_spec": "no json"},
        {"arg": {"as_operator": "torch.os.system"}},
        {"as_tensor": {"name": "x=print(1)"}},
        {"parameter_name": 'linear.weight")'},
        {"guards_code": ["__import__('os')"]},
        {"guards_code": ["L['x'].__class__ == 1"]},
        {"guards_code": ["L['x'].size()[1] >= 2\nprint()"]},
        {"tensor_values": {"metadata": {"sizes": [{"as_expr": {"expr_str": "print()"}}]}}},
        {"tensor_values": {"x'": {}}},
    ],
)
def test_other_texts_that_torch_would_run(part: Any) -> None:
    with pytest.raises(RefusedProgram):
        vet({"graph_module": [part]})


def test_texts_of_exports() -> None:
    vet(
        {
            "in_spec": spec_of("builtins.dict", '["x"]'),
            "out_spec": spec_of(None, None),
            "guards_code": ["L['args'][0][0].size()[1] >= 2", "Eq(Mod(4, 2), 0)"],
            "metadata": {"stack_trace": 'File "a.py", line 1\n  f(x)'},
            "arg": {"as_string": "none'"},
            "name": None,
            "torch_version": "2.13.0+cpu",
        }
    )
