"""The commands of docs/reliability-tests.md run what they name: ``-k`` filters all files of a
command, and one of which it leaves nothing would prove nothing."""

from __future__ import annotations

import ast
import re
import shlex
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "reliability-tests.md"
_COMMAND = re.compile(r"`python -m pytest ([^`]+)`")
_WORDS = re.compile(r"\w+( or \w+)*")


def commands() -> list[str]:
    return sorted(set(_COMMAND.findall(PAGE.read_text(encoding="utf-8"))))


def names_of(path: Path) -> list[str]:
    """The names of its tests as ``-k`` sees them, with those of their class and module."""
    found = []
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.ClassDef) and node.name.startswith("Test"):
            inner = [n for n in node.body if isinstance(n, ast.FunctionDef)]
            found += [f"{path.name} {node.name} {n.name}" for n in inner if _is_test(n)]
        elif isinstance(node, ast.FunctionDef) and _is_test(node):
            found.append(f"{path.name} {node.name}")
        elif isinstance(node, ast.Assign):  # a hypothesis state machine
            targets = [t.id for t in node.targets if isinstance(t, ast.Name)]
            found += [f"{path.name} {t}" for t in targets if t.startswith("Test")]
    return found


def _is_test(node: ast.FunctionDef) -> bool:
    return node.name.startswith("test")


def problems(command: str) -> list[str]:
    words = shlex.split(command)
    wanted = [""]
    if "-k" in words:
        at = words.index("-k")
        if not _WORDS.fullmatch(words[at + 1]):
            return [f"more than this test understands: -k {words[at + 1]}"]
        wanted = words[at + 1].lower().split(" or ")
        del words[at : at + 2]
    out = []
    for word in words:
        files = sorted(ROOT.glob(word))
        if word.startswith("-") or not files:
            out.append(f"no such file: {word}")
        for path in files:
            inner = sorted(path.rglob("test_*.py")) if path.is_dir() else [path]
            names = [name.lower() for f in inner for name in names_of(f)]
            if not any(w in name for w in wanted for name in names):
                out.append(f"nothing of {path.relative_to(ROOT)} is run")
    return out


def test_there_are_commands() -> None:
    assert len(commands()) >= 40


@pytest.mark.parametrize("command", commands())
def test_a_command_runs_something_of_each_file_it_names(command: str) -> None:
    assert not problems(command)


@pytest.mark.parametrize(
    ("command", "word"),
    [
        ('tests/fault/test_worker.py -k "at_work" tests/unit/test_atwork.py', "test_atwork.py"),
        ("tests/unit/test_nothing.py", "no such file"),
        ("tests/unit/test_waiting.py -k nobody_is_called_so", "test_waiting.py"),
        ("tests/unit/test_nothing_*.py", "no such file"),
        ('tests/unit/test_waiting.py -k "wait and not park"', "understands"),
        ("--lf tests/unit/test_waiting.py", "--lf"),
    ],
)
def test_a_planted_command_that_skips_what_it_names_is_found(command: str, word: str) -> None:
    (problem,) = problems(command)
    assert word in problem
