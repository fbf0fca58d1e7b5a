"""The fault matrix of docs/reliability-tests.md: each fault has a test, and each test is there."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "reliability-tests.md"
_NAMED = re.compile(r"`(tests/[a-z_/]+\.py)?(?:::(\w+))?`")


def matrix() -> str:
    text = PAGE.read_text(encoding="utf-8")
    _, found, rest = text.partition("## The fault matrix\n")
    assert found
    return rest.partition("\n## ")[0]


def rows(section: str) -> list[list[str]]:
    """Cells of each row below the head."""
    lines = [line for line in section.splitlines() if line.startswith("|")]
    return [[c.strip() for c in line.strip("|").split(" | ")] for line in lines[2:]]


def named(text: str) -> list[tuple[str, str]]:
    """(file, test) of each reference; a test without a file is in the one named before."""
    out, file = [], ""
    for path, test in _NAMED.findall(text):
        file = path or file
        if path or test:
            out.append((file, test))
    return out


def problems(section: str) -> list[str]:
    out = []
    for row in rows(section):
        if len(row) != 3 or not all(row):
            out.append(f"not three cells: {row}")
        elif not any(test for _, test in named(row[2])):
            out.append(f"no test: {row[0]}")
    for file, test in named(section):
        path = ROOT / file
        if not path.is_file():
            out.append(f"no such file: {file}")
        elif test and test not in functions(path):
            out.append(f"no such test: {file}::{test}")
    return out


def functions(path: Path) -> set[str]:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    return {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}


def test_each_fault_has_a_test_that_is_there() -> None:
    section = matrix()
    assert len(rows(section)) >= 20
    assert not problems(section)


@pytest.mark.parametrize(
    "row",
    [
        "| a fault | it is survived | by hope |",
        "| a fault | it is survived |",
        "| a fault | it is survived | `tests/fault/test_nothing.py::test_it` |",
        "| a fault | it is survived | `tests/unit/test_fault_matrix.py::test_nothing` |",
        "| a fault | it is survived | `tests/unit/test_fault_matrix.py` |",
    ],
)
def test_a_planted_row_without_a_test_is_found(row: str) -> None:
    assert problems(f"| fault | what | test |\n|---|---|---|\n{row}\n")
