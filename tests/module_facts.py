"""The modules of the project, and what is asked about each: its imports, and what it may not do."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from bans import banned

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "blockflow"


@dataclass(frozen=True)
class Import:
    """One imported name: ``module`` is absolute; ``lazy`` if it stands inside a function."""

    module: str
    line: int
    lazy: bool


@dataclass(frozen=True)
class Module:
    path: Path

    @property
    def name(self) -> str:
        parts = self.path.relative_to(ROOT).with_suffix("").parts
        return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)

    @property
    def room(self) -> str:
        """The room of a module of the package; '' for blockflow/__init__ and __main__."""
        parts = self.path.relative_to(PACKAGE).parts
        return parts[0] if len(parts) > 1 else ""

    @property
    def imports(self) -> Sequence[Import]:
        return facts(self).imports

    @property
    def bans(self) -> Sequence[tuple[int, str]]:
        return facts(self).bans

    def at(self, line: int) -> str:
        return f"{self.path.relative_to(ROOT)}:{line}"


@dataclass(frozen=True)
class Facts:
    """What is asked about a module. Its tree is not kept: the collector would go through all of
    them again and again, for longer than it takes to read them."""

    imports: Sequence[Import]
    bans: Sequence[tuple[int, str]]


@cache
def facts(module: Module) -> Facts:
    tree = ast.parse(module.path.read_text(encoding="utf-8"), filename=str(module.path))
    return Facts(tuple(imports_of(tree, module.name)), tuple(banned(tree)))


@cache
def modules() -> tuple[Module, ...]:
    return tuple(Module(p) for p in sorted(PACKAGE.rglob("*.py")))


@cache
def programs() -> tuple[Module, ...]:
    """Everything that ships and runs, tools and examples included."""
    extra = (p for d in ("tools", "examples") for p in sorted((ROOT / d).rglob("*.py")))
    return (*modules(), *(Module(p) for p in extra))


def is_type_checking(node: ast.If) -> bool:
    test = node.test
    return (isinstance(test, ast.Name) and test.id == "TYPE_CHECKING") or (
        isinstance(test, ast.Attribute) and test.attr == "TYPE_CHECKING"
    )


PARTS = ("body", "handlers", "orelse", "finalbody", "cases")
"""Where statements hold statements. An import is one; what they hold besides is not looked at."""


def imports_of(tree: ast.AST, module: str = "") -> Iterator[Import]:
    """All imports, from-imports once per name so that ``from blockflow import core`` is seen.

    Imports for type checkers alone are left out: they do not run.
    """

    def walk(node: ast.AST, lazy: bool) -> Iterator[Import]:
        if isinstance(node, ast.Import):
            yield from (Import(a.name, node.lineno, lazy) for a in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                base = ".".join([*module.split(".")[: -node.level], *filter(None, [base])])
            yield from (Import(f"{base}.{a.name}", node.lineno, lazy) for a in node.names)
        elif isinstance(node, ast.If) and is_type_checking(node):
            for child in node.orelse:
                yield from walk(child, lazy)
        else:
            inner = lazy or isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
            for part in PARTS:
                for child in getattr(node, part, ()):
                    yield from walk(child, inner)

    return walk(tree, False)


def top(module: str) -> str:
    return module.split(".", 1)[0]
